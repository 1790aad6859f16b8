"""Searches for regions: what of the cache is lost where requests wait for one, and what that costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kvsim
from benchmarks.reproduced.finding import SEEDS, Finding, mean, measured, ratio
from kvsim.experiments.estimates import Interval
from policies import CacheConfig, SearchName, SequencePlan
from policies.layouts.sequence_regions import OraclePolicy

SCENARIO = Path(__file__).parents[2] / "examples" / "reproduced" / "searches.toml"
WORKLOADS = {"azure-conv": 6.0, "azure-code": 8.0, "burstgpt": 30.0}
"""Requests a second: more than the device can serve, for each of them."""
SEARCHES: tuple[SearchName, ...] = ("best-fit", "first-fit", "next-fit", "worst-fit", "buddy", "slab")
REQUESTS = 400
LARGE: dict[str, Any] = {
    "requests": 4000,
    "workload__rate": 60.0,
    "cache__cells": 16 * 41408,
    "server__slots": 4096,
    "machine__device": "h100_sxm",
}
"""A cache with room for 16 times as many requests, on a device that is fast enough to fill it."""


class Lost(NamedTuple):
    """What a run lost to its search: means over the requests that had to wait, when each was first refused."""

    internal: float
    """Share of the cells of all regions that were not asked for."""
    external: float
    """Share of the cache that was free, where that was as much as the request asked for; otherwise 0."""
    in_vain: float
    """Share of these requests for which as many cells were free as they asked for."""
    throughput: float
    """Generated tokens per second."""


class Watched(OraclePolicy):
    """Notes the state of the cache when a request is first refused."""

    has_placement_rule = True

    def __init__(self, config: CacheConfig):
        super().__init__("watched", config)
        self.refused: dict[int, tuple[int, int, int]] = {}
        """For each request that waited: the cells that others had asked for, free cells, and what it asked for."""

    def admits(self, plan: SequencePlan) -> bool:
        """Note a refusal."""
        if super().admits(plan):
            return True
        if plan.request not in self.refused:
            asked = sum([self._plans[seq].final_tokens for seq in self._regions])
            self.refused[plan.request] = asked, self._search.free.total, plan.final_tokens
        return False


def lost(workload: str, search: SearchName, seed: int, requests: int = REQUESTS, **keys: Any) -> Lost:
    """What one run loses to its search; ``keys``: more of the scenario's keys."""
    keys = {"workload__rate": WORKLOADS[workload], "workload__requests": requests} | keys
    scenario = kvsim.load(SCENARIO, seed=seed, workload__name=workload, cache__search=search, **keys)
    built: list[Watched] = []

    def factory(config: CacheConfig) -> Watched:
        built.append(Watched(config))
        return built[0]

    result = kvsim.run(scenario, factory, detail="requests")
    cells, refused = scenario.cache.cells, list(built[0].refused.values())
    fragmented = [free for _, free, n in refused if free >= n]
    return Lost(
        sum((cells - free - asked) / max(cells - free, 1) for asked, free, _ in refused) / len(refused),
        sum(fragmented) / cells / len(refused),
        len(fragmented) / len(refused),
        result.summary["throughput_tokens_per_s"],
    )


def table(requests: int = REQUESTS, seeds: tuple[int, ...] = SEEDS) -> dict[tuple[str, SearchName], list[Lost]]:
    """What every search loses under every workload, for each seed."""
    return {
        (workload, search): measured(partial(lost, workload, search, requests=requests), seeds)
        for workload in WORKLOADS
        for search in SEARCHES
    }


_JW = "Johnstone and Wilson, The memory fragmentation problem: solved? (ISMM 1998), heaps of eight C and C++ programs"
_CLAIMS: tuple[tuple[SearchName, str, str, str], ...] = (
    ("best-fit", "external", "best fit leaves hardly any memory that cannot be used", _JW),
    ("first-fit", "external", "first fit by address leaves as little as best fit", _JW),
    ("next-fit", "external", "next fit leaves clearly more than first fit", _JW),
    ("worst-fit", "external", "worst fit leaves most", "Wilson et al., Dynamic storage allocation: a survey (1995)"),
    (
        "buddy",
        "internal",
        "buddies waste about a quarter of their blocks",
        "Peterson and Norman, Buddy systems (CACM 1977)",
    ),
    (
        "slab",
        "internal",
        "slabs waste less than an eighth of their cells",
        "Bonwick, The slab allocator (USENIX Summer 1994)",
    ),
    (
        "slab",
        "external",
        "slabs fragment little, because objects of one size fill them",
        "Bonwick (USENIX Summer 1994)",
    ),
)
"""The search, what is measured of it, the claim and its source."""


def find() -> list[Finding]:
    """Losses of every search under every workload, and its throughput beside that of best fit."""
    findings, runs = [], table()
    for workload in WORKLOADS:
        for search, field, claim, source in _CLAIMS:
            values = [getattr(each, field) for each in runs[workload, search]]
            findings.append(_finding(f"{claim}: {field} of {search}, {workload}", source, mean(values), "share"))
        best = [each.throughput for each in runs[workload, "best-fit"]]
        for search in SEARCHES[1:]:
            faster = ratio([each.throughput for each in runs[workload, search]], best)
            findings.append(_finding(f"tokens/s, {search} over best-fit, {workload}", "no claim", faster, "times"))
    for search in ("best-fit", "next-fit"):
        values = [each.external for each in measured(partial(lost, "azure-conv", search, **LARGE))]
        claim = f"a cache 16 times as large: external of {search}, azure-conv"
        findings.append(_finding(claim, "no claim", mean(values), "share"))
    return findings


def _finding(claim: str, source: str, ours: Interval, unit: str) -> Finding:
    differs = "requests of LLM servers, FCFS, in a cache of fixed size, lengths known ahead; heaps of programs may grow"
    return Finding("Searches for regions", claim, source, ours, unit, differs)
