"""The simulator's speed with fast-forwards and step by step: ``python -m benchmarks.fast_forward [--requests N]``.

The same requests run under each preset on one core, interleaved in rounds; figures are medians over the rounds. Prompts
and answers are about as long as those of the public Azure conversation trace (medians of 1,020 and 129 tokens), but
drawn, so that no data are needed; one arrives every 2.5 seconds. Bare SimPy, timeouts of one process, is for
comparison.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.speed import bare_events
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.run import run

PRESETS = ("oracle", "hf-reserved", "growing", "ring", "paged", "vllm", "chunked", "contiguous", "llama.cpp-b6975")
"""Presets that never compact: planning compactions would dominate the time in either case."""


def scenario(requests: int) -> Scenario:
    return load_scenario(
        {
            "name": "fast-forward",
            "workload": {
                "kind": "poisson",
                "rate": 0.4,
                "requests": requests,
                "prompt_tokens": {"kind": "lognormal", "mu": 6.93, "sigma": 0.9, "min": 1, "max": 6000},
                "output_tokens": {"kind": "lognormal", "mu": 4.86, "sigma": 0.9, "min": 1, "max": 1000},
            },
            "server": {"scheduler": "vllm", "slots": 64, "n_batch": 2048, "n_ubatch": 2048, "slot_context": 8192},
            "cache": {"cells": 1 << 14},
        }
    )


def main(
    requests: Annotated[int, typer.Option(help="In each run.", min=1)] = 150,
    rounds: Annotated[int, typer.Option(help="Turns of every preset.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    world = scenario(requests)
    taken: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in PRESETS}
    facts: dict[str, tuple[int, int]] = {}
    bare: list[float] = []
    for _ in range(rounds):
        bare.append(bare_events())
        for name in PRESETS:
            for fast_forward in (True, False):
                began = time.perf_counter()
                summary = run(world, name, fast_forward=fast_forward).summary
                taken[name][fast_forward].append(time.perf_counter() - began)
                facts[name] = summary["forward_passes"], summary["prompt_tokens"] + summary["output_tokens"]
    rows = []
    for name in PRESETS:
        fast, stepwise = (statistics.median(taken[name][fast_forward]) for fast_forward in (True, False))
        ratios = [b / a for a, b in zip(taken[name][True], taken[name][False], strict=True)]
        passes, tokens = facts[name]
        rows.append(
            {
                "policy": name,
                "requests_per_s": requests / fast,
                "tokens_per_s": tokens / fast,
                "steps_per_s": passes / fast,
                "requests_per_s_step_by_step": requests / stepwise,
                "times_as_fast": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
            }
        )
    table = Table(box=None, header_style="bold")
    for head in ("policy", "requests/s", "tokens/s", "steps/s", "step by step:\nrequests/s", "times as fast", "range"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for row in rows:
        low, high = row["range"]
        table.add_row(
            row["policy"],
            f"{row['requests_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['steps_per_s']:,.0f}",
            f"{row['requests_per_s_step_by_step']:,.0f}",
            f"{row['times_as_fast']:.1f}",
            f"{low:.1f} to {high:.1f}",
        )
    console = Console(width=110)
    console.print(table)
    events = statistics.median(bare)
    console.print(f"bare SimPy: {events:,.0f} timeouts/s; medians of {rounds} rounds of {requests} requests")
    if out is not None:
        out.write_text(json.dumps({"requests": requests, "rounds": rounds, "bare_events_per_s": events, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
