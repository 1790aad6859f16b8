"""Prompts from the low end of the cache, generated tokens from the high end.

Prompts come and go as a whole, generated tokens one by one. Kept apart, the holes that generated tokens leave do not
break up the space for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import Arena
from policies.cells.search import cells_array, find_contiguous, find_scattered, last_cells
from policies.compaction.triggers import CompactionPlanner, Trigger
from policies.layouts.arena_placement import ArenaPlacement
from policies.layouts.unified import UnifiedPolicy
from policies.placement.rule import PlacementRule
from policies.policy import CacheConfig, Kernel
from policies.vocabulary import Cells, Chunk, MicroBatch, SequencePlan


class PromptDecodePlacement(ArenaPlacement):
    """Prompt tokens at the low end, generated tokens at the high end."""

    contiguous = False

    def __init__(self, arena: Arena, compaction: CompactionPlanner, trigger: Trigger, kernel: Kernel, pad: int):
        super().__init__(arena, compaction, trigger, kernel, pad)
        self.prompt_ends: dict[int, int] = {}
        """Where the prompt of each sequence ends."""

    def only_generates(self, seq: int, tokens: int) -> bool:
        """Whether its prompt has ended."""
        return self.prompt_ends.get(seq, 0) <= tokens

    def find(self, row_tokens: int, chunks: Sequence[Chunk]) -> Cells | None:
        """Cells for prompts from the low end, and for generated tokens from the high end."""
        arena = self.arena
        if row_tokens + sum([chunk.n for chunk in chunks]) > arena.free.total:
            return None
        # Tokens of each part, and whether they are of a prompt; adjacent generated tokens are one part.
        parts: list[tuple[int, bool]] = [(row_tokens, False)] if row_tokens else []
        for chunk in chunks:
            prompt = min(max(self.prompt_ends.get(chunk.seq, 0) - chunk.start, 0), chunk.n)
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
            found.append(self._lowest(arena, n) if is_prompt else last_cells(arena.free, n))
            if len(found) < len(parts):
                arena.free.take_each(cells_array(found[-1]).tolist())
        if len(found) == 1:
            return found[0]
        parts_found = [cells_array(cells) for cells in found]
        for cells in parts_found[:-1]:
            arena.free.release_each(cells.tolist())
        return np.concatenate(parts_found)

    def _find_at_once(self, arena: Arena, parts: Sequence[tuple[int, bool]]) -> Cells | None:
        """Cells for all parts in one go, if there is one prompt and it stays below the generated tokens; else None."""
        prompts = [n for n, is_prompt in parts if is_prompt]
        if len(parts) == 1 or len(prompts) != 1:
            return None
        low = cells_array(self._lowest(arena, prompts[0]))
        high = cells_array(last_cells(arena.free, sum([n for n, is_prompt in parts if not is_prompt])))
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


@dataclass(frozen=True, slots=True)
class PromptDecodeOptions:
    """Options of this layout."""

    sort_batch: bool = False
    """Place the longest sequences of a batch first."""


class PromptDecodeRegionsPolicy(UnifiedPolicy):
    """Places prompt tokens at the low end of the cache, generated tokens at the high end.

    Prompt tokens take the lowest free extent that holds them, or else the lowest free cells; generated tokens take
    the highest free cells. ``sort_batch`` places the longest sequences of a batch first.
    """

    has_placement_rule = True
    placing = PromptDecodePlacement

    def __init__(self, name: str, config: CacheConfig):
        super().__init__(name, config.without_options(), kernel="tiled")
        assert isinstance(self._placement, PromptDecodePlacement)
        self._prompt_ends = self._placement.prompt_ends
        self._sort = config.read(PromptDecodeOptions).sort_batch

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember where the prompt ends."""
        self._prompt_ends[seq] = plan.prompt_tokens

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Place the step in its order, or longest sequences first."""
        ordered = sorted(step, key=lambda chunk: -(chunk.start + chunk.n)) if self._sort else step
        return super().allocate(ordered, views=views)

    def placement_rule(self) -> PlacementRule | None:
        """None where the order of the sequences changes as they grow."""
        return None if self._sort else super().placement_rule()
