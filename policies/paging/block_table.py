"""One sequence's block table."""

from __future__ import annotations

import numpy as np

from policies.content import Content
from policies.fast_forward.lockstep import LockstepSequence
from policies.paging.growth import blocks_for
from policies.vocabulary import IntArray, SequencePlan, View

UNKNOWN = SequencePlan(0, 0, 0)
"""The plan of a sequence that was not announced."""


class BlockTable(LockstepSequence):
    """The blocks of one sequence, and how far they are filled."""

    __slots__ = ("begins_at", "blocks", "content", "n_keyed", "plan", "reserved", "seq", "skipped")

    def __init__(self, content: Content, plan: SequencePlan = UNKNOWN, seq: int = -1):
        super().__init__()
        self.seq = seq
        """The number of the sequence."""
        self.content = content
        """The text of the sequence."""
        self.plan = plan
        """What was known of it when it started."""
        self.blocks: list[int] = []
        """The block of every ``block_size`` positions; ``NULL`` where it was given up behind a window."""
        self.begins_at = 0
        """In a lockstep batch, the remainder of the step count by ``block_size`` at which it begins a block."""
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
        return View(self.cells(first, self.length, size), np.arange(first, self.length))
