"""``kvsim prefix-cache``: how often a prefix cache would hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, warn
from kvsim.cli.option_groups import ScenarioOptions, TraceOptions, UsersOptions, takes_groups
from kvsim.cli.options import Json, Out, Plugins, Requests, load_plugins
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario

app = typer.Typer(add_completion=False)


@app.command()
@takes_groups
def prefix_cache(
    users: UsersOptions,
    trace: TraceOptions,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO|TRACE", help="A scenario, or a trace file.", autocompletion=completion.scenarios
        ),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(
            "--eviction", "-e", help="Can be given several times; by default all.", autocompletion=completion.evictions
        ),
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="Cache sizes in blocks, separated by commas.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block; by default the scenario's.", min=1)] = None,
    requests: Requests = None,
    plugin: Plugins = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Show how often a prefix cache would hit, by its size and eviction order.

    A trace that does not say which prompts share a beginning has no hit rates; they are unknown.
    """
    from kvsim.experiments.prefix_cache import prefix_cache as study_prefixes
    from kvsim.scenario.scenario import load_scenario

    load_plugins(plugin)
    of = ScenarioOptions(scenario=scenario, requests=requests, skip_bad_rows=trace.skip_bad_rows)
    if scenario is None:
        if not users.traffic:
            raise UserError("SCENARIO|TRACE: missing; a scenario, a trace file or --users is expected")
        loaded = of.load(load_scenario({"name": "users", **users.traffic}))
    else:
        loaded = load_scenario(of.load(_replayed(scenario, replace(trace, skip_bad_rows=False))), **users.traffic)
    sizes = None if blocks is None else _numbers("--blocks", blocks)
    chosen = [_eviction(name) for name in eviction] if eviction else None
    with RunProgress(loaded.name, 100) as progress:
        study = study_prefixes(loaded, chosen, sizes, block_size=block_size, progress=progress.share)
    answer(study, as_json)
    if not as_json and study.reuse is not None:
        written = study.save(out / loaded.name)
        typer.echo(f"\nSaved {' and '.join(path.name for path in written)} in {written[0].parent}/")
    warn(study.notes)


def _replayed(name: str, options: TraceOptions) -> Scenario | None:
    """A scenario that replays the trace file of this name; None if it is that of a scenario itself."""
    from kvsim.scenario.builtin import is_trace
    from kvsim.scenario.trace_files import trace_scenario

    if is_trace(name):
        return trace_scenario(name, own_blocks=True, **options.table, **options.keys)
    if options != TraceOptions():
        given = "--columns, --time, --drop-failed and --continue-clock"
        raise UserError(f"{name}: {given} are for trace files; a scenario has them in [workload]")
    return None


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n <= 2**28 for n in numbers):
        raise UserError(f"{option}: {text!r}: whole numbers from 1 to 2**28 are expected, separated by commas")
    return numbers


def _eviction(name: str) -> str:
    from kvsim.scenario.server_defaults import known_in
    from policies.paging.eviction import EVICTION_ORDERS

    try:
        return known_in(EVICTION_ORDERS, name)
    except ValueError as e:
        raise UserError(f"--eviction: {e}") from None
