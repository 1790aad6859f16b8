"""What the command line prints of a verdict: intervals, differences, and the conclusion."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from kvsim.experiments.estimates import Interval
from kvsim.experiments.verdict import BOUND, Verdict

_HEADS = {
    "e2e_mean": "e2e mean",
    "e2e_p50": "P50",
    "e2e_p95": "P95",
    "e2e_p99": "P99",
    "ttft_p95": "TTFT P95",
    "memory_bytes": "held, MB",
}


def show_verdict(console: Console, verdict: Verdict) -> None:
    """A table of intervals where there are several replications, and in any case one line of conclusion."""
    if verdict.replications > 1:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("policy")
        heads = [*_HEADS.values(), *([f"less {verdict.ranking.best}"] if verdict.ranking else [])]
        for head in [*heads, *([f"over {BOUND}"] if verdict.from_bound else [])]:
            table.add_column(head, justify="right", no_wrap=True)
        for policy, intervals in verdict.intervals.items():
            cells = [_half(intervals.get(m), 1e-6 if m == "memory_bytes" else 1e3) for m in _HEADS]
            if verdict.ranking:
                cells.append(_between(verdict.from_best.get(policy), 1e3))
            if verdict.from_bound:
                cells.append(_between(verdict.from_bound.get(policy), 1.0))
            table.add_row(policy, *cells)
        console.print(table)
        console.print(
            f"{verdict.replications} replications, 95% intervals (t); latencies in milliseconds; differences of "
            "the mean in pairs on the same\nrequests, from the best corrected for their number (Bonferroni), "
            f"ratios to {BOUND} by Fieller",
            style="dim",
            highlight=False,
        )
    console.print(f"[bold]Conclusion:[/] {verdict.line}", highlight=False, soft_wrap=True)


def _half(interval: Interval | None, scale: float) -> str:
    if interval is None:
        return "–"
    value = f"{scale * interval.value:,.4g}"
    # An end may have been cut off at 0, so the wider side is told.
    half = max(interval.high - interval.value, interval.value - interval.low)
    return f"{value} ±{scale * half:.2g}" if math.isfinite(half) else value


def _between(interval: Interval | None, scale: float) -> str:
    if interval is None:
        return "–"
    if interval.low == interval.high:
        return f"{scale * interval.value:.3g}"
    if not math.isfinite(interval.half_width):
        return f"{scale * interval.value:.3g}"
    return f"{scale * interval.low:.3g} to {scale * interval.high:.3g}"
