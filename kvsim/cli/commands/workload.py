"""``kvsim workload``: describe request streams, and fit generators to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_json, print_report, print_saved, warn
from kvsim.cli.option_groups import TraceOptions, UsersOptions, takes_groups
from kvsim.cli.options import Json, Out
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.advice.workload_fit.request_source import Stream

app = typer.Typer(
    add_completion=False, help="Describe request streams, and fit generators to them.", no_args_is_help=True
)

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="TRACE|SCENARIO|NAME",
        help="A trace file, a scenario, or a named workload.",
        autocompletion=completion.streams,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        help="The kind of trace, if the file does not show it: azure, burstgpt, mooncake, ragpulse, weka, recorded, "
        "observed, log, table.",
        autocompletion=completion.trace_kinds,
    ),
]


@app.command()
@takes_groups
def describe(
    users: UsersOptions,
    trace: TraceOptions,
    source: Source = None,
    kind: Kind = None,
    as_json: Json = False,
) -> None:
    """Show how many requests a stream has, how bursty and how long they are, and how much of them repeats."""
    from kvsim.advice.workload_fit.fit import describe_stream, statistics_dict

    stream, name, block_size = _open(source, kind, trace, users)
    found = describe_stream(stream, block_size)
    if as_json:
        print_json({"name": name, **statistics_dict(found), "notes": list(stream.notes)})
    else:
        from kvsim.reports.workload_report import statistics_report

        print_report(statistics_report(name, found))
    warn(stream.notes)


@app.command()
@takes_groups
def fit(
    trace: TraceOptions,
    source: Source = None,
    kind: Kind = None,
    seed: Annotated[int, typer.Option(help="Seed of the streams drawn from the candidates.", min=0)] = 1,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Fit a generator, print it as a section of a scenario, and plot it beside the stream."""
    from kvsim.advice.workload_fit.fit import fit as fit_generator

    stream, name, block_size = _open(source, kind, trace)
    target = out / f"workload-{name}"
    if not as_json:
        writable(target)
    with RunProgress(f"fitting {name}", 100) as progress:
        fitted = fit_generator(stream, name, block_size=block_size, seed=seed, report=progress.share)
    answer(fitted, as_json)
    if not as_json:
        print_saved(fitted.save(target), target)
    warn(stream.notes)


@app.command("list")
def list_named(as_json: Json = False) -> None:
    """List the named workloads: generators fitted to public traces, shipped with the package."""
    from kvsim.scenario.named_workloads import NAMED, named_source

    lines = {name: named_source(name) for name in NAMED}
    if as_json:
        print_json(lines)
    else:
        for name, line in lines.items():
            typer.echo(f"{name:16} {line}")


@app.command("show")
def show_named(
    name: Annotated[str, typer.Argument(help="A named workload.", autocompletion=completion.workloads)],
) -> None:
    """Print a named workload as a section of a scenario, with its source."""
    from kvsim.scenario.named_workloads import named_text

    typer.echo(named_text(name), nl=False)


def _open(source: str | None, kind: str | None, trace: TraceOptions, users: UsersOptions | None = None) -> Stream:
    from kvsim.advice.workload_fit.request_source import open_stream

    if users is not None and (of_users := users.traffic):
        if source is not None:
            raise UserError(f"{source}, --users: both say what is asked; give one of them")
        from kvsim.scenario.scenario import load_scenario

        return open_stream(load_scenario({"name": "users", **of_users}))
    if source is None:
        raise UserError(
            "TRACE|SCENARIO|NAME: missing; a trace file, a scenario, a named workload or --users is expected"
        )
    return open_stream(source, kind, **trace.table, **trace.keys)
