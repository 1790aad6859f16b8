"""What ``kvsim sweep`` prints."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console

from kvsim.cli.tables.formats import print_rows, show_assumed, show_basis
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import plus_minus
from kvsim.experiments.measures import LATENCIES, SHARES
from kvsim.experiments.policy_code import plugins_line, plugins_used
from kvsim.experiments.store import written_names
from kvsim.experiments.sweep_result import MOST_DRAWN, SweepResult, basis_of

_MOST_ROWS = 60
"""Points in a table on the terminal; the table that is saved has all of them."""


def show_sweep(console: Console, result: SweepResult) -> None:
    """Print a row for each point and policy, and the conclusion."""
    table, plan = result.table, result.plan
    for basis in basis_of(result.plan):
        show_basis(console, basis)
    show_assumed(console, result.assumed)
    shown = result.shown
    heads = ["point", *plan.axes, "policy", "runs", *(_head(measure) for measure in shown), "remarks"]
    rows, before = [], None
    for row in table.head(_MOST_ROWS).to_dict("records"):
        new = row["number"] != before
        before = row["number"]
        point = [str(row["number"]), *(_value(row[key]) for key in plan.axes)] if new else [""] * (1 + len(plan.axes))
        runs = f"{row['replications']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        figures = [_figure(row, measure) for measure in shown]
        rows.append([*point, str(row["policy"]), runs, *figures, _without_details(str(row["verdict"]))])
    print_rows(console, heads, rows, repeated=3 + len(plan.axes), left=("policy", "remarks"))
    if len(table) > _MOST_ROWS:
        file = written_names(result.store)["csv"]
        console.print(f"and {len(table) - _MOST_ROWS:,} more rows, see {file}", style="dim")
    console.print(
        f"{len(result.rows):,} runs, {len(result.failures):,} of which could not finish; latencies in milliseconds, "
        f"± half of the {result.level:.0%} interval over replications; without the warm-up ({plan.file.warmup})",
        style="dim",
        highlight=False,
    )
    if beyond := (result.plan.file.show or [])[MOST_DRAWN:]:
        console.print(f"the figure shows only the first {MOST_DRAWN} measures, not {', '.join(beyond)}", style="dim")
    if line := plugins_line(plugins_used(plan.policies)):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(f"[bold]{result.name}[/]: {result.conclusion()}", highlight=False)


def _head(measure: str) -> str:
    heads = {"throughput_tokens_per_s": "tokens/s", "goodput_requests_per_s": "goodput,\nrequests/s"}
    return heads.get(measure, f"{measure.replace('_', ' ')}{', %' if measure in SHARES else ''}")


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_details(verdict: str) -> str:
    return "; ".join(part.split(":")[0] for part in verdict.split("; "))


def _figure(row: dict[Any, Any], measure: str) -> str:
    value = row[measure]
    if value != value:
        return "–"
    # A flag has no interval.
    low, high = row.get(f"{measure}_low", -math.inf), row.get(f"{measure}_high", math.inf)
    return plus_minus(Interval(value, low, high), _scale(measure))


def _scale(measure: str) -> float:
    if measure in SHARES:
        return 100
    return 1000 if measure.split("_")[0] in LATENCIES else 1
