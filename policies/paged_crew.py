"""Block tables that grow in lockstep: who begins a block in a step, and who fills one, follows from the steps taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.block_table import Paged
from policies.blocks import BlockPool
from policies.crew import Ahead, Brief, Course, Crew
from policies.fill import Fill
from policies.leap import COUNTED, MOST
from policies.vocabulary import Chunk


class PagedCrew(Crew[Paged]):
    """Members write into blocks that nobody else holds. Blocks are taken, and named, in the order of a run step by
    step; how far they are filled is not kept up to date.

    A member begins a block at one step in every ``size``, and always at the same remainder: members are kept by that.
    """

    takes = True

    def __init__(
        self,
        size: int,
        pool: BlockPool,
        fill: Fill,
        find: Callable[[int], Paged | None],
        name: Callable[[Paged, int], None] | None,
        place: Callable[[Sequence[Chunk], int], Sequence[Brief]],
        widest: int,
    ):
        """``find``: a sequence by its number; ``name``: let the blocks that so many tokens fill be found; ``place``:
        chunks beside so many tokens."""
        super().__init__(widest)
        self._size = size
        self._pool = pool
        self._fill = fill
        self._find = find
        self._name = name
        self._place = place
        self._begins: list[dict[int, Paged]] = [{} for _ in range(size)]
        self._counts = np.zeros(2 * size, dtype=np.int64)
        """How many each of these holds, twice in a row."""
        self._held = 0
        """Tokens of all members."""
        self._runs = 0
        """Blocks that they lie in, and those set aside."""
        self._reserved = -1
        """The step for which blocks have been set aside."""

    def join(self, seq: int) -> bool:
        """Not if it has blocks to spare, or has yet to own the one it writes into."""
        s, size = self._find(seq), self._size
        if s is None or s.length == 0 or s.skipped or len(s.table) != -(-s.length // size):
            return False
        if s.length % size and self._pool.refs[s.table[-1]] > 1:
            return False
        self._add(seq, s)
        self._reserved = -1  # What was set aside for a step that then was not taken belongs to those who had it.
        self._fill.kept = False
        at = (self.steps - s.length) % size
        self._begins[at][seq] = s
        self._counts[at::size] += 1
        self._held += s.length
        self._runs += len(s.table)
        return True

    def leave(self, seq: int) -> None:
        """It keeps its blocks."""
        s = self._drop(seq)
        at = (self.steps - s.length) % self._size
        del self._begins[at][seq]
        self._counts[at :: self._size] -= 1
        self._held -= s.length
        self._runs -= len(s.table)

    def stuck(self) -> list[int]:
        """Nobody: any free block will do."""
        return []

    def reserve(self) -> bool:
        """A block for each who begins one."""
        if self._reserved != self.steps:
            if len(self._begins[self.steps % self._size]) > len(self._pool.free):
                return False
            if self._name is None:
                self._begin_all(1)
            else:
                self._begin(self.steps)
            self._reserved = self.steps
        return True

    def place(self, step: Sequence[Chunk]) -> Sequence[Brief]:
        """All room has been set aside."""
        return self._place(step, len(self))

    def ahead(self) -> Ahead:
        """One token more for each."""
        new = 0 if self._reserved == self.steps else len(self._begins[self.steps % self._size])
        return Ahead(self._held + len(self), self._runs + new, self._most_tokens() + 1)

    def course(self, n: int) -> Course:
        """Until the free blocks run out."""
        steps, size, members = self.steps, self._size, len(self._members)
        n, at = min(n, MOST), steps % size
        here = len(self._begins[at]) if self._reserved == steps else 0
        if (n // size + 1) * members > len(self._pool.free) + here:
            n = self._suffices(len(self._pool.free) + here, n)
        begun = np.add.accumulate(self._counts[at : at + min(n, size)])
        counted = COUNTED[:n]
        if n > size:
            begun = begun[(counted - 1) % size] + (counted - 1) // size * members
        return Course(n, self._held + members * counted, self._runs - here + begun)

    def longest(self, n: int) -> int:
        """All of its tokens."""
        return self._most_tokens() + n

    def take(self, n: int) -> None:
        """As ever, in each step first room, then a token for each."""
        steps, size = self.steps, self._size
        if self._name is None:
            self._begin_all(n)
        else:
            for step in range(steps, steps + n):
                if self._reserved != step and (self._begins[step % size] or self._begins[(step + 1) % size]):
                    self._begin(step)
        self.steps = steps + n
        self._held += n * len(self._members)

    def _begin_all(self, n: int) -> None:
        """All blocks that the next ``n`` steps begin, in order."""
        first, size = self.steps, self._size
        if n == 1:
            who = self._begins[first % size]
            if who and self._reserved != first:
                for s, block in zip(who.values(), self._pool.take(len(who)), strict=True):
                    s.table.append(block)
                self._runs += len(who)
            return
        stop = first + n
        begins = [(at, self._begins[at % size].values()) for at in range(first, min(stop, first + size))]
        order = [
            s.table
            for turn in range(0, n, size)
            for at, members in begins
            if members and at + turn < stop and (at + turn > first or self._reserved != first)
            for s in members
        ]
        if order:
            for table, block in zip(order, self._pool.take(len(order)), strict=True):
                table.append(block)
            self._runs += len(order)

    def _suffices(self, free: int, n: int) -> int:
        """For how many of ``n`` steps so many free blocks do."""
        size, at = self._size, self.steps % self._size
        whole = min(n // size, free // len(self._members))
        free -= whole * len(self._members)
        for j, count in enumerate(self._counts[at : at + min(n - whole * size, size)].tolist()):
            free -= count
            if free < 0:
                return whole * size + j
        return min(whole * size + size, n)

    def _begin(self, step: int) -> None:
        """Blocks for those who begin one in this step, and keys for those that will then be full."""
        begins, pool, size = self._begins[step % self._size], self._pool, self._size
        assert self._name is not None
        self._runs += len(begins)
        fills = self._begins[(step + 1) % size]
        both = begins if size == 1 else {**begins, **fills} if begins else fills
        ordered = sorted(both.items(), key=lambda item: item[1].turn) if begins and fills else both.items()
        for seq, s in ordered:
            if seq in begins:
                s.table += pool.take(1)
            if seq in fills:
                held = s.length + step - self.steps
                self._name(s, held + 1)
