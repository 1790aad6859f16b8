"""What the command line prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvsim.comparison import Comparison
from kvsim.costs import ATTENTION_TERMS, Coefficient, Profile
from kvsim.metrics import Result

if TYPE_CHECKING:
    from kvsim.validation import Validation

_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}


def run(console: Console, result: Result, profile: str) -> None:
    """One run: counts, latencies, the cache."""
    s = result.summary
    console.print(f"[bold]{s['scenario']}[/] under [bold]{s['policy']}[/], seed {s['seed']}", highlight=False)
    counts = f"{s['completed']:,} of {s['requests']:,} requests completed, {s['failed']:,} failed"
    if s["truncated"]:
        counts += f", {s['truncated']:,} cut short by a full slot"
    console.print(f"{counts}; {_number(s['throughput_tokens_per_s'])} output tokens/s", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("", "mean", "P50", "P95", "P99"):
        table.add_column(head, justify="right" if head else "left")
    for key, name in _LATENCIES.items():
        table.add_row(name, *(_seconds(s[key][x]) for x in ("mean", "p50", "p95", "p99")))
    console.print(table)
    c = s["cache"]
    console.print(
        f"cache: {_share(c['utilization_mean'])} of the cells used, external fragmentation "
        f"{_share(c['external_fragmentation_mean'])}, internal {_share(c['internal_fragmentation_mean'])}; "
        f"{c['failed_allocations']:,} failed allocations, {c['batch_splits']:,} batch splits, "
        f"{_bytes(c['moved_bytes'])} moved",
        highlight=False,
    )
    console.print(profile, style="dim", highlight=False)


def comparison(console: Console, compared: Comparison) -> None:
    """A column for each policy: readable at any width that shows the names."""
    summaries = [result.summary for result in compared.results]
    first = summaries[0]
    console.print(
        f"[bold]{compared.scenario.name}[/]: {first['requests']:,} requests, {compared.scenario.cache.cells:,} cells, "
        f"{compared.scenario.server.slots} slots, seed {compared.scenario.seed}",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy")
    for s in summaries:
        table.add_column(s["policy"], justify="right")
    table.add_row("completed / failed", *(f"{s['completed']:,} / {s['failed']:,}" for s in summaries))
    table.add_row("throughput, output tokens/s", *(_number(s["throughput_tokens_per_s"]) for s in summaries))
    for key, name in _LATENCIES.items():
        for statistic in ("p50", "p95", "p99"):
            table.add_row(f"{name} {statistic.upper()}", *(_seconds(s[key][statistic]) for s in summaries))
    for key, name in (
        ("utilization_mean", "cache used"),
        ("external_fragmentation_mean", "external fragmentation"),
        ("internal_fragmentation_mean", "internal fragmentation"),
    ):
        table.add_row(name, *(_share(s["cache"][key]) for s in summaries))
    table.add_row("failed allocations", *(f"{s['cache']['failed_allocations']:,}" for s in summaries))
    table.add_row("batch splits", *(f"{s['cache']['batch_splits']:,}" for s in summaries))
    table.add_row("bytes moved", *(_bytes(s["cache"]["moved_bytes"]) for s in summaries))
    console.print(table)
    console.print(compared.profile, style="dim", highlight=False)


def profile(console: Console, p: Profile) -> None:
    """The fitted coefficients with their intervals."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("cost", "value", "95 % interval"):
        table.add_column(head, justify="left" if head == "cost" else "right")

    def row(name: str, c: Coefficient) -> None:
        table.add_row(name, _seconds(c.value), f"{_seconds(c.low)} to {_seconds(c.high)}")

    row("a forward pass", p.base_s)
    for low, high, slope in zip(p.matmul_knots, p.matmul_knots[1:], p.matmul_slopes_s, strict=False):
        row(f"a token more, {low} to {high} tokens", slope)
    for kernel, attention in p.kernels.items():
        for term in ATTENTION_TERMS:
            row(f"{kernel} attention, {term.removesuffix('_s').replace('_', ' ')}", getattr(attention, term))
    row("moves, per run", p.moves.per_run_s)
    row("moves, per cell", p.moves.per_cell_s)
    console.print(table)
    console.print(
        f"held-out error over {p.held_out_samples} forward passes: median {p.held_out_error_median:.1%}, "
        f"P95 {p.held_out_error_p95:.1%}",
        highlight=False,
    )
    console.print(p.describe(), style="dim", highlight=False)


def validation(console: Console, v: Validation) -> None:
    """Predicted, measured and error of each policy and measure."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("policy", "measure", "predicted", "measured", "error"):
        table.add_column(head, justify="left" if head in ("policy", "measure") else "right")
    before = None
    for row in v.table.to_dict("records"):
        policy = str(row["policy"]) if row["policy"] != before else ""
        before = row["policy"]
        if row["measure"] in _LATENCIES:
            measure = f"{_LATENCIES[str(row['measure'])]} {row['statistic']}"
            pair = (_seconds(row["predicted"]), _seconds(row["measured"]))
        else:
            measure, pair = "output tokens/s", (_number(row["predicted"]), _number(row["measured"]))
        table.add_row(policy, measure, *pair, f"{row['error']:+.1%}", end_section=row["measure"] not in _LATENCIES)
    console.print(table)
    console.print(
        "Both runs placed the same cells: schedule "
        + ", ".join(f"{policy} {digest[:8]}" for policy, digest in v.schedules.items()),
        highlight=False,
    )
    console.print(v.profile.describe(), style="dim", highlight=False)


def names(console: Console, described: dict[str, str]) -> None:
    """Names with a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in described.items():
        table.add_row(f"[bold]{name}[/]", line)
    console.print(table)


def _seconds(value: Any) -> str:
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale or unit == "µs":
            return f"{value / scale:.3g} {unit}"
    return ""


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: Any) -> str:
    return "–" if value is None else f"{value:.1%}"


def _bytes(value: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"
