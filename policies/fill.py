"""How far the blocks of a pool are filled: what can be seen of each by those who hold it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np


class Fill:
    """Tokens in each block that a sequence can see, and their sum."""

    def __init__(self, n_blocks: int, block_size: int):
        self.stored = 0
        """Tokens in all blocks."""
        self.torn: set[int] = set()
        """Blocks that one of their holders sees a part of only: when another leaves, they must be counted anew."""
        self.kept = True
        """Whether all this is up to date; otherwise it is to be counted anew from the block tables."""
        self._tokens = array("i", bytes(4 * n_blocks))
        self._block_size = block_size

    def begin_anew(self) -> None:
        """No block is filled as far as is known, and from now on that is kept up to date."""
        self._tokens = array("i", bytes(4 * len(self._tokens)))
        self.stored, self.kept = 0, True

    def raise_to(self, block: int, tokens: int) -> None:
        """At least that many tokens of the block can be seen."""
        if tokens > self._tokens[block]:
            self.set_to(block, tokens)

    def fill(self, blocks: Iterable[int]) -> None:
        """All tokens of these blocks can be seen."""
        if not self.kept:
            return
        tokens, size, more = self._tokens, self._block_size, 0
        for block in blocks:
            if tokens[block] < size:
                more += size - tokens[block]
                tokens[block] = size
        self.stored += more

    def set_to(self, block: int, tokens: int) -> None:
        """Just that many tokens of the block can be seen."""
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
        if self.torn:
            self.torn.difference_update(blocks)

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token."""
        behind = int((np.frombuffer(self._tokens, dtype=np.int32)[::-1] != 0).argmax())
        last = len(self._tokens) - 1 - behind
        return last * self._block_size + self._tokens[last] if self._tokens[last] else 0
