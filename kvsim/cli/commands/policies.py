"""``kvsim policies``: what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, print_json
from kvsim.cli.options import Json, Plugins, load_plugins
from kvsim.errors import UserError, no_such

app = typer.Typer(add_completion=False)


@app.command()
def policies(
    name: Annotated[
        str | None, typer.Argument(help="The policy to explain.", autocompletion=completion.policies)
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the installed policies, or explain one."""
    from kvsim.cli.tables.policies import show_policies, show_preset
    from policies import available, current_name, why_left_out

    load_plugins(plugin)
    known = available()
    if name is None:
        lines = {key: preset.summary for key, preset in known.items()}
        if as_json:
            print_json(lines)
        else:
            show_policies(console(), known.values())
        return
    name = current_name(name)
    if name not in known:
        raise UserError(why_left_out(name) or no_such("policy", name, known))
    preset = known[name]
    if as_json:
        fields = ("name", "summary", "layout", "compactor", "trigger", "kernel", "parameters", "source", "engine")
        print_json({field: getattr(preset, field) for field in fields})
    else:
        show_preset(console(), preset)
