"""What ``kvsim compare`` prints: a row for each policy."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvsim.cli.tables.failures import show_failures
from kvsim.cli.tables.formats import (
    LATENCIES,
    milliseconds,
    print_rows,
    seconds,
    share,
    show_assumed,
    show_basis,
    size,
    whole,
)
from kvsim.errors import counted
from kvsim.experiments.comparison import Comparison, against_oracle
from kvsim.experiments.policy_code import plugins_line, plugins_used

_CACHE_HEADS = (
    "cache\nused",
    "external\nfragm.",
    "internal\nfragm.",
    "free\nextents",
    "largest\nextent",
    "useful\nattention",
    "failed\nalloc.",
    "batch\nsplits",
    "compac-\ntions",
    "bytes\nmoved",
    "prefix\nhits",
    "preemp-\ntions",
)
_HOST_HEADS = ("host\nsaves", "host\nloads", "bytes\ncopied", "copying")
"""Columns about llama-server's host cache, where a policy has anything to say about it."""


def show_comparison(console: Console, compared: Comparison) -> None:
    """Print two tables with a row for each policy: what users feel, and what the cache did."""
    summaries = [result.summary for result in compared.results]
    first = summaries[0]
    show_basis(console, first["basis"])
    console.print(
        f"[bold]{compared.scenario.name}[/]: {counted(first['requests'], 'request')}, "
        f"{counted(compared.scenario.cache.cells, 'cell')}, {counted(compared.scenario.server.slots, 'slot')}, "
        f"seed {compared.scenario.seed}",
        highlight=False,
    )
    show_assumed(console, (*compared.assumed, *compared.inferred))
    bound = against_oracle(compared.results)
    users = [
        [
            s["policy"],
            f"{s['completed']:,}",
            f"{s['failed']:,}",
            whole(s["throughput_tokens_per_s"]),
            *(milliseconds(s[key][x]) for key in LATENCIES for x in ("p50", "p95", "p99")),
            f"{bound[s['policy']]:.2f}" if s["policy"] in bound else "–",
        ]
        for s in summaries
    ]
    quantiles = [f"{name}\n{x}" for name in ("TTFT", "TPOT", "e2e") for x in ("P50", "P95", "P99")]
    print_rows(console, ["policy", "ok", "failed", "tokens\n/s", *quantiles, "e2e mean\n× oracle"], users)
    copies = any(s["host"]["saves"] for s in summaries)
    caches = []
    for s in summaries:
        c = s["cache"]
        caches.append(
            [
                s["policy"],
                share(c["utilization_mean"]),
                share(c["external_fragmentation_mean"]),
                share(c["internal_fragmentation_mean"]),
                whole(c["free_extents_mean"]),
                whole(c["largest_free_extent_mean"]),
                share(c["scored_useful"]),
                f"{c['failed_allocations']:,}",
                f"{c['batch_splits']:,}",
                f"{c['compactions']:,}",
                size(c["moved_bytes"]),
                "unknown" if s["prefix"]["hit_rate"] is None else share(s["prefix"]["hit_rate"]),
                f"{s['preemptions']:,}",
                *(_host_cache(s["host"]) if copies else ()),
            ]
        )
    print_rows(console, ["policy", *_CACHE_HEADS, *(_HOST_HEADS if copies else ())], caches)
    console.print("TTFT, TPOT and end-to-end (e2e) latency in milliseconds, of completed requests", style="dim")
    if line := plugins_line(plugins_used(result.policy for result in compared.results)):
        console.print(line, style="dim", highlight=False, markup=False)
    show_failures(console, list(compared.failures.items()), compared.scenario.name)


def _host_cache(host: dict[str, Any]) -> list[str]:
    """The cells of ``_HOST_HEADS``."""
    return [
        f"{host['saves']:,}",
        f"{host['loads']:,}",
        size(host["bytes_out"] + host["bytes_in"]) if host["saves"] else "0 B",
        seconds(host["copy_s"]) if host["saves"] else "–",
    ]
