"""What ``kvsim sweep`` prints."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console

from kvsim.cli.tables.formats import new_table
from kvsim.experiments.measures import LATENCIES
from kvsim.experiments.store import written_names
from kvsim.experiments.sweep_result import SweepResult

_MOST_ROWS = 60
"""Points in a table on the terminal; the table that is saved has all of them."""

_SHOWN = ("e2e_mean", "ttft_p95", "e2e_p95", "throughput_tokens_per_s")
"""Measures that every table has, after the one that the sweep compares by."""


def show_sweep(console: Console, result: SweepResult) -> None:
    """Print a row for each point and policy, and the conclusion."""
    table, plan = result.table, result.plan
    shown = tuple(dict.fromkeys((result.measure, *_SHOWN)))
    heads = ["point", *plan.axes, "policy", "runs", *(_head(measure) for measure in shown), ""]
    printed = new_table(*heads, left=("policy", ""))
    printed.columns[0].justify = "right"
    before = None
    for row in table.head(_MOST_ROWS).to_dict("records"):
        new = row["number"] != before
        before = row["number"]
        point = [str(row["number"]), *(_value(row[key]) for key in plan.axes)] if new else [""] * (1 + len(plan.axes))
        runs = f"{row['replications']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        figures = [_figure(row, measure) for measure in shown]
        printed.add_row(*point, str(row["policy"]), runs, *figures, _without_details(str(row["verdict"])))
    console.print(printed)
    if len(table) > _MOST_ROWS:
        file = written_names(result.store)["csv"]
        console.print(f"and {len(table) - _MOST_ROWS:,} more rows, see {file}", style="dim")
    console.print(
        f"{len(result.rows):,} runs, {len(result.failures):,} failed; latencies in milliseconds, ± half of the "
        f"{result.level:.0%} interval over replications; without the warm-up ({plan.file.warmup})",
        style="dim",
        highlight=False,
    )
    console.print(f"[bold]{result.name}[/]: {result.conclusion()}", highlight=False)


def _head(measure: str) -> str:
    return {"throughput_tokens_per_s": "tokens/s"}.get(measure, measure.replace("_", " "))


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_details(verdict: str) -> str:
    return "; ".join(part.split(":")[0] for part in verdict.split("; "))


def _figure(row: dict[Any, Any], measure: str) -> str:
    value = row[measure]
    if value != value:
        return "–"
    # One end may have been cut off at a bound, so the wider side is shown; a flag has no interval.
    half = max(row.get(f"{measure}_high", math.inf) - value, value - row.get(f"{measure}_low", -math.inf))
    scale = 1000 if measure.split("_")[0] in LATENCIES else 1
    text = f"{scale * value:,.4g}" if abs(scale * value) < 1e4 else f"{scale * value:,.0f}"
    return f"{text} ±{scale * half:.2g}" if half < math.inf else text
