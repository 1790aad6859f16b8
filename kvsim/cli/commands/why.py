"""``kvsim why``: which causes make requests slow, and what to try."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, point_to_questions
from kvsim.cli.option_groups import ScenarioOptions, refuse, takes_groups
from kvsim.cli.options import Json, Out, Plots, Plugins, Policy, load_plugins
from kvsim.cli.progress import RunProgress
from kvsim.results import writable

app = typer.Typer(add_completion=False)

_OF_SCENARIOS = ("scheduler", "seed", "requests", "profile", "columns", "time", "skip_bad_rows")
"""Options that change a scenario beside what serves it."""


@dataclass(frozen=True, kw_only=True)
class Explained(ScenarioOptions):
    """A scenario, or results, and what is replaced in it."""

    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO|RESULTS",
            help="A scenario, a trace, a folder that compare wrote, or a file with the output of validate --json.",
            show_default="chat",
            autocompletion=completion.scenarios,
        ),
    ] = None


@app.command()
@takes_groups
def why(
    of: Explained,
    policy: Policy = None,
    plugin: Plugins = None,
    plots: Plots = False,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Explain why requests are slow: what each second was spent on, early against late and fast against slow."""
    from kvsim.advice.why.diagnosis import why as diagnose

    load_plugins(plugin)
    source = of.scenario
    with RunProgress(source or "why") as progress:
        if source is not None and (source.endswith(".json") or Path(source).is_dir()):  # By kvsim validate, or compare.
            refuse(of, f"of a scenario; {source} has results", *_OF_SCENARIOS)
            found = diagnose(source, policy, progress=progress, **of.served)
            source = found.source
        else:
            found = diagnose(of.load(under=policy), policy, progress=progress)
    words = [source or "", of.typed, *(f"--plugin {shlex.quote(str(path))}" for path in plugin or ())]
    found = replace(found, source=" ".join(filter(None, words)) or "chat")
    target = out / found.scenario if as_json else writable(out / found.scenario)
    answer(found, as_json)
    if as_json:
        return
    written = found.save(target, plots=plots)
    typer.echo(f"\nSaved {' and '.join(path.name for path in written)} in {target}/")
    point_to_questions("slow")
