"""Prompts from the low end of the cache, generated tokens from the high end.

Prompts come and go as a whole, generated tokens one by one. Kept apart, the holes that generated tokens leave do not
break up the space for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import padded_span
from policies.cells.search import cells_array, find_contiguous, find_scattered
from policies.fast_forward.arena_lockstep import ArenaLockstepBatch
from policies.fast_forward.free_cell_path import FreeCellPath
from policies.layouts.unified import UnifiedPolicy
from policies.policy import CacheConfig
from policies.vocabulary import Chunk, IntArray, MicroBatch, SequencePlan


class PromptDecodeRegionsPolicy(UnifiedPolicy):
    """Places prompt tokens at the low end of the cache, generated tokens at the high end.

    Prompt tokens take the lowest free extent that holds them, or else the lowest free cells; generated tokens take
    the highest free cells. ``CacheConfig.sort_batch`` places the longest sequences of a batch first.
    """

    can_fast_forward = True
    contiguous = False

    def __init__(self, name: str, config: CacheConfig):
        super().__init__(name, config, kernel="tiled")
        self._prompt_ends: dict[int, int] = {}
        self._sort = config.sort_batch

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember where the prompt ends."""
        self._prompt_ends[seq] = plan.prompt_tokens

    def allocate(
        self, step: Sequence[Chunk], *, views: bool = False, lockstep_tokens: int = 0
    ) -> tuple[MicroBatch, ...]:
        """Place the step in its order, or longest sequences first."""
        return super().allocate(self._ordered(step), views=views)

    def _find_beside(self, lockstep_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        arena = self.arena
        if lockstep_tokens + sum([chunk.n for chunk in chunks]) > arena.free.total:
            return None
        # Tokens of each part, and whether they are of a prompt; adjacent generated tokens are one part.
        parts: list[tuple[int, bool]] = [(lockstep_tokens, False)] if lockstep_tokens else []
        for chunk in chunks:
            prompt = min(max(self._prompt_ends.get(chunk.seq, 0) - chunk.start, 0), chunk.n)
            if prompt:
                parts.append((prompt, True))
            if chunk.n > prompt:
                before = parts.pop()[0] if parts and not parts[-1][1] else 0
                parts.append((before + chunk.n - prompt, False))
        at_once = self._find_at_once(arena, parts)
        if at_once is not None:
            return at_once
        found: list[Cells] = []
        for n, is_prompt in parts:
            found.append(self._lowest(arena, n) if is_prompt else arena.free.last_cells(n))
            if len(found) < len(parts):
                arena.free.take_cells(cells_array(found[-1]))
        if len(found) == 1:
            return found[0]
        parts_found = [cells_array(cells) for cells in found]
        for cells in parts_found[:-1]:
            arena.free.release(cells)
        return np.concatenate(parts_found)

    def _find_at_once(self, arena: Arena, parts: Sequence[tuple[int, bool]]) -> Cells | None:
        """Cells for all parts in one go, if there is one prompt and it stays below the generated tokens; else None."""
        prompts = [n for n, is_prompt in parts if is_prompt]
        if len(parts) == 1 or len(prompts) != 1:
            return None
        low = cells_array(self._lowest(arena, prompts[0]))
        high = cells_array(arena.free.last_cells(sum([n for n, is_prompt in parts if not is_prompt])))
        if low[-1] >= high[-1]:
            return None
        if parts[0][1]:
            return np.concatenate((low, high))
        before = parts[0][0]
        return np.concatenate((high[:before], low, high[before:]))

    @staticmethod
    def _lowest(arena: Arena, n: int) -> Cells:
        first, _ = find_contiguous(arena.free, 0, n)
        if first is not None:
            return range(first, first + n)
        cells = find_scattered(arena.free, 0, n)
        assert cells is not None, "the total was checked"
        return cells

    def _ordered(self, step: Sequence[Chunk]) -> Sequence[Chunk]:
        """The step in its order, or longest sequences first."""
        return sorted(step, key=lambda chunk: -(chunk.start + chunk.n)) if self._sort else step

    def lockstep_batch(self) -> ArenaLockstepBatch | None:
        """None where the order of the sequences changes as they grow."""
        return None if self._sort else super().lockstep_batch()

    def may_join_lockstep(self, seq: int, tokens: int) -> bool:
        """Not before its prompt has ended."""
        return self._prompt_ends.get(seq, 0) <= tokens

    def _generates(self, step: Sequence[Chunk]) -> bool:
        return all(self._prompt_ends.get(chunk.seq, 0) <= chunk.start for chunk in step)

    def _free_cell_path(self, tokens: int, n: int) -> FreeCellPath | None:
        """Down the free cells."""
        return _DescendingPath(self.arena, tokens, n, self._pad, anywhere=True)


class _DescendingPath(FreeCellPath):
    """Decode steps that take the highest free cells."""

    def _find(self, n: int) -> Cells:
        steps = min(n, self.arena.free.total // self.tokens)
        return self.arena.free.last_cells(steps * self.tokens)

    def tops(self) -> IntArray:
        """Top of the arena after each step, constant because the first cell is the highest; shape (steps,)."""
        return np.full(self.steps, max(self.arena.top, int(self.cells[0]) + 1))

    def spans(self) -> IntArray:
        """Span of each step, constant like the top; shape (steps,)."""
        top = max(self.arena.top, int(self.cells[0]) + 1)
        return np.full(self.steps, padded_span(top, self._pad, self.arena.size))
