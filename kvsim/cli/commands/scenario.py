"""``kvsim scenario``: look at scenarios."""

from __future__ import annotations

import typer

from kvsim.cli.console import print_json
from kvsim.cli.option_groups import ScenarioOptions, takes_groups
from kvsim.cli.options import Json

app = typer.Typer(
    add_completion=False,
    help="List the built-in scenarios, or show one with every default filled in.",
    no_args_is_help=True,
)


@app.command("show")
@takes_groups
def show_scenario(of: ScenarioOptions, as_json: Json = False) -> None:
    """Print a scenario with every default filled in, and the versions of engines that it stands for."""
    from kvsim.scenario.server_defaults import SCHEDULERS

    loaded = of.load()
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        typer.echo(f"# scheduler {loaded.server.scheduler}: {SCHEDULERS.summary(loaded.server.scheduler)}")
        engine = "a layout of no engine" if loaded.engine is None else str(loaded.engine)
        typer.echo(f"# policy {loaded.cache.policy}: {engine}")
        typer.echo(loaded.to_toml(), nl=False)


@app.command("list")
def list_scenarios() -> None:
    """List the built-in scenarios."""
    from kvsim.scenario.builtin import builtin_names

    for name in builtin_names():
        typer.echo(name)
