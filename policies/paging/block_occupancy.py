"""How many tokens each block of a pool holds."""

from __future__ import annotations

from policies.cells.free_cells import FreeCells
from policies.compiled import i32, i64, vec


class BlockOccupancy:
    """For each block the tokens in it that a sequence can see, and the sum over all blocks."""

    def __init__(self, n_blocks: int, block_size: int):
        self.stored: i64 = 0
        """Tokens in all blocks."""
        self.partially_visible: set[int] = set()
        """Blocks of which some holder sees only a part: when another holder goes, they must be counted anew."""
        self.up_to_date = True
        """Whether all this is up to date; otherwise it must be counted anew from the block tables."""
        self.extents: FreeCells | None = None
        """Which blocks are free, where that is kept; they hold no token."""
        self.highest: i64 = 0
        """No block above this one holds a token."""
        self._tokens = vec[i32]([0] * n_blocks)
        self._block_size: i64 = block_size

    def reset(self) -> None:
        """Set all blocks to empty, to be counted anew and kept up to date from now on."""
        self._tokens = vec[i32]([0] * len(self._tokens))
        self.stored, self.highest, self.up_to_date = 0, 0, True

    def raise_to(self, block: i64, tokens: i64) -> None:
        """Count at least ``tokens`` tokens in the block."""
        if tokens > i64(self._tokens[block]):
            self.set_to(block, tokens)

    def fill(self, blocks: list[int]) -> None:
        """Count these blocks as full."""
        for block in blocks:
            self.set_to(block, self._block_size)

    def add_tokens(self, block: i64, more: i64) -> None:
        """Count further tokens in the block."""
        if block > self.highest:
            self.highest = block
        self._tokens[block] += i32(more)
        self.stored += more

    def set_to(self, block: i64, tokens: i64) -> None:
        """Count exactly ``tokens`` tokens in the block."""
        if block > self.highest:
            self.highest = block
        self.stored += tokens - i64(self._tokens[block])
        self._tokens[block] = i32(tokens)

    def empty(self, blocks: list[int]) -> None:
        """Count these blocks, which no sequence holds any more, as empty."""
        if self.up_to_date:
            tokens = self._tokens
            for block in blocks:
                at: i64 = block
                self.stored -= i64(tokens[at])
                tokens[at] = 0
        if self.partially_visible:
            self.partially_visible.difference_update(blocks)

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token; 0 if there is none."""
        tokens, highest, extents = self._tokens, self.highest, self.extents
        while highest > 0 and tokens[highest] == 0:
            highest = highest - 1 if extents is None else max(extents.used_below(highest), 0)
        self.highest = highest
        return int(highest * self._block_size + i64(tokens[highest])) if tokens[highest] > 0 else 0
