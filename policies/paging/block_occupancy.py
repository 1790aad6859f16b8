"""How many tokens each block of a pool holds."""

from __future__ import annotations

from policies.paging.block_extents import BlockExtents


class BlockOccupancy:
    """For each block the tokens in it that a sequence can see, and the sum over all blocks.

    Blocks that sequences in lockstep write to grow by a token in each step, without being named again.
    """

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
        """For a block that grows what it will hold when it is full."""
        self._block_size = block_size
        self._steps = 0
        """Steps of the sequences in lockstep."""
        self._full_at: list[int] = []
        """For a block that grows, the number of those steps at which it is full; empty where none ever grew."""

    def reset(self) -> None:
        """Set all blocks to empty, to be counted anew and kept up to date from now on."""
        self._tokens = [0] * len(self._tokens)
        self.stored, self.highest, self.up_to_date = 0, 0, True
        self._full_at = []

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

    def set_to(self, block: int, tokens: int) -> None:
        """Count exactly ``tokens`` tokens in the block."""
        if block > self.highest:
            self.highest = block
        self.stored += tokens - self._tokens[block]
        self._tokens[block] = tokens

    def grow(self, block: int, tokens: int = 0) -> None:
        """From now on each step adds a token to the block, which holds ``tokens``, until it is full."""
        full = self._full_at
        if not full:
            full = self._full_at = [0] * len(self._tokens)
        self._tokens[block] = self._block_size
        full[block] = self._steps + self._block_size - tokens
        if block > self.highest:
            self.highest = block

    def stop_growing(self, block: int, tokens: int) -> None:
        """No step adds to the block any more, which holds ``tokens``."""
        self._tokens[block], self._full_at[block] = tokens, 0

    def take_steps(self, n: int, growing: int) -> None:
        """Sequences in lockstep take ``n`` steps, in which ``growing`` of them store a token each."""
        self._steps += n
        self.stored += n * growing

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
        return self._top_after(self._steps)[0]

    @property
    def next_top(self) -> tuple[int, int]:
        """What ``top`` is after the next step, and what it grows up to in the steps behind."""
        return self._top_after(self._steps + 1)

    def _top_after(self, steps: int) -> tuple[int, int]:
        highest = self._highest_filled()
        if not self._tokens[highest]:
            return 0, 0
        stop = highest * self._block_size + self._tokens[highest]
        missing = self._full_at[highest] - steps if self._full_at else 0
        return (stop - missing, stop) if missing > 0 else (stop, stop)

    def _highest_filled(self) -> int:
        """The highest block that holds a token; 0 if there is none."""
        tokens, highest = self._tokens, self.highest
        extents = self.extents
        while highest > 0 and not tokens[highest]:
            highest = highest - 1 if extents is None else extents.used_below(highest)
        self.highest = highest
        return highest
