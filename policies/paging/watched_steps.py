"""How full a pool is while the sequences of a lockstep batch take steps."""

from __future__ import annotations

from policies.fast_forward.state_sums import StateSums
from policies.paging.block_manager import BlockManager


class WatchedSteps:
    """Sums up the steps from one change of the pool to the next, in the order of steps."""

    __slots__ = ("_capacity", "_extents", "_highest", "_members", "_occupancy", "_run", "_size", "_step", "_sums")

    def __init__(
        self,
        blocks: BlockManager,
        sums: StateSums,
        step: int,
        members: int,
        scanned: int,
        runs: int,
        *,
        one_run: bool = False,
    ):
        """``members`` sequences have taken ``step`` steps and hold ``scanned`` tokens in ``runs`` blocks.

        ``one_run``: each of them is read as one run, not block by block.
        """
        self._occupancy = blocks.occupancy
        self._extents = blocks.pool.keep_extents()
        self._capacity, self._size = blocks.capacity, blocks.block_size
        self._step, self._members = step, members
        self._sums = sums
        self._highest = -1
        """The highest block that held a token when that was last looked at; -1 if it must be looked at again."""
        sums.capacity, sums.growth = self._capacity, members
        self._run = 0 if one_run else 1
        """By how many runs more is read once a sequence begins a block."""
        sums.scores, sums.runs = scanned + members, members if one_run else runs
        sums.stored = self._occupancy.stored + members

    def take_up_to(self, step: int) -> None:
        """All steps before ``step`` have been taken since the last call; what changes now does so for ``step``."""
        n = step - self._step
        if n < 1:
            return
        sums, size, extents, occupancy = self._sums, self._size, self._extents, self._occupancy
        sums.placeable = free = extents.n_free * size
        sums.allocated = self._capacity - free
        sums.free_extents = extents.count
        sums.largest_free_extent = extents.largest * size
        if self._highest != occupancy.highest:
            sums.span, sums.span_stop = occupancy.next_top
            self._highest = occupancy.highest
        sums.take_steps(n)
        occupancy.take_steps(n, self._members)
        self._step = step

    def begin_block(self, block: int) -> None:
        """A sequence begins a block that has just been taken."""
        self._occupancy.grow(block)
        self._sums.runs += self._run

    def begin_free_block(self, block: int) -> None:
        """A sequence begins a block that was handed out ahead and counts as free until now."""
        self._extents.take_one(block)
        self._occupancy.grow(block)
        self._sums.runs += self._run

    def give_up_blocks(self, n: int) -> None:
        """A sequence has given up full blocks."""
        sums = self._sums
        sums.runs -= n
        sums.scores -= n * self._size
        sums.stored = self._occupancy.stored + self._members
        self._highest = -1
