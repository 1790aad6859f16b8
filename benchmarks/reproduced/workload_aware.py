"""Workload-aware eviction: hit rates by cache size, latency, and what a host tier adds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kvsim
from benchmarks.reproduced.finding import Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from kvsim.experiments.prefix_cache import prefix_cache
from policies import Eviction

SCENARIO = Path(__file__).parents[2] / "examples" / "reproduced" / "workload-aware.toml"
BLOCKS = (1024, 2048, 8192)
"""Cache sizes in blocks of 128 tokens, three of those of vLLM pull request 22236."""
EVICTIONS: tuple[Eviction, ...] = ("lru", "workload-aware", "belady")
TIER = {"cache__host_cells": 4 * 262144}
"""A host tier four times as large as the cache."""
_PR = "vLLM pull request 22236 (by the authors): Qwen 2.5 7B on one A800, the second hour of trace A"
_DIFFERS = (
    "generated traffic with the trace's rate, prompt length and reuse times; its shares of kinds are not published"
)


class HitRates(NamedTuple):
    """Hit rates of one seed's requests."""

    infinite: float
    """Hit rate of a cache that never evicts."""
    by_cache: dict[tuple[Eviction, int], float]
    """Hit rate of each order of eviction and number of blocks."""


def hit_rates(seed: int, blocks: tuple[int, ...] = BLOCKS, **keys: Any) -> HitRates:
    """Replay the scenario without a clock; ``keys``: more of its keys."""
    study = prefix_cache(kvsim.load(SCENARIO, seed=seed, **keys), EVICTIONS, blocks)
    assert study.infinite is not None, "the texts are known"
    return HitRates(study.infinite, {(row.eviction, row.blocks): row.hit_rate for row in study.table.itertuples()})


class Served(NamedTuple):
    """What a run with a clock found, and how long requests waited for their first token."""

    hit_rate: float
    ttft_s: float
    """Mean, queueing included."""


def served(policy: str, seed: int, keys: dict[str, Any]) -> Served:
    """Serve the scenario under a policy; ``keys``: more of its keys."""
    result = kvsim.run(kvsim.load(SCENARIO, seed=seed, **keys), policy, detail="requests")
    return Served(result.summary["prefix"]["hit_rate"], result.summary["ttft_s"]["mean"])


def find() -> list[Finding]:
    """Hit rates over those of LRU, the ideal ones, latency, and both with a host tier; minutes of computing."""
    rates = measured(hit_rates)
    infinite = mean([each.infinite for each in rates])
    findings = [
        _finding("an infinite cache finds 62 % in trace A, 54 % in trace B", "arXiv 2506.02634", infinite, "share")
    ]
    for n, published in zip(BLOCKS, ("+17.5 %", "+23.8 %", "+2.5 %"), strict=True):
        lru, aware, bound = ([each.by_cache[eviction, n] for each in rates] for eviction in EVICTIONS)
        claim = f"{published} hits over LRU with {n} blocks"
        findings.append(_finding(claim, _PR, ratio(aware, lru), "times"))
        for name, values in zip(EVICTIONS, (lru, aware, bound), strict=True):
            findings.append(_finding(f"hit rate with {n} blocks, {name}", "no claim", mean(values), "share"))
    for what, keys in (("", {}), (" with a host tier", TIER)):
        lru_runs, aware_runs = (measured(partial(served, policy, keys=keys)) for policy in ("paged", "workload-aware"))
        hits = ratio([run.hit_rate for run in aware_runs], [run.hit_rate for run in lru_runs])
        findings.append(_finding(f"+8.1 to 23.9 % hits of a server{what}", "arXiv 2506.02634", hits, "times"))
        lru_rate = mean([run.hit_rate for run in lru_runs])
        findings.append(_finding(f"hit rate of a server{what} under LRU", "no claim", lru_rate, "share"))
        waits = ratio([run.ttft_s for run in aware_runs], [run.ttft_s for run in lru_runs])
        findings.append(_finding(f"-28.3 to -41.9 % mean TTFT{what}", "arXiv 2506.02634", waits, "times"))
        findings.append(_finding(f"mean TTFT{what} under LRU", "no claim", mean([r.ttft_s for r in lru_runs]), "s"))
    return findings


def _finding(claim: str, source: str, ours: Interval, unit: str) -> Finding:
    return Finding("Workload-aware eviction", claim, source, ours, unit, _DIFFERS)
