"""How often a prefix cache would hit, by its size and by what it forgets first: a replay of prompts, without a clock.

Requests are served one after another, each holding its blocks until it is done. What is left out is time: requests that
run side by side hold blocks which then cannot be forgotten. A run with a scheduler has that too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from kvsim.errors import UserError
from kvsim.experiments.workers import in_order
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
    from matplotlib.figure import Figure

Prompts = list[list[Key]]
"""Of each request in order the keys of its prompt's blocks."""

_SIZES = 16
"""Cache sizes that are tried, spread evenly on a logarithmic scale, where none are given."""
_TURN = 1e-9
"""How far above the straight line, as a share of its height, a curve must rise to have a turn: more than rounding."""
_SMALLEST = 0.002
"""The smallest of them, as a share of all different blocks."""


@dataclass(frozen=True)
class PrefixStudy:
    """Hit rates of a workload's prompts."""

    scenario: str
    block_size: int
    """Tokens."""
    requests: int
    references: int
    """Blocks that prompts asked for, in all."""
    distinct: int
    """Different ones."""
    table: pd.DataFrame
    """A row for each eviction policy and cache size: eviction, blocks, tokens, hits, hit_rate, of_best (share of what
    ``belady`` reaches with as many blocks, where it was tried)."""
    lookups_per_s: float
    """Blocks looked up for each second of processor time, over all runs."""
    notes: tuple[str, ...] = ()
    """What was left out of a trace or mended in it, a line each."""

    @property
    def infinite(self) -> float:
        """Hit rate of a cache that never forgets."""
        return 1 - self.distinct / self.references if self.references else 0.0

    @property
    def knees(self) -> dict[Eviction, int]:
        """Blocks of the working set under each eviction policy: where its curve turns from steep to flat, farthest
        above the straight line from its first point to its last (Satopaa et al., "Finding a Kneedle in a Haystack",
        2011). Left out where a curve has no such turn.
        """
        found = {}
        for eviction, curve in self.table.groupby("eviction", sort=False):
            size, rate = curve["blocks"].to_numpy(dtype=float), curve["hit_rate"].to_numpy(dtype=float)
            if len(size) < 3 or rate[-1] <= rate[0]:
                continue
            above = (rate - rate[0]) / (rate[-1] - rate[0]) - (size - size[0]) / (size[-1] - size[0])
            if above.max() > _TURN:
                found[cast(Eviction, eviction)] = int(size[above.argmax()])
        return found

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
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
        """Hit rate over cache size, a line for each eviction policy."""
        from kvsim.reports.plots import prefix_figure

        return prefix_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the table and the picture; the files written. Raises ``UserError``."""
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

    ``blocks``: the sizes; by default 16 of them up to one that holds everything. ``block_size`` in tokens; by default
    the scenario's. ``progress`` is told the share done. Raises ``UserError`` and ``WorkloadError``.
    """
    scenario = load_scenario(scenario)
    size = block_size or scenario.cache.block_size
    workload = scenario.build_workload()
    prompts = [prompt_keys(request, size) for request in workload]
    references = sum(map(len, prompts))
    if references == 0:
        raise UserError(f"{scenario.name}: no prompt fills a block of {size} tokens; try a smaller block size")
    distinct = len(set().union(*prompts))
    sizes = sorted(set(blocks)) if blocks else _sizes(distinct, max(map(len, prompts)))
    tried = list(dict.fromkeys(evictions or EVICTIONS))
    work = [(eviction, n) for eviction in tried for n in sizes]
    rows, seconds = [], 0.0
    for (eviction, n), (hits, took) in zip(work, in_order(partial(_hits, prompts), work), strict=True):
        rows.append((eviction, n, n * size, hits, hits / references))
        seconds += took
        if progress is not None:
            progress(len(rows) / len(work))
    table = pd.DataFrame(rows, columns=["eviction", "blocks", "tokens", "hits", "hit_rate"])
    best = table[table["eviction"] == "belady"].set_index("blocks")["hit_rate"]
    bound = table["blocks"].map(best)
    table["of_best"] = (table["hit_rate"] / bound).where(bound > 0)
    speed = references * len(work) / seconds
    notes = tuple(workload.notes)
    return PrefixStudy(scenario.name, size, len(prompts), references, distinct, table, speed, notes)


def prompt_keys(request: Request, block_size: int) -> list[Key]:
    """The blocks that a prompt asks for: all that are known in full, its last partial one included where a trace
    names it (Mooncake does)."""
    content = Content(request.content) if request.content else content_of(request).head(request.prompt_tokens)
    return content.keys(block_size, -(-request.prompt_tokens // block_size))


def _sizes(distinct: int, longest: int) -> list[int]:
    """Cache sizes from a small share of all blocks to all; none too small for the longest prompt."""
    least = min(max(round(distinct * _SMALLEST), longest, 1), distinct)
    return sorted({round(n) for n in np.geomspace(least, distinct, _SIZES)})


def _hits(prompts: Prompts, tried: tuple[Eviction, int]) -> tuple[int, float]:
    """Blocks found by all requests, served one after another, and the processor seconds that it took."""
    eviction, blocks = tried
    began = time.process_time()
    future = Future(prompts) if eviction == "belady" else None
    pool = BlockPool(blocks, partial(free_blocks, eviction, future=future), first=0)
    hits = 0
    for number, keys in enumerate(_cut(prompts, blocks)):
        if future is not None:
            future.advance(number)
        found = pool.leading(keys)
        n = len(found)
        hits += n
        pool.touch(found)
        new = pool.take(len(keys) - n)
        for block, key in zip(new, keys[n:], strict=True):
            pool.store(block, key)
        found += new
        found.reverse()
        pool.release(found)
    return hits, time.process_time() - began


def _cut(prompts: Prompts, blocks: int) -> Iterator[list[Key]]:
    """Of a prompt that does not fit into the whole cache only the beginning takes part."""
    return (keys if len(keys) <= blocks else keys[:blocks] for keys in prompts)
