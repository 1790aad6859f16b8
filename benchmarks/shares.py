"""Where the simulator's time goes: ``python -m benchmarks.shares PRESET... [--scheduler vllm] [--detail requests]
[--load 0.7] [--requests SHARE] [--json | --markdown]``.

A run for each combination, in a process of its own, in which a timer of the processor's time looks every few
milliseconds at which function runs. Compiled modules do not show in that, so the runs are of Python alone
(``KVSIM_PURE=1``): of compiled code they say what was worth compiling, not what is left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.preset_tables import Part, in_console, in_markdown
from benchmarks.runs import NORMAL, service_rate, task, usual
from benchmarks.speed import Task, run_isolated
from kvsim.cli.commands.run import Detail
from kvsim.errors import no_such
from policies import available

TURNS = 5
"""Requests of a run, as many times those that are usual."""
_MOST = 3
"""Functions that are named."""


def shares_of(given: Task, load: float) -> dict[str, Any]:
    """Shares of a run's samples by part, and by function where they are largest. Raises ``RuntimeError``."""
    rate = load * service_rate(given, 1.0)
    found = run_isolated(replace(given, rate=rate, sample=True))
    total = max(found["samples"], 1)
    functions = {name: n for part in found["parts"].values() for name, n in part.items()}
    most = sorted(functions, key=functions.__getitem__, reverse=True)[:_MOST]
    return {
        "policy": given.policy,
        "scheduler": given.scheduler,
        "detail": given.detail,
        "load": load,
        "requests": given.requests,
        "samples": found["samples"],
        "parts": {part: sum(names.values()) / total for part, names in found["parts"].items()},
        "functions": {name: functions[name] / total for name in most},
    }


def parts_of(runs: Sequence[dict[str, Any]]) -> list[Part]:
    """The shares of all runs in one table, and where each was most."""
    names = sorted(runs[0]["parts"], key=lambda part: -sum(run["parts"][part] for run in runs))
    rows = [[name, *(f"{run['parts'][name]:.0%}" for run in runs)] for name in names]
    rows.append(["samples", *(f"{run['samples']:,}" for run in runs)])
    text = f"Shares of the processor's time, of Python alone, at {runs[0]['load']:g} of the rate of service:"
    most = [
        f"{_heading(run)}: {', '.join(f'{name} {share:.0%}' for name, share in run['functions'].items())}"
        for run in runs
    ]
    heads = ["part", *map(_heading, runs)]
    return [Part(text, heads=heads, rows=rows), Part(f"Most of it in: {'; '.join(most)}.")]


def _heading(run: dict[str, Any]) -> str:
    return f"`{run['policy']}`, `{run['scheduler']}`, {run['detail']}"


def main(
    policies: Annotated[list[str], typer.Argument(help="Presets.")],
    scheduler: Annotated[list[str] | None, typer.Option(help="By default vllm.")] = None,
    detail: Annotated[list[Detail] | None, typer.Option(help="What runs record; by default requests.")] = None,
    load: Annotated[float, typer.Option(help="Arrivals over the rate of service.")] = NORMAL,
    requests: Annotated[float, typer.Option(help="How many, as a share of the usual.", min=1e-6, max=100)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page's table.")] = False,
) -> None:
    """Where the simulator's time goes."""
    console = Console(width=160)
    if wrong := [name for name in policies if name not in available()]:
        console.print(no_such("policy", wrong[0], available()), markup=False)
        raise typer.Exit(2)
    runs = []
    try:
        for policy, server, what in product(policies, scheduler or ["vllm"], detail or [Detail.requests]):
            given = task(policy, usual(policy, TURNS * requests), scheduler=server, detail=what.value)
            runs.append(shares_of(given, load))
    except RuntimeError as e:
        console.print(str(e), markup=False)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"runs": runs}, indent=1))
    elif markdown:
        typer.echo(in_markdown(parts_of(runs)))
    else:
        in_console(console, parts_of(runs))


if __name__ == "__main__":
    typer.run(main)
