"""What ``kvsim run`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvsim.cli.tables.failures import show_failures
from kvsim.cli.tables.formats import LATENCIES, new_table, seconds, share, show_assumed, show_basis, size, whole
from kvsim.errors import counted
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES
from kvsim.simulation.inferred_text import inferred_lines
from kvsim.simulation.result import Result


def show_run(console: Console, result: Result) -> None:
    """Print one run: counts, latencies, and how the cache fared."""
    s = result.summary
    show_basis(console, s["basis"])
    scenario = result.scenario
    console.print(
        f"[bold]{s['scenario']}[/] under [bold]{s['policy']}[/], {scenario.cache.cells:,} cells, "
        f"{counted(scenario.server.slots, 'slot')}, seed {s['seed']}",
        highlight=False,
    )
    show_assumed(console, (*s["assumed"], *inferred_lines([s])))
    counts = f"{s['completed']:,} of {s['requests']:,} requests completed, {s['failed']:,} failed"
    if s["truncated"]:
        counts += f", {s['truncated']:,} cut short by a full slot"
    console.print(f"{counts}; {whole(s['throughput_tokens_per_s'])} output tokens/s", highlight=False)
    show_failures(console, [(s["policy"], s["failures"])], s["scenario"])
    table = new_table("", "mean", "P50", "P95", "P99")
    for key, name in LATENCIES.items():
        table.add_row(name, *(seconds(s[key][x]) for x in ("mean", "p50", "p95", "p99")))
    console.print(table)
    c = s["cache"]
    sampled = ""
    if c["utilization_mean"] is not None:
        sampled = (
            f"{share(c['utilization_mean'])} of the cells used, external fragmentation "
            f"{share(c['external_fragmentation_mean'])}, internal {share(c['internal_fragmentation_mean'])}; "
        )
    console.print(
        f"cache: {sampled}"
        f"{counted(c['failed_allocations'], 'failed allocation')}, {counted(c['batch_splits'], 'batch split')}, "
        f"{size(c['moved_bytes'])} moved",
        highlight=False,
    )
    if s["prefix"]["found"] or s["preemptions"]:
        rate = s["prefix"]["hit_rate"]
        hits = UNKNOWN_PREFIXES if rate is None else f"{share(rate)} of the prompt tokens were in the cache already"
        console.print(
            f"prefixes: {hits}; {counted(s['preemptions'], 'preemption')}, "
            f"{counted(s['recomputed_tokens'], 'token')} computed again",
            highlight=False,
        )
    host = s["host"]
    if host["saves"]:
        console.print(_host_cache(host), highlight=False)
    elif host["bytes_out"] or host["bytes_in"]:
        console.print(
            f"host tier: {size(host['bytes_out'])} out, {size(host['bytes_in'])} back, "
            f"{size(host['bytes_prefetched'])} of that ahead of use; steps waited "
            f"{seconds(host['prefetch_wait_s'])} for copies to arrive",
            highlight=False,
        )


def _host_cache(host: dict[str, Any]) -> str:
    """What was copied to and from the host cache, and how full it was."""
    limit = host["limit_bytes"]
    room = "without a limit" if limit is None else f"of {limit / (1 << 20):,.0f} MiB"
    return (
        f"host cache: {counted(host['saves'], 'save')} ({size(host['bytes_out'])}), "
        f"{counted(host['loads'], 'load')} ({size(host['bytes_in'])}), {seconds(host['copy_s'])} of copying; "
        f"at most {size(host['most_bytes'])} held {room}"
    )
