"""``kvsim policies``: what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, print_json
from kvsim.cli.options import Json
from kvsim.errors import UserError, no_such

if TYPE_CHECKING:
    from policies import PolicyFactory, Preset

app = typer.Typer(add_completion=False)


@app.command()
def policies(
    name: Annotated[
        str | None, typer.Argument(help="The policy to explain.", autocompletion=completion.policies)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the installed policies, or explain one."""
    from kvsim.cli.tables.policies import show_names, show_preset
    from policies import available, current_name

    known = available()
    if name is None:
        lines = {key: _summary(factory) for key, factory in known.items()}
        if as_json:
            print_json(lines)
        else:
            show_names(console(), lines)
        return
    name = current_name(name)
    if name not in known:
        raise UserError(no_such("policy", name, known))
    preset = _as_preset(name, known[name])
    if as_json:
        fields = ("name", "summary", "layout", "compactor", "trigger", "kernel", "parameters", "source", "engine")
        print_json({field: getattr(preset, field) for field in fields})
    else:
        show_preset(console(), preset)


def _as_preset(name: str, factory: PolicyFactory) -> Preset:
    """The policy with its four choices, which a plug-in may leave out."""
    from policies import Preset

    if isinstance(factory, Preset):
        return factory
    unknown = "not stated"
    return Preset(
        name=name,
        summary=_summary(factory),
        layout=unknown,
        compactor=unknown,
        trigger=unknown,
        kernel=unknown,
        parameters=(),
        source=f"plug-in {factory!r}",
        build=lambda _, config: factory(config),
    )


def _summary(factory: PolicyFactory) -> str:
    from policies import Preset

    if isinstance(factory, Preset):
        return factory.summary
    return next(iter((factory.__doc__ or "a plug-in without a description").strip().splitlines()))
