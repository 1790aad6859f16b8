"""One sequence's block table."""

from __future__ import annotations

import numpy as np

from policies.compiled import i64
from policies.content import Content
from policies.paging.growth import blocks_for
from policies.placement.rule import Row
from policies.vocabulary import IntArray, SequencePlan, View

UNKNOWN = SequencePlan(0, 0, 0)
"""The plan of a sequence that was not announced."""


class BlockTable(Row):
    """The blocks of one sequence, and how far they are filled."""

    def __init__(self, content: Content, plan: SequencePlan = UNKNOWN, seq: int = -1):
        super().__init__(seq)
        self.content = content
        """The text of the sequence."""
        self.plan = plan
        """What was known of it when it started."""
        self.blocks: list[int] = []
        """The block of every ``block_size`` positions; ``NULL`` where it was given up behind a window."""
        self.full_at: i64 = 0
        """While it is a row, the tokens for which it has blocks."""
        self.reserved = 0
        """Tokens for which a ``reserve`` has set room aside whose chunk is still to be placed; 0 if there is none."""
        self.n_keyed = 0
        """Blocks from the first that have got their prefix-cache key (vLLM's ``num_cached_block``)."""
        self.skipped = 0
        """Blocks from the first that were given up behind a window."""

    def cells(self, start: int, stop: int, size: int) -> IntArray:
        """The cells of positions ``[start, stop)``, with blocks of ``size`` cells; shape (stop - start,)."""
        if stop - start == 1:
            return np.array([self.blocks[start // size] * size + start % size], dtype=np.int64)
        positions = np.arange(start, stop)
        first = start // size
        blocks = np.array(self.blocks[first : blocks_for(stop, size)], dtype=np.int64)
        return np.asarray(blocks[positions // size - first] * size + positions % size)

    def view(self, size: int) -> View:
        """All cells that hold a token of the sequence, and their positions."""
        first = self.skipped * size
        return View(self.cells(first, int(self.length), size), np.arange(first, self.length))
