"""What ``kvsim compare`` prints of a verdict: intervals, differences, and the conclusion."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import new_table
from kvsim.experiments.interval_text import from_to, plus_minus
from kvsim.experiments.ranking import BOUND
from kvsim.experiments.verdict import Verdict

_HEADS = {
    "e2e_mean": "e2e mean",
    "e2e_p50": "P50",
    "e2e_p95": "P95",
    "e2e_p99": "P99",
    "ttft_p95": "TTFT P95",
    "memory_bytes": "KV memory, MB",
}


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print a table of intervals where there are several replications, and always one line of conclusion."""
    if verdict.replications > 1:
        from_best = [f"Δ vs {verdict.ranking.best}"] if verdict.ranking else []
        from_bound = [f"× {BOUND}"] if verdict.from_bound else []
        table = new_table("policy", *_HEADS.values(), *from_best, *from_bound)
        for column in table.columns[1:]:
            column.no_wrap = True
        for policy, intervals in verdict.intervals.items():
            scaled = [(intervals.get(m), 1e-6 if m == "memory_bytes" else 1e3) for m in _HEADS]
            cells = ["–" if interval is None else plus_minus(interval, scale) for interval, scale in scaled]
            compared = [(verdict.from_best.get(policy), 1e3)] if from_best else []
            compared += [(verdict.from_bound.get(policy), 1.0)] if from_bound else []
            cells += ["–" if interval is None else from_to(interval, scale) for interval, scale in compared]
            table.add_row(policy, *cells)
        console.print(table)
        console.print(
            f"{verdict.replications} replications, 95% intervals (t); latencies in milliseconds; Δ: differences of "
            "the mean in pairs on the same\nrequests, from the best corrected for their number (Bonferroni); "
            f"×: ratios to {BOUND} by Fieller",
            style="dim",
            highlight=False,
        )
    console.print(f"[bold]Conclusion:[/] {verdict.line}", highlight=False, soft_wrap=True)
