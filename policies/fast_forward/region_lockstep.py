"""Regions that fill up in lockstep: how full each is follows from the steps taken."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from policies.fast_forward.forecast import MAX_STEPS
from policies.fast_forward.lockstep import LockstepBatch, LockstepSequence, NextStepReads, PassSummary, ReadForecast
from policies.vocabulary import Chunk, Moves


class Region(LockstepSequence):
    """Cells ``[start, start + size)``, of which the first ``length`` tokens' are filled."""

    __slots__ = ("size", "start")

    def __init__(self, start: int, size: int, length: int = 0):
        super().__init__()
        self.start = start
        self.size = size
        self.length = length


class Regions(Protocol):
    """What a lockstep batch must know of the policy that hands out regions."""

    @property
    def most(self) -> int | None:
        """Cells that a sequence can have a token in at most; None: as many as it has tokens."""
        ...

    def region(self, seq: int) -> Region | None:
        """Of a sequence, where it has one."""
        ...

    def held(self, seq: int) -> int:
        """Cells in which the sequence has a token; it must have a region."""
        ...

    def room(self, seq: int) -> int:
        """Tokens that the sequence can be given before anything must be decided; it must have a region."""
        ...

    def place(self, step: Sequence[Chunk], lockstep_tokens: int) -> Sequence[PassSummary]:
        """Place chunks; ``beside``: so many tokens are in the first pass as well."""
        ...

    def grow(self, cells: int) -> None:
        """So many cells more hold a token."""
        ...

    @property
    def largest_free(self) -> int:
        """Cells of the largest free run."""
        ...

    def next_size(self, size: int) -> int | None:
        """Cells of the region that a sequence moves to when one of that size is full; None where it gets no other."""
        ...

    def move_on(self, region: Region, size: int) -> Moves:
        """A full region becomes one of that size, for which there must be a free run; what is to be copied."""
        ...


class RegionLockstepBatch(LockstepBatch[Region]):
    """Each member goes on in its own region, until that is full or must be renumbered; on the way, one at a time may
    move on to a larger one."""

    takes_from_pool = False

    def __init__(self, policy: Regions, max_pass_tokens: int):
        super().__init__(max_pass_tokens)
        self._policy = policy
        self._ends: list[tuple[int, int, int]] = []
        """A heap of, for each member at least: the step before which something must be decided, turn, number."""
        self._caps: list[tuple[int, int, int]] = []
        """The same of those that still grow: the step from which on they hold no more than they do."""
        self._held = 0
        """Cells of all members that hold a token."""
        self._growing = 0

    def join(self, seq: int) -> bool:
        """Whoever has a region and room in it."""
        policy, most = self._policy, self._policy.most
        region = policy.region(seq)
        if region is None or region.length == 0:
            return False
        room = policy.room(seq)
        if room < 1:
            return False
        self._add(seq, region)
        heapq.heappush(self._ends, (self.steps + room, region.join_index, seq))
        self._held += policy.held(seq)
        if most is None:
            self._growing += 1
        elif region.length < most:
            self._growing += 1
            heapq.heappush(self._caps, (self.steps + most - region.length, region.join_index, seq))
        return True

    def leave(self, seq: int) -> None:
        """Its region stays."""
        region = self._drop(seq)
        self._held -= self._policy.held(seq)
        self._growing -= self._policy.most is None or region.length < self._policy.most

    def blocked(self) -> list[int]:
        """Those whose regions are full, or to be renumbered."""
        if not self._ends or self._ends[0][0] > self.steps:
            return []
        found = []
        while (end := self._next(self._ends)) is not None and end <= self.steps:
            found.append(heapq.heappop(self._ends))
        for entry in found:
            heapq.heappush(self._ends, entry)
        return [seq for _, _, seq in found]

    def reserve_step(self) -> bool:
        """All room is there."""
        return True

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Takes and grows regions where needed."""
        return self._policy.place(step, len(self))

    def next_step_reads(self) -> NextStepReads:
        """One token more for each."""
        return NextStepReads(self._held + self._growing, len(self), self.max_scanned_per_token(1))

    def forecast(self, n: int) -> ReadForecast:
        """Until somebody is stuck, and cannot just move on to a larger region."""
        n, copies = self._foresee(min(n, MAX_STEPS))
        return ReadForecast(n, self._held, self._growing, len(self._members), self._capped(n), region_copies=copies)

    def steps_until_release(self) -> int:
        """Up to the first in which somebody moves on."""
        end = self._next(self._ends)
        return super().steps_until_release() if end is None else end + 1 - self.steps

    def max_scanned_per_token(self, n: int) -> int:
        """All of its tokens, or as many as it keeps."""
        most, tokens = self._policy.most, self._most_tokens() + n
        return tokens if most is None else min(tokens, most)

    def take_step(self) -> None:
        """A token for each."""
        self._fill(1)

    def take_steps(self, forecast: ReadForecast, n: int) -> Sequence[Moves]:
        """A token for each in every step."""
        copies, stop = [], self.steps + n
        while (end := self._next(self._ends)) is not None and end < stop:
            _, join_index, seq = self._ends[0]
            region = self._members[seq]
            before, size = region.size, self._policy.next_size(region.size)
            assert size is not None
            copies.append(self._policy.move_on(region, size))
            heapq.heapreplace(self._ends, (end + size - before, join_index, seq))
        self._fill(n)
        return copies

    def _fill(self, n: int) -> None:
        grown = self._growing * n
        for cap in self._capped(n):
            grown -= n - cap
            self._growing -= 1
            heapq.heappop(self._caps)
        self.steps += n
        self._held += grown
        self._policy.grow(grown)

    def _foresee(self, n: int) -> tuple[int, list[tuple[int, int]]]:
        """How many of ``n`` steps can be taken; who moves on to a larger region on the way, and copies how much: the
        steps before that, and cells. They go one at a time, and while the largest free run has room for all of them, so
        that no order of theirs and no lack of room could matter."""
        end, ends, room = self._next(self._ends), self._ends, self._policy.largest_free
        if end is None or end >= self.steps + n:
            return n, []
        copies: list[tuple[int, int]] = []
        sizes = {seq: self._members[seq].size for _, _, seq in ends if seq in self._members}
        next_step_reads = [
            entry for entry in ends if entry[2] in sizes and self._members[entry[2]].join_index == entry[1]
        ]
        heapq.heapify(next_step_reads)
        while next_step_reads[0][0] < self.steps + n:
            end, join_index, seq = next_step_reads[0]
            size = self._policy.next_size(sizes[seq])
            if size is None or size > room:
                return end - self.steps, copies
            heapq.heapreplace(next_step_reads, (end + size - sizes[seq], join_index, seq))
            if next_step_reads[0][0] == end:
                return end - self.steps, copies
            copies.append((end - self.steps, sizes[seq]))
            sizes[seq], room = size, room - size
        return n, copies

    def _next(self, heap: list[tuple[int, int, int]]) -> int | None:
        """The first step in a heap, without what has left."""
        members = self._members
        while heap:
            step, join_index, seq = heap[0]
            if seq in members and members[seq].join_index == join_index:
                return step
            heapq.heappop(heap)
        return None

    def _capped(self, n: int) -> list[int]:
        """After how many of the next ``n`` steps each of those that then hold all they can ceases to grow; in order."""
        if not self._caps:
            return []
        stop, found = self.steps + n, []
        while (step := self._next(self._caps)) is not None and step <= stop:
            found.append(heapq.heappop(self._caps))
        for entry in found:
            heapq.heappush(self._caps, entry)
        return [step - self.steps for step, _, _ in found]
