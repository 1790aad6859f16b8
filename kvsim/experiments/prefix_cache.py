"""Hit rates of a prefix cache by size and eviction policy: a replay of requests without a clock.

Requests are served one after another, in order of arrival, each holding its blocks until it is done. Time is left out:
in a real server, concurrent requests hold blocks that then cannot be evicted. A run with a scheduler includes that
effect. What is looked up, cached and counted is defined in ``kvsim.scenario.prefixes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvsim.errors import UserError
from kvsim.experiments.workers import map_ordered
from kvsim.results import results_folder
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES, InfiniteCache, Lookup, hit_rate
from kvsim.scenario.scenario import Scenario, load_scenario
from policies import EVICTIONS
from policies.paging.blocks import BlockPool
from policies.paging.eviction import free_blocks
from policies.paging.free_lists.belady import Future
from workloads import Workload
from workloads.request import timed
from workloads.reuse import Reuse

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_COLUMNS = ["eviction", "blocks", "tokens", "hits", "hit_rate", "of_best"]
_SIZES = 16
"""Default number of cache sizes, evenly spaced on a logarithmic scale."""
_SMALLEST = 0.002
"""Smallest default cache size, as a share of all distinct blocks."""
_KNEE_HEIGHT = 1e-9
"""Height above the straight line at which a curve counts as having a knee: just above rounding errors."""


@dataclass(frozen=True)
class PrefixStudy:
    """Prefix-cache hit rates of a workload's prompts."""

    scenario: str
    block_size: int
    """Tokens per block."""
    requests: int
    reuse: Reuse | None
    """What is looked up, and what a cache that never evicts finds of it; None if that is not known."""
    table: pd.DataFrame
    """One row per eviction policy and cache size: eviction, blocks, tokens, hits (blocks found), hit_rate (tokens found
    over tokens looked up), of_best (hit rate divided by that of ``belady`` at the same size, if it was tried). Empty if
    nothing is known."""
    lookups_per_s: float | None = None
    """Blocks looked up per second of processor time, over all runs."""
    notes: tuple[str, ...] = ()
    """Rows of a trace that were left out or repaired, one line each."""

    @property
    def infinite(self) -> float | None:
        """Hit rate of a cache that never evicts; None if it is not known."""
        return None if self.reuse is None else self.reuse.hit_rate

    @property
    def reason(self) -> str | None:
        """Why there are no figures, in words; None if there are."""
        return UNKNOWN_PREFIXES if self.reuse is None else None

    @property
    def knees(self) -> dict[str, int]:
        """Working-set size in blocks under each eviction policy, at the knee of its hit-rate curve.

        The knee is the point farthest above the straight line between the curve's ends (Satopaa et al., "Finding a
        Kneedle in a Haystack", 2011). Policies whose curve has no knee are left out.
        """
        knees = {}
        for eviction, curve in self.table.groupby("eviction", sort=False):
            size, rate = curve["blocks"].to_numpy(dtype=float), curve["hit_rate"].to_numpy(dtype=float)
            if len(size) < 3 or rate[-1] <= rate[0]:
                continue
            above = (rate - rate[0]) / (rate[-1] - rate[0]) - (size - size[0]) / (size[-1] - size[0])
            if above.max() > _KNEE_HEIGHT:
                knees[cast(str, eviction)] = int(size[above.argmax()])
        return knees

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        reuse = self.reuse
        return {
            "scenario": self.scenario,
            "block_size": self.block_size,
            "requests": self.requests,
            "prompt_tokens": None if reuse is None else reuse.tokens,
            "references": None if reuse is None else reuse.blocks,
            "distinct": None if reuse is None else reuse.distinct,
            "infinite_hit_rate": self.infinite,
            "reason": self.reason,
            "knee_blocks": None if reuse is None else self.knees,
            "lookups_per_s": self.lookups_per_s,
            "runs": [
                {key: None if value != value else value for key, value in row.items()}
                for row in self.table.to_dict("records")
            ],
        }

    def plot(self) -> Figure:
        """Draw hit rate over cache size, with a line per eviction policy. Raises ``UserError`` without figures."""
        if self.reuse is None:
            raise UserError(f"{self.scenario}: {self.reason}")
        from kvsim.reports.comparison_plots import prefix_figure

        return prefix_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the table and the figure to a folder and return the files. Raises ``UserError``."""
        with results_folder(folder) as out:
            out.table("prefix-cache.csv", self.table)
            out.picture("prefix-cache.png", self.plot)
        return out.written


def prefix_cache(
    scenario: Scenario | str | Path,
    evictions: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    *,
    block_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> PrefixStudy:
    """Replay a scenario's workload through prefix caches of several sizes and eviction policies.

    If the workload does not say which prompts share a beginning, the study has a ``reason`` instead of figures.
    ``blocks``: the cache sizes; by default 16 of them, up to one that holds everything. ``block_size``: in tokens; by
    default the scenario's. ``progress`` is called with the share done. Raises ``UserError`` and ``WorkloadError``.
    """
    import pandas as pd

    scenario = load_scenario(scenario)
    size = block_size or scenario.cache.block_size
    workload = scenario.build_workload()
    notes = tuple(workload.notes)
    if workload.prefixes == "unknown":
        return PrefixStudy(scenario.name, size, workload.n_requests, None, pd.DataFrame(columns=_COLUMNS), notes=notes)
    lookups, infinite = _lookups(workload, size)
    reuse = infinite.reuse
    if reuse.blocks == 0:
        raise UserError(f"{scenario.name}: no prompt is longer than a block of {size} tokens; try a smaller block size")
    sizes = sorted(set(blocks)) if blocks else _sizes(infinite.capacity, max(len(each.keys) for each in lookups))
    caches = [(eviction, n) for eviction in dict.fromkeys(evictions or EVICTIONS) for n in sizes]
    rows, seconds = [], 0.0
    for (eviction, n), (hits, took) in zip(caches, map_ordered(partial(_count_hits, lookups), caches), strict=True):
        rows.append((eviction, n, n * size, hits, hit_rate(hits * size, reuse.tokens, workload.prefixes)))
        seconds += took
        if progress is not None:
            progress(len(rows) / len(caches))
    table = pd.DataFrame(rows, columns=_COLUMNS[:-1])
    best = table[table["eviction"] == "belady"].set_index("blocks")["hit_rate"]
    bound = table["blocks"].map(best)
    table["of_best"] = (table["hit_rate"] / bound).where(bound > 0)
    lookups_per_s = reuse.blocks * len(caches) / seconds
    return PrefixStudy(scenario.name, size, len(lookups), reuse, table, lookups_per_s, notes)


def _lookups(workload: Workload, block_size: int) -> tuple[list[Lookup], InfiniteCache]:
    """What each request looks up, in order of arrival, and a cache that has served them all."""
    infinite = InfiniteCache(block_size, workload.prefixes)
    served = [(now, infinite.serve(request)) for now, request in timed(workload)]
    served.sort(key=itemgetter(0))
    return [lookup for _, lookup in served], infinite


def _sizes(most: int, longest: int) -> list[int]:
    """Cache sizes up to ``most`` blocks; the smallest still holds the longest request."""
    least = min(max(round(most * _SMALLEST), longest, 1), most)
    return sorted({round(n) for n in np.geomspace(least, most, _SIZES)})


def _count_hits(lookups: Sequence[Lookup], cache: tuple[str, int]) -> tuple[int, float]:
    """Number of blocks found in one cache, given as (eviction, blocks), and the processor seconds that it took.

    Requests are cut to the size of the cache.
    """
    eviction, blocks = cache
    began = time.process_time()
    future = Future(enumerate(keys[:asked] for _, keys, asked, _ in lookups)) if eviction == "belady" else None
    pool = BlockPool(blocks, partial(free_blocks, eviction, future=future), first=0)
    hits = 0
    for number, (_, all_keys, asked, kind) in enumerate(lookups):
        if future is not None:
            future.advance(number)
        keys = all_keys if len(all_keys) <= blocks else all_keys[:blocks]
        held = pool.leading(keys[:asked])
        n = len(held)
        hits += n
        pool.touch(held, kind)
        new = pool.take(len(keys) - n)
        for block, key in zip(new, keys[n:], strict=True):
            pool.store(block, key, kind)
        held += new
        held.reverse()
        pool.release(held)
    return hits, time.process_time() - began
