"""Split regions: prompts from the low end of the cache, generated tokens from the high end.

Prompts come and go as wholes, generated tokens one by one; kept apart, the holes that the latter leave do not break up
the space for the former.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.arena import Arena
from policies.policy import CacheConfig
from policies.search import find_run, find_scattered
from policies.unified import UnifiedPolicy
from policies.vocabulary import Chunk, IntArray, MicroBatch, SequencePlan


class SplitRegionsPolicy(UnifiedPolicy):
    """Prompt tokens take the first run from the low end that holds them, or else the lowest free cells; generated
    tokens take the highest free cells. ``CacheConfig.sort_batch`` places the longest sequences of a batch first."""

    def __init__(self, name: str, config: CacheConfig):
        super().__init__(name, config, find=self._find_cells, anywhere=True, kernel="tiled")
        self._prompts: dict[int, int] = {}
        self._sort = config.sort_batch

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember where the prompt ends."""
        self._prompts[seq] = plan.prompt_tokens

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """As it comes, or longest first."""
        if self._sort:
            step = sorted(step, key=lambda chunk: -(chunk.start + chunk.n))
        return super().allocate(step, views=views)

    def _find_cells(self, arena: Arena, chunks: Sequence[Chunk]) -> IntArray | None:
        if sum(chunk.n for chunk in chunks) > arena.free.total:
            return None
        found: list[IntArray] = []
        for chunk in chunks:
            prompt = min(max(self._prompts.get(chunk.seq, 0) - chunk.start, 0), chunk.n)
            for n, find in ((prompt, self._lowest), (chunk.n - prompt, self._highest)):
                if n > 0:
                    found.append(find(arena, n))
                    arena.free.take_cells(found[-1])
        cells = np.concatenate(found)
        arena.free.release(cells)
        return cells

    @staticmethod
    def _lowest(arena: Arena, n: int) -> IntArray:
        first, _ = find_run(arena.free, 0, n)
        if first is not None:
            return np.arange(first, first + n)
        cells = find_scattered(arena.free, 0, n)
        assert cells is not None, "the total was checked"
        return cells

    @staticmethod
    def _highest(arena: Arena, n: int) -> IntArray:
        pieces: list[IntArray] = []
        for start, end in zip(reversed(arena.free.starts), reversed(arena.free.ends), strict=True):
            pieces.append(np.arange(max(start, end - n), end)[::-1])
            n -= len(pieces[-1])
            if n == 0:
                break
        return np.concatenate(pieces)
