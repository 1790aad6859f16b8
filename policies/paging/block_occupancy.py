"""How many tokens each block of a pool holds."""

from __future__ import annotations

from policies.paging.block_extents import BlockExtents


class BlockOccupancy:
    """For each block the tokens in it that a sequence can see, and the sum over all blocks."""

    def __init__(self, n_blocks: int, block_size: int):
        self.stored = 0
        """Tokens in all blocks."""
        self.partially_visible: set[int] = set()
        """Blocks of which some holder sees only a part: when another holder goes, they must be counted anew."""
        self.up_to_date = True
        """Whether all this is up to date; otherwise it must be counted anew from the block tables."""
        self.extents: BlockExtents | None = None
        """Which blocks are free, where that is kept; they hold no token."""
        self.highest = 0
        """No block above this one holds a token."""
        self._tokens = [0] * n_blocks
        self._block_size = block_size

    def reset(self) -> None:
        """Set all blocks to empty, to be counted anew and kept up to date from now on."""
        self._tokens = [0] * len(self._tokens)
        self.stored, self.highest, self.up_to_date = 0, 0, True

    def raise_to(self, block: int, tokens: int) -> None:
        """Count at least ``tokens`` tokens in the block."""
        if tokens > self._tokens[block]:
            self.set_to(block, tokens)

    def fill(self, blocks: list[int]) -> None:
        """Count these blocks as full."""
        tokens, size, more = self._tokens, self._block_size, 0
        for block in blocks:
            more += size - tokens[block]
            tokens[block] = size
        self.stored += more
        if blocks:
            self.highest = max(self.highest, max(blocks))

    def add_token(self, block: int) -> None:
        """Count one token more in the block."""
        if block > self.highest:
            self.highest = block
        self._tokens[block] += 1
        self.stored += 1

    def set_to(self, block: int, tokens: int) -> None:
        """Count exactly ``tokens`` tokens in the block."""
        if block > self.highest:
            self.highest = block
        self.stored += tokens - self._tokens[block]
        self._tokens[block] = tokens

    def empty(self, blocks: list[int]) -> None:
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
        highest = self._highest_filled()
        return highest * self._block_size + self._tokens[highest] if self._tokens[highest] else 0

    def _highest_filled(self) -> int:
        """The highest block that holds a token; 0 if there is none."""
        tokens, highest = self._tokens, self.highest
        extents = self.extents
        while highest > 0 and not tokens[highest]:
            highest = highest - 1 if extents is None else extents.used_below(highest)
        self.highest = highest
        return highest
