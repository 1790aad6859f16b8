"""How far the blocks of a pool are filled: what can be seen of each by those who hold it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

_PIECE = 256
"""Blocks that are looked at together."""


class BlockOccupancy:
    """Tokens in each block that a sequence can see, and their sum."""

    def __init__(self, n_blocks: int, block_size: int):
        self.stored = 0
        """Tokens in all blocks."""
        self.partially_visible: set[int] = set()
        """Blocks that one of their holders sees a part of only: when another leaves, they must be counted anew."""
        self._high = 0
        """No block above this one holds a token."""
        self.kept = True
        """Whether all this is up to date; otherwise it is to be counted anew from the block tables."""
        self._tokens = array("i", bytes(4 * n_blocks))
        self._block_size = block_size

    def begin_anew(self) -> None:
        """No block is filled as far as is known, and from now on that is kept up to date."""
        self._tokens = array("i", bytes(4 * len(self._tokens)))
        self.stored, self._high, self.kept = 0, 0, True

    def raise_to(self, block: int, tokens: int) -> None:
        """At least that many tokens of the block can be seen."""
        if tokens > self._tokens[block]:
            self.set_to(block, tokens)

    def fill(self, blocks: Iterable[int]) -> None:
        """All tokens of these blocks can be seen."""
        tokens, size, more = self._tokens, self._block_size, 0
        for block in blocks:
            if block > self._high:
                self._high = block
            if tokens[block] < size:
                more += size - tokens[block]
                tokens[block] = size
        self.stored += more

    def set_to(self, block: int, tokens: int) -> None:
        """Just that many tokens of the block can be seen."""
        if block > self._high:
            self._high = block
        self.stored += tokens - self._tokens[block]
        self._tokens[block] = tokens

    def empty(self, blocks: Iterable[int]) -> None:
        """Nobody holds these blocks any more."""
        if self.kept:
            tokens, fewer = self._tokens, 0
            for block in blocks:
                fewer += tokens[block]
                tokens[block] = 0
            self.stored -= fewer
        if self.partially_visible:
            self.partially_visible.difference_update(blocks)

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token."""
        tokens, high = self._tokens, self._high
        if not tokens[high]:
            # Piece by piece downwards: mostly a few blocks below there is one.
            held = np.frombuffer(tokens, dtype=np.int32)
            while high > 0 and not (piece := held[max(high - _PIECE, 0) : high]).any():
                high = max(high - _PIECE, 0)
            high = max(high - 1 - int((piece[::-1] != 0).argmax()), 0) if high > 0 else 0
            self._high = high
        return high * self._block_size + tokens[high] if tokens[high] else 0
