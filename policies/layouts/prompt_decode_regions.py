"""Split regions: prompts from the low end of the cache, generated tokens from the high end.

Prompts come and go as wholes, generated tokens one by one; kept apart, the holes that the latter leave do not break up
the space for the former.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import padded_span
from policies.cells.search import Cells, cells_array, find_run, find_scattered, in_order
from policies.fast_forward.forecast import MAX_STEPS, Usages
from policies.fast_forward.free_cell_path import FreeCellPath, runs_after
from policies.layouts.unified import UnifiedPolicy
from policies.policy import CacheConfig
from policies.vocabulary import Chunk, IntArray, MicroBatch, SequencePlan


class PromptDecodeRegionsPolicy(UnifiedPolicy):
    """Prompt tokens take the first run from the low end that holds them, or else the lowest free cells; generated
    tokens take the highest free cells. ``CacheConfig.sort_batch`` places the longest sequences of a batch first."""

    def __init__(self, name: str, config: CacheConfig):
        super().__init__(name, config, find=self._find_cells, anywhere=True, kernel="tiled")
        self._prompts: dict[int, int] = {}
        self._sort = config.sort_batch

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember where the prompt ends."""
        self._prompts[seq] = plan.prompt_tokens

    def allocate(
        self, step: Sequence[Chunk], *, views: bool = False, lockstep_tokens: int = 0
    ) -> tuple[MicroBatch, ...]:
        """As it comes, or longest first."""
        return super().allocate(self._ordered(step), views=views)

    def _find_cells(self, arena: Arena, chunks: Sequence[Chunk]) -> Cells | None:
        if sum([chunk.n for chunk in chunks]) > arena.free.total:
            return None
        # Of each part how many tokens, and whether of a prompt; tokens generated one after another are found together.
        parts: list[tuple[int, bool]] = []
        for chunk in chunks:
            prompt = min(max(self._prompts.get(chunk.seq, 0) - chunk.start, 0), chunk.n)
            if prompt:
                parts.append((prompt, True))
            if chunk.n > prompt:
                before = parts.pop()[0] if parts and not parts[-1][1] else 0
                parts.append((before + chunk.n - prompt, False))
        apart = self._apart(arena, parts)
        if apart is not None:
            return apart
        found: list[Cells] = []
        for n, is_prompt in parts:
            found.append(self._lowest(arena, n) if is_prompt else _from_the_top(arena, n))
            if len(found) < len(parts):
                arena.free.take_cells(cells_array(found[-1]))
        if len(found) == 1:
            return found[0]
        parts_found = [cells_array(cells) for cells in found]
        for cells in parts_found[:-1]:
            arena.free.release(cells)
        return np.concatenate(parts_found)

    def _apart(self, arena: Arena, parts: Sequence[tuple[int, bool]]) -> Cells | None:
        """All cells at once, where one prompt stays below all generated tokens; None where that is not certain."""
        prompts = [n for n, is_prompt in parts if is_prompt]
        if len(parts) == 1 or len(prompts) != 1:
            return None
        low = cells_array(self._lowest(arena, prompts[0]))
        high = cells_array(_from_the_top(arena, sum([n for n, is_prompt in parts if not is_prompt])))
        if low[-1] > high[-1]:
            return None
        if parts[0][1]:
            return np.concatenate((low, high))
        before = parts[0][0]
        return np.concatenate((high[:before], low, high[before:]))

    @staticmethod
    def _lowest(arena: Arena, n: int) -> Cells:
        first, _ = find_run(arena.free, 0, n)
        if first is not None:
            return range(first, first + n)
        cells = find_scattered(arena.free, 0, n)
        assert cells is not None, "the total was checked"
        return cells

    def _ordered(self, step: Sequence[Chunk]) -> Sequence[Chunk]:
        """As it comes, or longest first."""
        return sorted(step, key=lambda chunk: -(chunk.start + chunk.n)) if self._sort else step

    def _way(self, step: Sequence[Chunk], n: int) -> FreeCellPath | None:
        """Down the free cells, once all prompts have ended."""
        if any(self._prompts.get(chunk.seq, 0) > chunk.start for chunk in step):
            return None
        return _Downwards(self.arena, self._ordered(step), n, self._pad)


class _Downwards(FreeCellPath):
    """Steps that take the highest free cells."""

    def __init__(self, arena: Arena, step: Sequence[Chunk], n: int, pad: int):
        self.arena = arena
        self.step = step
        self._pad = pad
        self._anywhere = True
        self.steps = max(min(n, MAX_STEPS, arena.free.total // len(step)), 0)
        self.cells = _from_the_top(arena, self.steps * len(step)) if self.steps else range(0)

    def tops(self) -> IntArray:
        """The first cell is the highest."""
        return np.full(self.steps, max(self.arena.top, int(self.cells[0]) + 1))

    def spans(self) -> IntArray:
        """Nor does it change after the first step."""
        top = max(self.arena.top, int(self.cells[0]) + 1)
        return np.full(self.steps, padded_span(top, self._pad, self.arena.size))

    def usages(self, k: int) -> Usages:
        """As if the arena stood on its head."""
        size, tokens = self.arena.size, len(self.step)
        taken = tokens * np.arange(1, k + 1)
        starts, ends = self.arena.free.arrays()
        cells = size - 1 - cells_array(self.cells[: k * tokens])
        runs, largest = runs_after(size - ends[::-1], size - starts[::-1], cells, taken)
        used = self.arena.used + taken
        return Usages(used, used, size - used, runs, largest, self.tops()[:k], np.zeros(k, dtype=np.int64))


def _from_the_top(arena: Arena, n: int) -> Cells:
    """The highest ``n`` free cells, of at least as many, descending."""
    starts, ends = arena.free.starts, arena.free.ends
    if n == 1:
        return range(ends[-1] - 1, ends[-1])
    if ends[-1] - starts[-1] >= n:
        return np.arange(ends[-1] - 1, ends[-1] - 1 - n, -1)
    first, last = arena.free.arrays()
    cells: IntArray = arena.size - 1 - in_order(arena.size - last[::-1], (last - first)[::-1], n)
    return cells
