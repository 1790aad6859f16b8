"""``kvsim why``: which causes make requests slow, and what to try."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, point_to_questions
from kvsim.cli.option_groups import ServedOptions, takes_groups
from kvsim.cli.options import Json, Out, Plots, Plugins, Policy, load_plugins
from kvsim.cli.progress import RunProgress
from kvsim.results import writable

app = typer.Typer(add_completion=False)


@app.command()
@takes_groups
def why(
    of: ServedOptions,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO|RESULTS",
            help="A scenario, a folder that compare wrote, or a file with the output of validate --json.",
            autocompletion=completion.scenarios,
        ),
    ] = "chat",
    policy: Policy = None,
    plugin: Plugins = None,
    plots: Plots = False,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Explain why requests are slow: what each second was spent on, early against late and fast against slow."""
    from kvsim.advice.why.diagnosis import why as diagnose

    load_plugins(plugin)
    with RunProgress(source) as progress:
        found = diagnose(source, policy, progress=progress, **of.served)
    target = out / found.scenario if as_json else writable(out / found.scenario)
    answer(found, as_json)
    if as_json:
        return
    written = found.save(target, plots=plots)
    typer.echo(f"\nSaved {' and '.join(path.name for path in written)} in {target}/")
    point_to_questions("slow")
