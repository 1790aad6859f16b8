"""How many tokens each block of a pool holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

_SEARCH = 256
"""Blocks that a search for the highest filled one looks at together."""


class BlockOccupancy:
    """For each block the tokens in it that a sequence can see, and the sum over all blocks."""

    def __init__(self, n_blocks: int, block_size: int):
        self.stored = 0
        """Tokens in all blocks."""
        self.partially_visible: set[int] = set()
        """Blocks of which some holder sees only a part: when another holder goes, they must be counted anew."""
        self.up_to_date = True
        """Whether all this is up to date; otherwise it must be counted anew from the block tables."""
        self._highest = 0
        """No block above this one holds a token."""
        self._tokens = array("i", bytes(4 * n_blocks))
        self._block_size = block_size

    def reset(self) -> None:
        """Set all blocks to empty, to be counted anew and kept up to date from now on."""
        self._tokens = array("i", bytes(4 * len(self._tokens)))
        self.stored, self._highest, self.up_to_date = 0, 0, True

    def raise_to(self, block: int, tokens: int) -> None:
        """Count at least ``tokens`` tokens in the block."""
        if tokens > self._tokens[block]:
            self.set_to(block, tokens)

    def fill(self, blocks: Iterable[int]) -> None:
        """Count these blocks as full."""
        tokens, size, more = self._tokens, self._block_size, 0
        for block in blocks:
            if block > self._highest:
                self._highest = block
            if tokens[block] < size:
                more += size - tokens[block]
                tokens[block] = size
        self.stored += more

    def set_to(self, block: int, tokens: int) -> None:
        """Count exactly ``tokens`` tokens in the block."""
        if block > self._highest:
            self._highest = block
        self.stored += tokens - self._tokens[block]
        self._tokens[block] = tokens

    def empty(self, blocks: Iterable[int]) -> None:
        """Count these blocks, which no sequence holds any more, as empty."""
        if self.up_to_date:
            tokens, fewer = self._tokens, 0
            for block in blocks:
                fewer += tokens[block]
                tokens[block] = 0
            self.stored -= fewer
        if self.partially_visible:
            self.partially_visible.difference_update(blocks)

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token; 0 if there is none."""
        tokens, highest = self._tokens, self._highest
        if not tokens[highest]:
            # The next filled block is mostly a few blocks further down.
            filled = np.frombuffer(tokens, dtype=np.int32)
            while highest > 0 and not (part := filled[max(highest - _SEARCH, 0) : highest]).any():
                highest = max(highest - _SEARCH, 0)
            highest = max(highest - 1 - int((part[::-1] != 0).argmax()), 0) if highest > 0 else 0
            self._highest = highest
        return highest * self._block_size + tokens[highest] if tokens[highest] else 0
