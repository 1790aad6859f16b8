"""``kvsim policies``: what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import print_json, print_report
from kvsim.cli.options import Json, Plugins, load_plugins
from kvsim.errors import UserError, no_such

app = typer.Typer(add_completion=False)

_SHOWN = (
    *("name", "summary", "layout", "compactor", "trigger", "kernel"),
    *("parameters", "source", "engine", "group", "against", "measured"),
)
"""What of a preset the option --json shows."""


@app.command()
def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy or scheduler to explain.", autocompletion=completion.policies_and_schedulers),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the installed policies and the schedulers with their versions, or explain one."""
    from kvsim.reports.policies_report import policies_report, preset_report, scheduler_report
    from kvsim.scenario.server_defaults import SCHEDULERS
    from policies import available, current_name, why_left_out

    load_plugins(plugin)
    known = available()
    if name is None:
        lines = {key: preset.summary for key, preset in known.items()}
        if as_json:
            print_json(lines)
        else:
            print_report(policies_report(known.values()))
        return
    if name in SCHEDULERS.names() and name not in known:
        if as_json:
            print_json({"name": name, "summary": SCHEDULERS.summary(name)})
        else:
            print_report(scheduler_report(name))
        return
    name = current_name(name)
    if name not in known:
        raise UserError(why_left_out(name) or no_such("policy or scheduler", name, [*known, *SCHEDULERS.names()]))
    preset = known[name]
    if as_json:
        print_json({field: getattr(preset, field) for field in _SHOWN})
    else:
        print_report(preset_report(preset))
