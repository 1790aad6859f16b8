"""Hit rates of a prefix cache by size and eviction policy: a replay of prompts without a clock.

Requests are served sequentially, each holding its blocks until it is done. Time is left out: in a real server,
concurrent requests hold blocks that then cannot be evicted. A run with a scheduler includes that effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvsim.errors import UserError
from kvsim.experiments.workers import map_ordered
from kvsim.results import writable
from kvsim.scenario.content import content_of
from kvsim.scenario.scenario import Scenario, load_scenario
from policies import EVICTIONS, Content, Eviction
from policies.content import Key
from policies.paging.blocks import BlockPool
from policies.paging.eviction import free_blocks
from policies.paging.free_lists.belady import Future
from workloads import Request

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Prompts = list[list[Key]]
"""The keys of each prompt's blocks, request by request."""

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
    references: int
    """Total number of blocks that the prompts look up."""
    distinct: int
    """Number of distinct blocks among them."""
    table: pd.DataFrame
    """One row per eviction policy and cache size: eviction, blocks, tokens, hits, hit_rate, of_best (hit rate divided
    by that of ``belady`` at the same size, if it was tried)."""
    lookups_per_s: float
    """Blocks looked up per second of processor time, over all runs."""
    notes: tuple[str, ...] = ()
    """Rows of a trace that were left out or repaired, one line each."""

    @property
    def infinite(self) -> float:
        """Hit rate of a cache that never evicts."""
        return 1 - self.distinct / self.references if self.references else 0.0

    @property
    def knees(self) -> dict[Eviction, int]:
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
                knees[cast(Eviction, eviction)] = int(size[above.argmax()])
        return knees

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "scenario": self.scenario,
            "block_size": self.block_size,
            "requests": self.requests,
            "references": self.references,
            "distinct": self.distinct,
            "infinite_hit_rate": self.infinite,
            "knee_blocks": self.knees,
            "lookups_per_s": self.lookups_per_s,
            "runs": [
                {key: None if value != value else value for key, value in row.items()}
                for row in self.table.to_dict("records")
            ],
        }

    def plot(self) -> Figure:
        """Draw hit rate over cache size, with a line per eviction policy."""
        from kvsim.reports.plots import prefix_figure

        return prefix_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the table and the figure to a folder and return the files. Raises ``UserError``."""
        target = writable(folder)
        written = [target / "prefix-cache.csv", target / "prefix-cache.png"]
        try:
            self.table.to_csv(written[0], index=False)
            self.plot().savefig(written[1], dpi=130)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror}") from None
        return written


def prefix_cache(
    scenario: Scenario | str | Path,
    evictions: Sequence[Eviction] | None = None,
    blocks: Sequence[int] | None = None,
    *,
    block_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> PrefixStudy:
    """Replay the prompts of a scenario's workload through prefix caches of several sizes and eviction policies.

    ``blocks``: the cache sizes; by default 16 of them, up to one that holds everything. ``block_size``: in tokens; by
    default the scenario's. ``progress`` is called with the share done. Raises ``UserError`` and ``WorkloadError``.
    """
    import pandas as pd

    scenario = load_scenario(scenario)
    size = block_size or scenario.cache.block_size
    workload = scenario.build_workload()
    prompts = [prompt_keys(request, size) for request in workload]
    references = sum(map(len, prompts))
    if references == 0:
        raise UserError(f"{scenario.name}: no prompt fills a block of {size} tokens; try a smaller block size")
    distinct = len(set().union(*prompts))
    sizes = sorted(set(blocks)) if blocks else _sizes(distinct, max(map(len, prompts)))
    caches = [(eviction, n) for eviction in dict.fromkeys(evictions or EVICTIONS) for n in sizes]
    rows, seconds = [], 0.0
    for (eviction, n), (hits, took) in zip(caches, map_ordered(partial(_count_hits, prompts), caches), strict=True):
        rows.append((eviction, n, n * size, hits, hits / references))
        seconds += took
        if progress is not None:
            progress(len(rows) / len(caches))
    table = pd.DataFrame(rows, columns=["eviction", "blocks", "tokens", "hits", "hit_rate"])
    best = table[table["eviction"] == "belady"].set_index("blocks")["hit_rate"]
    bound = table["blocks"].map(best)
    table["of_best"] = (table["hit_rate"] / bound).where(bound > 0)
    lookups_per_s = references * len(caches) / seconds
    notes = tuple(workload.notes)
    return PrefixStudy(scenario.name, size, len(prompts), references, distinct, table, lookups_per_s, notes)


def prompt_keys(request: Request, block_size: int) -> list[Key]:
    """Return the keys of the blocks that a prompt looks up.

    These are its full blocks, and its last partial block if the trace names it, as Mooncake does.
    """
    content = Content(request.content) if request.content else content_of(request).head(request.prompt_tokens)
    return content.keys(block_size, -(-request.prompt_tokens // block_size))


def _sizes(distinct: int, longest: int) -> list[int]:
    """Cache sizes up to all blocks; the smallest still holds the longest prompt."""
    least = min(max(round(distinct * _SMALLEST), longest, 1), distinct)
    return sorted({round(n) for n in np.geomspace(least, distinct, _SIZES)})


def _count_hits(prompts: Prompts, cache: tuple[Eviction, int]) -> tuple[int, float]:
    """Total number of hits in one cache, given as (eviction, blocks), and the processor seconds that it took."""
    eviction, blocks = cache
    began = time.process_time()
    future = Future(prompts) if eviction == "belady" else None
    pool = BlockPool(blocks, partial(free_blocks, eviction, future=future), first=0)
    hits = 0
    for number, keys in enumerate(_truncated(prompts, blocks)):
        if future is not None:
            future.advance(number)
        held = pool.leading(keys)
        n = len(held)
        hits += n
        pool.touch(held)
        new = pool.take(len(keys) - n)
        for block, key in zip(new, keys[n:], strict=True):
            pool.store(block, key)
        held += new
        held.reverse()
        pool.release(held)
    return hits, time.process_time() - began


def _truncated(prompts: Prompts, blocks: int) -> Iterator[list[Key]]:
    """Prompts cut to the size of the cache."""
    return (keys if len(keys) <= blocks else keys[:blocks] for keys in prompts)
