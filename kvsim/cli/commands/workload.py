"""``kvsim workload``: look at request streams, and fit generators to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.advice.request_source import open_stream
from kvsim.advice.workload_fit import fit as fit_generator
from kvsim.advice.workload_fit import statistics_dict
from kvsim.cli import workload_table as show_workload
from kvsim.cli.console import console, print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.results import writable
from kvsim.scenario.named_workloads import NAMED, named_source, named_text
from workloads import KINDS, Workload
from workloads.fitting.statistics import describe as describe_stream

app = typer.Typer(help="Look at request streams, and fit generators to them.", no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(metavar="TRACE|SCENARIO|NAME", help="A trace file, a scenario, or a named workload.")
]
Kind = Annotated[str | None, typer.Option(help=f"What the trace is, where it cannot be told: {', '.join(KINDS)}.")]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out, and say which.")]
DropFailed = Annotated[bool, typer.Option("--drop-failed", help="BurstGPT: leave out calls that failed (0 tokens).")]
ContinueClock = Annotated[
    bool, typer.Option("--continue-clock", help="RAGPulse: where the clock falls by days, go on a week later.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def describe(
    source: Source,
    kind: Kind = None,
    skip_bad_rows: SkipBadRows = False,
    drop_failed: DropFailed = False,
    continue_clock: ContinueClock = False,
    as_json: Json = False,
) -> None:
    """How many, how bursty, how long, how much is said again."""
    stream, name = _open(source, kind, skip_bad_rows, drop_failed, continue_clock)
    told = describe_stream(stream)
    if as_json:
        print_json({"name": name, **statistics_dict(told), "notes": list(stream.notes)})
    else:
        show_workload.statistics(console(), name, told)
    warn(stream.notes)


@app.command()
def fit(
    source: Source,
    kind: Kind = None,
    skip_bad_rows: SkipBadRows = False,
    drop_failed: DropFailed = False,
    continue_clock: ContinueClock = False,
    seed: Annotated[int, typer.Option(help="Of the streams drawn from the candidates.", min=0)] = 1,
    out: Annotated[Path, typer.Option(help="Where the picture and the tables go.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Fit a generator, print it as a section of a scenario, and draw the stream beside a model of it."""
    stream, name = _open(source, kind, skip_bad_rows, drop_failed, continue_clock)
    target = out / f"workload-{name}"
    if not as_json:
        writable(target)
    with RunProgress(f"fitting {name}", 100) as progress:
        fitted = fit_generator(stream, name, seed=seed, report=progress.share)
    if as_json:
        print_json(fitted.to_dict())
    else:
        show_workload.fit(console(), fitted)
        written = fitted.save(target)
        typer.echo(f"\nSaved {', '.join(path.name for path in written)} in {target}/")
    warn(stream.notes)


@app.command("list")
def list_named(as_json: Json = False) -> None:
    """The named workloads that ship with the package: generators fitted to public traces."""
    lines = {name: named_source(name) for name in NAMED}
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
    else:
        for name, line in lines.items():
            typer.echo(f"{name:16} {line}")


@app.command("show")
def show_named(name: Annotated[str, typer.Argument(help="A named workload.")]) -> None:
    """Print a named workload as a section of a scenario, with its source."""
    typer.echo(named_text(name), nl=False)


def _open(source: str, kind: str | None, skip: bool, drop_failed: bool, continue_clock: bool) -> tuple[Workload, str]:
    """The stream, and a name for it."""
    options: dict[str, Any] = {}
    if skip:
        options["skip_bad_rows"] = True
    if drop_failed:
        options["failed"] = "drop"
    if continue_clock:
        options["clock_reset"] = "continue"
    return open_stream(source, kind, **options)
