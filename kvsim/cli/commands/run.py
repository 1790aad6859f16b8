"""``kvsim run``: one scenario under one policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from kvsim.cli.console import answer, point_to_questions, warn
from kvsim.cli.option_groups import ScenarioOptions, takes_groups
from kvsim.cli.options import Check, Json, Plugins, Policy, load_plugins
from kvsim.cli.progress import RunProgress

app = typer.Typer(add_completion=False)


class Detail(StrEnum):
    """What a run records, as far as it can be printed: part of ``recorder.Detail``."""

    requests = "requests"
    cache = "cache"


@app.command()
@takes_groups
def run(
    of: ScenarioOptions,
    policy: Policy = None,
    plugin: Plugins = None,
    detail: Annotated[
        Detail,
        typer.Option(help="What to record: the cache too, or requests only, which is much faster for long runs."),
    ] = Detail.cache,
    check: Check = False,
    as_json: Json = False,
) -> None:
    """Run one scenario under one policy."""
    from kvsim.simulation.run import run as run_scenario

    load_plugins(plugin)
    loaded = of.load(under=policy)
    with RunProgress(policy or loaded.cache.policy, loaded.build_workload().n_requests) as progress:
        result = run_scenario(loaded, policy, progress=progress, detail=detail.value, check=check)
    warn(result.warnings)
    answer(result, as_json, of=lambda result: result.summary)
    if not as_json and (words := _questions_about(result.summary)):
        point_to_questions(words)


def _questions_about(summary: dict[str, Any]) -> str:
    """Words of the questions that a result raises; empty if it raises none."""
    if summary["failed"]:
        return "requests fail"
    if summary["queue"]["unstable"]:
        return "slow"
    return "preempted" if summary["preemptions"] else ""
