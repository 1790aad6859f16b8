"""One sequence's block table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from policies.cells.free_cells import FreeCells
from policies.compiled import i32, i64, vec
from policies.content import Content
from policies.placement.rule import Row
from policies.vocabulary import NO_MOVES, IntArray, Moves, SequencePlan, View


def blocks_for(tokens: int, size: int) -> int:
    """Number of blocks that ``tokens`` tokens fill, the last perhaps in part."""
    return -(-tokens // size)


def blocks_for_each(tokens: IntArray, size: int) -> IntArray:
    """``blocks_for`` of each of many numbers of tokens; same shape."""
    return -(-tokens // size)


def blocks_behind(position: int, window: int, size: int) -> int:
    """A sequence's first blocks that no token from ``position`` on sees through the window."""
    return max(position - window + 1, 0) // size


def blocks_in_sight(window: int, size: int) -> int:
    """Full blocks that the first token behind them needs to see."""
    return blocks_for(window - 1, size)


def most_blocks_in_window(window: int, n_ubatch: int, size: int) -> int:
    """The most blocks that a sequence holds at once if those behind the window are given up."""
    return blocks_for(window - 1 + n_ubatch, size) + 1


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


class PendingCopies:
    """Copies on write that are due before the next forward pass.

    Until then a copy's source counts as held, so that no other tokens are written there.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self.runs: list[tuple[int, int, int]] = []
        """In order: first cell read, first cell written, cells."""

    def add(self, source: int, target: int, tokens: int) -> None:
        """Note that the first ``tokens`` cells of one block must be copied to another."""
        self.runs.append((source * self._block_size, target * self._block_size, tokens))

    def from_block(self, block: int) -> int:
        """Number of copies whose source is this block."""
        cell = block * self._block_size
        return sum(source == cell for source, _, _ in self.runs)

    def origin(self, block: int) -> int:
        """The block that holds the tokens now: the start of a chain of copies that ends in ``block``."""
        sources = {target: source for source, target, _ in self.runs}
        cell = block * self._block_size
        while cell in sources:
            cell = sources[cell]
        return cell // self._block_size

    def cancel(self, targets: Iterable[int]) -> list[int]:
        """Drop the copies into these blocks, which are no longer held; returns the blocks that they would read."""
        cells = {block * self._block_size for block in targets}
        sources = [source // self._block_size for source, target, _ in self.runs if target in cells]
        self.runs = [run for run in self.runs if run[1] not in cells]
        return sources

    def settle(self) -> tuple[Moves, list[int]]:
        """Hand over all copies, which are then no longer due; and the blocks they read, one for each copy."""
        runs, self.runs = self.runs, []
        moves = Moves.from_runs(runs) if runs else NO_MOVES
        return moves, [source // self._block_size for source, _, _ in runs]
