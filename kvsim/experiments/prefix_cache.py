"""Hit rates of a prefix cache by size and eviction policy: a replay of requests without a clock.

Requests are served one after another, in order of arrival, each holding its blocks until it is done. Time is left out:
in a real server, concurrent requests hold blocks that then cannot be evicted. A run with a scheduler includes that
effect. What is looked up, cached and counted is defined in ``kvsim.scenario.prefixes``.

LRU is counted for all sizes in one pass. Other orders are replayed cache by cache; where that would take long, on two
samples of the blocks, in caches that are smaller in proportion (Waldspurger et al., "Efficient MRC construction with
SHARDS", FAST 2015). A sample takes every so manieth block in order of use, so that much-used blocks are in it in due
proportion; what it has too few or too many of all hits is added at every size, as in SHARDS-adj.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvsim.errors import UserError
from kvsim.experiments.stack_distances import lru_hits
from kvsim.experiments.workers import map_ordered
from kvsim.results import results_folder
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES, InfiniteCache, Lookup, hit_rate
from kvsim.scenario.scenario import Scenario, load_scenario
from policies import EVICTIONS
from policies.content import Key
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
_MOST_LOOKUPS = 2_500_000
"""So many blocks are looked up at most, over all caches but those of ``lru``: some ten seconds of processor time."""
_READING = 0.4
"""Share of the work, as progress tells it, that is done when all is read."""
_ENDLESS = 2**62
"""The size of a cache that never evicts."""
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
    one_in: int = 1
    """Two samples of one block in so many were replayed for orders other than ``lru``; 1: all blocks were."""
    error: float | None = None
    """About how far off a hit rate may be: by how much the two samples differ at most, or twice as much as their mean
    is off under ``lru``, whichever is more; None without samples."""
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
            "one_in": self.one_in,
            "error": self.error,
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

    tell = progress or (lambda share: None)
    scenario = load_scenario(scenario)
    size = block_size or scenario.cache.block_size
    workload = scenario.build_workload()
    notes = tuple(workload.notes)
    if workload.prefixes == "unknown":
        return PrefixStudy(scenario.name, size, workload.n_requests, None, pd.DataFrame(columns=_COLUMNS), notes=notes)
    lookups, infinite = _lookups(workload, size, tell)
    reuse = infinite.reuse
    if reuse.blocks == 0:
        raise UserError(f"{scenario.name}: no prompt is longer than a block of {size} tokens; try a smaller block size")
    sizes = sorted(set(blocks)) if blocks else _sizes(infinite.capacity, max(len(each.keys) for each in lookups))
    names = tuple(dict.fromkeys(evictions or EVICTIONS))
    found, one_in, error = _hits(lookups, names, sizes, tell)
    rows = [
        (name, n, n * size, hits, hit_rate(hits * size, reuse.tokens, workload.prefixes))
        for name in names
        for n, hits in zip(sizes, found[name], strict=True)
    ]
    table = pd.DataFrame(rows, columns=_COLUMNS[:-1])
    best = table[table["eviction"] == "belady"].set_index("blocks")["hit_rate"]
    bound = table["blocks"].map(best)
    table["of_best"] = (table["hit_rate"] / bound).where(bound > 0)
    tell(1.0)
    off = error * size / reuse.tokens if one_in > 1 else None
    return PrefixStudy(scenario.name, size, len(lookups), reuse, table, one_in, off, notes)


def _lookups(
    workload: Workload, block_size: int, progress: Callable[[float], None]
) -> tuple[list[Lookup], InfiniteCache]:
    """What each request looks up, in order of arrival, and a cache that has served them all."""
    infinite = InfiniteCache(block_size, workload.prefixes)
    served = []
    for now, request in timed(workload):
        lookup = infinite.serve(request)
        served.append((now, lookup._replace(keys=array("q", lookup.keys))))  # A fifth of a list's memory.
        progress(_READING * len(served) / max(workload.n_requests, len(served)))
    served.sort(key=itemgetter(0))
    return [lookup for _, lookup in served], infinite


def _hits(
    lookups: list[Lookup], names: tuple[str, ...], sizes: Sequence[int], progress: Callable[[float], None]
) -> tuple[dict[str, list[int]], int, float]:
    """Blocks found under each order in a cache of each size, of how many blocks one was replayed, and the error."""
    *exact, most = lru_hits(lookups, [*sizes, _ENDLESS])
    others = [name for name in names if name != "lru"]
    work = sum(each.asked for each in lookups) * len(others) * len(sizes)
    one_in = 1 if work <= _MOST_LOOKUPS else 2 * -(-work // _MOST_LOOKUPS)
    samples = [lookups] if one_in == 1 else _samples(lookups, one_in)
    small = [max(round(n / one_in), 1) for n in sizes]
    caches = [(sample, name, n) for name in others for n in small for sample in samples]
    counted = []
    for hits in map_ordered(partial(_count_hits, caches), range(len(caches))):
        counted.append(hits)
        progress(_READING + (1 - _READING) * len(counted) / len(caches))
    found = np.array(counted, dtype=np.int64).reshape(len(others), len(sizes), len(samples))
    error = 0.0
    if one_in > 1:
        *lru, ends = np.array([lru_hits(sample, [*small, _ENDLESS]) for sample in samples]).T
        found, lru = (np.clip(one_in * (hits - ends) + most, 0, most) for hits in (found, np.array(lru)))
        means = found.mean(axis=2)
        error = max(np.ptp(found, axis=2).max(), 2 * np.abs(lru.mean(axis=1) - exact).max())
        found = means[:, :, None]
    rounded = np.rint(found[:, :, 0]).astype(int).tolist()
    return {"lru": exact, **dict(zip(others, rounded, strict=True))}, one_in, float(error)


def _samples(lookups: Sequence[Lookup], one_in: int) -> list[list[Lookup]]:
    """What is looked up of every so manieth block, in order of use: two samples without a block in common."""
    uses: Counter[Key] = Counter()
    for each in lookups:
        uses.update(each.keys)
    blocks = np.fromiter(uses, np.int64)[np.argsort(-np.fromiter(uses.values(), np.int64), kind="stable")]
    samples = []
    for first in (one_in // 4, 3 * one_in // 4):
        chosen, sample = set(blocks[first::one_in].tolist()), []
        for each in lookups:
            asked = [key for key in each.keys[: each.asked] if key in chosen]
            left = [key for key in each.keys[each.asked :] if key in chosen]
            if asked or left:
                sample.append(each._replace(keys=asked + left, asked=len(asked)))
        samples.append(sample)
    return samples


def _sizes(most: int, longest: int) -> list[int]:
    """Cache sizes up to ``most`` blocks; the smallest still holds the longest request."""
    least = min(max(round(most * _SMALLEST), longest, 1), most)
    return sorted({round(n) for n in np.geomspace(least, most, _SIZES)})


def _count_hits(caches: Sequence[tuple[Sequence[Lookup], str, int]], number: int) -> int:
    """Number of blocks found in one of these caches, given as (lookups, eviction, blocks).

    Requests are cut to the size of the cache.
    """
    lookups, eviction, blocks = caches[number]
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
    return hits
