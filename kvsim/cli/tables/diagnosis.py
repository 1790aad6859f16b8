"""What ``kvsim why`` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvsim.advice.why.contrast import CAUSES, Contrast, seconds
from kvsim.advice.why.diagnosis import Diagnosis
from kvsim.cli.tables.formats import new_table, show_basis
from kvsim.errors import counted


def show_diagnosis(console: Console, found: Diagnosis) -> None:
    """Print the conclusion, both contrasts, and what to try."""
    show_basis(console, found.basis)
    kind = "measured" if found.measured else "simulated"
    counts = f"{counted(len(found.completed), 'completed request')} ({kind})"
    if found.failed:
        counts += f"; {found.failed:,} failed and are not in the table"
    console.print(f"[bold]{found.scenario}[/] under [bold]{found.policy}[/], {counts}", highlight=False)
    if found.note:
        console.print(found.note, highlight=False, markup=False)
    console.print(found.sentence, highlight=False, markup=False, soft_wrap=True)
    for contrast in (found.over_time, found.across):
        console.print()
        console.print(_causes(contrast))
        if contrast.slower and not contrast.adds_up:
            added = seconds(contrast.difference_s + contrast.given_back_s)
            note = f"share: of the {added} that causes add; other causes give back {seconds(contrast.given_back_s)}"
            console.print(note, style="dim", highlight=False)
    if found.remedies:
        console.print("\n[bold]To try[/]", highlight=False)
    for remedy in found.remedies:
        console.print(f"- {remedy.what}", highlight=False, soft_wrap=True)
        console.print(f"    here:   {remedy.kvsim}", highlight=False, markup=False, soft_wrap=True)
        if engine := remedy.engine(found.policy):
            console.print(f"    engine: {engine}", highlight=False, markup=False, soft_wrap=True)


def _causes(contrast: Contrast) -> Table:
    """The causes that took any time, and their sum."""
    first, second = contrast.names
    table = new_table("mean seconds spent on", first, second, "difference", "share")
    for cause, row in contrast.rows():
        if not row[first] and not row[second]:
            continue
        share = f"{row['share']:.0%}" if contrast.slower and row["difference"] > 0 else "–"
        cells = (seconds(row[column]) for column in (first, second, "difference"))
        table.add_row(CAUSES[cause], *cells, share)
    table.add_section()
    share = "100%" if contrast.slower and contrast.adds_up else "–"
    table.add_row("in all", *map(seconds, (*contrast.means_s, contrast.difference_s)), share)
    return table
