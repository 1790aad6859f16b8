"""``kvsim why``: which causes make requests slow, and what to try."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvsim.advice.why import CAUSES, Contrast, Diagnosis, seconds
from kvsim.advice.why import why as diagnose
from kvsim.cli.console import console, print_json
from kvsim.results import writable


def why(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO|RESULTS",
            help="A scenario, a folder that compare wrote, or a file of what validate --json printed.",
        ),
    ] = "chat",
    policy: Annotated[str | None, typer.Option("--policy", "-p", help="Replace the scenario's policy.")] = None,
    out: Annotated[Path, typer.Option(help="Where the picture and the table go.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Why requests slow down: on what each second was spent, early against late and fast against slow."""
    found = diagnose(source, policy)
    if as_json:
        print_json(found.to_dict())
        return
    target = writable(out / found.scenario)
    _print(console(), found)
    written = found.save(target)
    typer.echo(f"\nSaved {' and '.join(path.name for path in written)} in {target}/")


def _print(to: Console, found: Diagnosis) -> None:
    """The sentence, both contrasts, and the remedies."""
    kind = "measured" if found.measured else "simulated"
    counts = f"{len(found.requests):,} completed requests ({kind})"
    if found.failed:
        counts += f"; {found.failed:,} failed and are left out of the table"
    to.print(f"[bold]{found.scenario}[/] under [bold]{found.policy}[/], {counts}", highlight=False)
    if found.note:
        to.print(found.note, highlight=False, markup=False)
    to.print(found.sentence, highlight=False, markup=False)
    for contrast in (found.over_time, found.across):
        to.print()
        to.print(_table(contrast))
    if found.remedies:
        to.print("\n[bold]To try[/]", highlight=False)
    for remedy in found.remedies:
        to.print(f"- {remedy.what}", highlight=False, soft_wrap=True)
        to.print(f"    here:   {remedy.kvsim}", highlight=False, markup=False, soft_wrap=True)
        to.print(f"    engine: {remedy.engine}", highlight=False, markup=False, soft_wrap=True)


def _table(contrast: Contrast) -> Table:
    """Causes that took any time, and their sum."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("mean seconds spent on", *contrast.names, "difference", "share"):
        table.add_column(head, justify="left" if head.startswith("mean") else "right")
    first, second = contrast.names
    rows = contrast.table[(contrast.table[[first, second]] != 0).any(axis=1)]
    for cause, row in rows.iterrows():
        share = f"{row['share']:.0%}" if contrast.slower else "–"
        cells = (seconds(row[column]) for column in (first, second, "difference"))
        table.add_row(CAUSES[str(cause)], *cells, share)
    table.add_section()
    share = "100%" if contrast.slower else "–"
    table.add_row("in all", *map(seconds, (*contrast.means_s, contrast.difference_s)), share)
    return table
