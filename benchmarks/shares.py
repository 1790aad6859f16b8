"""Where the simulator's time goes: ``python -m benchmarks.shares PRESET [--scheduler vllm] [--detail requests]
[--load 0.7] [--requests N] [--json]``.

One run in a process of its own, in which a timer of the processor's time looks every few milliseconds at which function
runs. Compiled modules do not show in that, so the run is of Python alone (``KVSIM_PURE=1``): of compiled code it says
what was worth compiling, not what is left.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.runs import NORMAL, service_rate, task, usual
from benchmarks.speed import Task, run_isolated
from kvsim.cli.commands.run import Detail
from kvsim.errors import no_such
from policies import available

TURNS = 10
"""Requests of a run, as many times those that are usual."""


def shares_of(given: Task, load: float) -> dict[str, Any]:
    """Shares of the samples of a run, by part and by its most frequent function. Raises ``RuntimeError``."""
    rate = load * service_rate(given, 1.0)
    found = run_isolated(replace(given, rate=rate, sample=True))
    total = max(found["samples"], 1)
    rows = []
    for part, functions in found["parts"].items():
        if functions:
            most = max(functions, key=functions.__getitem__)
            share = sum(functions.values()) / total
            rows.append({"part": part, "share": share, "function": most, "function_share": functions[most] / total})
    rows.sort(key=lambda row: -row["share"])
    return {
        "policy": given.policy,
        "scheduler": given.scheduler,
        "detail": given.detail,
        "load": load,
        "requests": given.requests,
        "samples": found["samples"],
        "shares": rows,
    }


def main(
    policy: Annotated[str, typer.Argument(help="A preset.")],
    scheduler: Annotated[str, typer.Option()] = "vllm",
    detail: Annotated[Detail, typer.Option(help="What the run records.")] = Detail.requests,
    load: Annotated[float, typer.Option(help="Arrivals over the rate of service.")] = NORMAL,
    requests: Annotated[int | None, typer.Option(help="How many; by default ten times those of a table's run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Where the simulator's time goes."""
    console = Console(width=120)
    if policy not in available():
        console.print(no_such("policy", policy, available()))
        raise typer.Exit(2)
    number = TURNS * usual(policy, 1.0) if requests is None else requests
    try:
        report = shares_of(task(policy, number, scheduler=scheduler, detail=detail.value), load)
    except RuntimeError as e:
        console.print(str(e), markup=False)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("part", "share", "most of it in", "its share"):
        table.add_column(head, justify="right" if "share" in head else "left")
    for row in report["shares"]:
        table.add_row(row["part"], f"{row['share']:.0%}", escape(row["function"]), f"{row['function_share']:.0%}")
    console.print(table)
    console.print(
        f"\n{policy} under {scheduler}, detail {detail}, {load:g} of the rate of service, {number:,} requests: "
        f"{report['samples']:,} samples of Python code; nothing compiled was used."
    )


if __name__ == "__main__":
    typer.run(main)
