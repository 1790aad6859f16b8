"""Block tables that grow in lockstep: who begins a block in a step, and who fills one, follows from the steps taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from policies.fast_forward.forecast import MAX_STEPS
from policies.fast_forward.lockstep import BlockSchedule, LockstepBatch, NextStepReads, PassSummary, ReadForecast
from policies.paging.block_occupancy import BlockOccupancy
from policies.paging.block_table import Paged
from policies.paging.blocks import BlockPool
from policies.vocabulary import Chunk, Moves

_NO_SEQUENCES: dict[int, Paged] = {}

_first = itemgetter(0)


class Tables(NamedTuple):
    """What a lockstep batch must know of the policy whose block tables its members have."""

    size: int
    """Tokens in a block."""
    pool: BlockPool
    fill: BlockOccupancy
    find: Callable[[int], Paged | None]
    """A sequence by its number."""
    name: Callable[[Paged, int], None] | None
    """Lets the blocks that so many tokens fill be found; None where nothing is."""
    place: Callable[[Sequence[Chunk], int], Sequence[PassSummary]]
    """Places chunks beside so many tokens of a lockstep batch."""
    max_pass_tokens: int
    """The most tokens in one forward pass."""


class PagedLockstepBatch(LockstepBatch[Paged]):
    """Members write into blocks that nobody else holds. Blocks are taken, and named, in the order of a run step by
    step; how far they are filled is not kept up to date.

    A member begins a block at one step in every ``size``, and always at the same remainder: members are kept by that.
    """

    takes_from_pool = True

    def __init__(self, about: Tables):
        super().__init__(about.max_pass_tokens)
        self._size, self._pool, self._fill, self._find, self._name, self._place, _ = about
        self._in_order = self._name is not None and self._pool.free.tracks_use
        """Whether blocks must be named in the order in which they are filled, or just before anybody may look."""
        self._eventful = self._in_order
        """Whether there may be something to do in a step in which nobody begins a block."""
        self._begins: dict[int, dict[int, Paged]] = {}
        """By the remainder, where there is anybody."""
        self._held = 0
        """Tokens of all members."""
        self._runs = 0
        """Blocks that they lie in, and those set aside."""
        self._reserved = -1
        """The step for which blocks have been set aside."""

    def join(self, seq: int) -> bool:
        """Not if it has blocks to spare, or has yet to own the one it writes into."""
        s, size = self._find(seq), self._size
        if s is None:
            return False
        length, blocks = s.length, len(s.table)
        if length == 0 or blocks != -(-length // size) or (length % size and self._pool.holders(s.table[-1]) > 1):
            return False
        self._add(seq, s)
        self._reserved = -1  # What was set aside for a step that then was not taken belongs to those who had it.
        self._fill.kept = False
        if self._name is None:
            self._pool.relax()
        at = (self.steps - length) % size
        who = self._begins.get(at)
        if who is None:
            self._begins[at] = {seq: s}
        else:
            who[seq] = s
        self._held += length
        self._runs += blocks
        return True

    def leave(self, seq: int) -> None:
        """It keeps its blocks."""
        s, size = self._drop(seq), self._size
        length = s.length
        if self._name is not None:
            self._name(s, length)
        at = (self.steps - length) % size
        who = self._begins[at]
        del who[seq]
        if not who:
            del self._begins[at]
        self._held -= length
        self._runs -= len(s.table)

    def name_all(self) -> None:
        """Let all blocks that members have filled be found."""
        if self._name is not None:
            for s in self._members.values():
                self._name(s, s.length)

    def blocked(self) -> list[int]:
        """Nobody: any free block will do."""
        return []

    def reserve_step(self) -> bool:
        """A block for each who begins one."""
        if self._reserved != self.steps:
            begins = self._begins.get(self.steps % self._size)
            if begins and len(begins) > len(self._pool.free):
                return False
            if begins or self._eventful:
                self._set_aside(1, [(0, begins or _NO_SEQUENCES)])
            self._reserved = self.steps
        return True

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """All room has been set aside."""
        return self._place(step, len(self))

    def next_step_reads(self) -> NextStepReads:
        """One token more for each."""
        new = 0 if self._reserved == self.steps else self._beginning(self.steps)
        return NextStepReads(self._held + len(self._members), self._runs + new, self._most_tokens() + 1)

    def forecast(self, n: int) -> ReadForecast:
        """Until the free blocks run out."""
        size, members, free = self._size, len(self._members), len(self._pool.free)
        begins, n = sorted(self._when(self._begins), key=_first), min(n, MAX_STEPS)
        if (n // size + 1) * members > free:
            n = min(n, self._suffices(begins, free))
        return ReadForecast(n, self._held, members, self._runs, block_size=size, block_starts=begins)

    def max_scanned_per_token(self, n: int) -> int:
        """All of its tokens."""
        return self._most_tokens() + n

    def take_step(self) -> None:
        """A token for each."""
        self.steps += 1
        self._held += len(self._members)

    def take_steps(self, forecast: ReadForecast, n: int) -> Sequence[Moves]:
        """As ever, in each step first room, then a token for each."""
        self._set_aside(n, forecast.block_starts)
        self.steps += n
        self._held += n * len(self._members)
        return ()

    def _set_aside(self, n: int, begins: BlockSchedule) -> None:
        """Room for the next ``n`` steps, but for one that has been reserved; ``begins``: who takes a block when."""
        if not self._in_order:
            self._begin_all(n, begins)
        else:
            for step in range(self.steps, self.steps + n):
                if self._reserved != step:
                    self._begin(step)

    def _when(self, kept: dict[int, dict[int, Paged]]) -> list[tuple[int, dict[int, Paged]]]:
        """Members kept by the remainder of a step, by how many steps come before their next one that has not been
        reserved."""
        size, reserved = self._size, self._reserved == self.steps
        first = self.steps + reserved
        return [((at - first) % size + reserved, who) for at, who in kept.items()]

    def _beginning(self, step: int) -> int:
        """How many begin a block in this step."""
        return len(self._begins.get(step % self._size, ()))

    def _begin_all(self, n: int, begins: BlockSchedule) -> None:
        """All blocks that the next ``n`` steps begin: each member takes one in turn, and then again."""
        size, turns, blocks = self._size, list[Paged](), 0
        for at, who in begins:
            if at >= n:
                break
            turns += who.values()
            blocks += len(who) * ((n - 1 - at) // size + 1)
        if blocks:
            taken, stride = self._pool.take(blocks), len(turns)
            for at, s in enumerate(turns):
                s.table += taken[at::stride]
            self._runs += blocks

    def _suffices(self, begins: BlockSchedule, free: int) -> int:
        """For how many steps so many free blocks do."""
        whole, left = divmod(free, len(self._members))
        for at, who in begins:
            left -= len(who)
            if left < 0:
                return whole * self._size + at
        raise AssertionError("all together begin more blocks than are left over")

    def _begin(self, step: int) -> None:
        """Blocks for those who begin one in this step, and keys for those that will then be full."""
        pool, size = self._pool, self._size
        begins, fills = self._begins.get(step % size, _NO_SEQUENCES), self._begins.get((step + 1) % size, _NO_SEQUENCES)
        if not begins and not fills:
            return
        assert self._name is not None
        self._runs += len(begins)
        both = begins if size == 1 else {**begins, **fills} if begins else fills
        ordered = sorted(both.items(), key=lambda item: item[1].join_index) if begins and fills else both.items()
        for seq, s in ordered:
            if seq in begins:
                s.table += pool.take(1)
            if seq in fills:
                held = s.length + step - self.steps
                self._name(s, held + 1)
