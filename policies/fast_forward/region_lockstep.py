"""Regions that fill up in lockstep: how full each is follows from the steps taken."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from policies.fast_forward.forecast import MAX_STEPS
from policies.fast_forward.lockstep import LockstepBatch, LockstepSequence, NextStepReads, PassSummary, ReadForecast
from policies.fast_forward.state_sums import StateSums
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
    """What a lockstep batch must know of the regions that a policy hands out."""

    max_held: int | None
    """Cells of a region that can hold a token at the same time; None: all of them."""

    def region(self, seq: int) -> Region | None:
        """A sequence's region, if it has one."""
        ...

    def held(self, seq: int) -> int:
        """Cells in which the sequence has a token; it must have a region."""
        ...

    def room(self, seq: int) -> int:
        """Tokens that the sequence can be given before its region must grow or be renumbered; it must have one."""
        ...

    def add_stored(self, cells: int) -> None:
        """Count ``cells`` more that hold a token."""
        ...

    def look(self, sums: StateSums, growing: int) -> None:
        """Note the state after the next step, in which ``growing`` regions get a token in one cell more each."""
        ...

    @property
    def room_to_grow(self) -> int:
        """Cells of an extent in which every region finds room that has no more of them."""
        ...

    def room_after(self, room: int, size: int) -> int:
        """What is left at least of ``room`` when a region of ``size`` cells, no more than these, has been taken."""
        ...

    def move_to_larger(self, region: Region, size: int) -> Moves:
        """Replace a full region by one of ``size`` cells, for which there must be room; the cells to copy."""
        ...


_Event = tuple[int, int, int]
"""A step, the join index of the sequence that it concerns, and its number."""


class RegionLockstepBatch(LockstepBatch[Region]):
    """Sequences that fill their own regions, until one is full or must be renumbered.

    On the way, one at a time may move on to a larger region.
    """

    takes_from_pool: ClassVar[bool] = False

    def __init__(
        self,
        regions: Regions,
        next_size: Callable[[int], int | None],
        place: Callable[[Sequence[Chunk], int], Sequence[PassSummary]],
        max_pass_tokens: int,
    ):
        """``next_size``: cells of the region that replaces a full one, given its cells; None where none does.

        ``place``: places chunks in a step whose first pass also has that many tokens of the lockstep batch.
        """
        super().__init__(max_pass_tokens)
        self._regions = regions
        self._next_size = next_size
        self._place = place
        self._ends: list[_Event] = []
        """A heap with, for each member at least, the step before which its region must grow or be renumbered."""
        self._caps: list[_Event] = []
        """A heap with, for each growing member at least, the step from which on it holds no more cells than before."""
        self._held = 0
        """Cells of all members that hold a token."""
        self._growing = 0
        """Members that hold a cell more after each step."""

    def join(self, seq: int, place: int = 0) -> bool:
        """False without a region that holds something and has room."""
        regions, max_held = self._regions, self._regions.max_held
        region = regions.region(seq)
        if region is None or region.length == 0:
            return False
        room = regions.room(seq)
        if room < 1:
            return False
        self._add(seq, region, place)
        heapq.heappush(self._ends, (self.steps + room, region.join_index, seq))
        self._held += regions.held(seq)
        if max_held is None:
            self._growing += 1
        elif region.length < max_held:
            self._growing += 1
            heapq.heappush(self._caps, (self.steps + max_held - region.length, region.join_index, seq))
        return True

    def leave(self, seq: int) -> None:
        """Its region stays as it is."""
        region, max_held = self._drop(seq), self._regions.max_held
        self._held -= self._regions.held(seq)
        self._growing -= max_held is None or region.length < max_held

    def blocked(self) -> list[int]:
        """Members whose regions are full, or must be renumbered."""
        if not self._ends or self._ends[0][0] > self.steps:
            return []
        found = []
        while (end := self._next(self._ends)) is not None and end <= self.steps:
            found.append(heapq.heappop(self._ends))
        for entry in found:
            heapq.heappush(self._ends, entry)
        return [seq for _, _, seq in found]

    def reserve_step(self) -> bool:
        """Always: the regions have the room."""
        return True

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Take and grow regions where the chunks need it."""
        return self._place(step, len(self))

    def next_step_reads(self) -> NextStepReads:
        """All that members hold, with a token more for each that still grows."""
        return NextStepReads(self._held + self._growing, len(self), self.max_scanned_per_token(1))

    def forecast(self, n: int) -> ReadForecast:
        """Up to the first step in which a full region cannot just be replaced by a larger one."""
        n, copies = self._plan(min(n, MAX_STEPS))
        return ReadForecast(n, self._held, self._growing, len(self._members), self._capped(n), region_copies=copies)

    def steps_until_release(self) -> int:
        """Steps up to the first in which a member moves to a larger region."""
        end = self._next(self._ends)
        return super().steps_until_release() if end is None else end + 1 - self.steps

    def max_scanned_per_token(self, n: int) -> int:
        """All tokens of the longest member, or as many cells as a region can fill."""
        max_held, tokens = self._regions.max_held, self._most_tokens() + n
        return tokens if max_held is None else min(tokens, max_held)

    def take_step(self) -> None:
        """A token for each member."""
        self._fill(1)

    def take_steps(self, forecast: ReadForecast, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """A token for each member in every step; full regions are replaced on the way."""
        copies, stop = [], self.steps + n
        while (end := self._next(self._ends)) is not None and end < stop:
            if sums is not None:
                self._fill_watched(end, sums)
            _, join_index, seq = self._ends[0]
            region = self._members[seq]
            before, size = region.size, self._next_size(region.size)
            assert size is not None
            copies.append(self._regions.move_to_larger(region, size))
            heapq.heapreplace(self._ends, (end + size - before, join_index, seq))
        if sums is not None:
            self._fill_watched(stop, sums)
        else:
            self._fill(n)
        return copies

    def _fill_watched(self, stop: int, sums: StateSums) -> None:
        """Take all steps before ``stop``, up to each in which a member ceases to grow, and sum them up."""
        while (n := stop - self.steps) > 0:
            cap = self._next(self._caps)
            if cap is not None:
                n = min(n, cap - self.steps)
            self._regions.look(sums, self._growing)
            sums.scores, sums.runs = self._held + self._growing, len(self._members)
            sums.take_steps(n)
            self._fill(n)

    def _fill(self, n: int) -> None:
        grown = self._growing * n
        for cap in self._capped(n):
            grown -= n - cap
            self._growing -= 1
            heapq.heappop(self._caps)
        self.steps += n
        self._held += grown
        self._regions.add_stored(grown)

    def _plan(self, n: int) -> tuple[int, list[tuple[int, int]]]:
        """How many of ``n`` steps can be taken, and the copies on the way: the steps before each, and its cells.

        Members move to larger regions one at a time, and only while there is room for all of them wherever they go, so
        that neither their order nor a lack of room could matter.
        """
        end, ends, room = self._next(self._ends), self._ends, self._regions.room_to_grow
        if end is None or end >= self.steps + n:
            return n, []
        copies: list[tuple[int, int]] = []
        sizes = {seq: self._members[seq].size for _, _, seq in ends if seq in self._members}
        upcoming = [entry for entry in ends if entry[2] in sizes and self._members[entry[2]].join_index == entry[1]]
        heapq.heapify(upcoming)
        while upcoming[0][0] < self.steps + n:
            end, join_index, seq = upcoming[0]
            size = self._next_size(sizes[seq])
            if size is None or size > room:
                return end - self.steps, copies
            heapq.heapreplace(upcoming, (end + size - sizes[seq], join_index, seq))
            if upcoming[0][0] == end:
                return end - self.steps, copies
            copies.append((end - self.steps, sizes[seq]))
            sizes[seq], room = size, self._regions.room_after(room, size)
        return n, copies

    def _next(self, heap: list[_Event]) -> int | None:
        """The first step in a heap, once entries of members that have left are dropped."""
        members = self._members
        while heap:
            step, join_index, seq = heap[0]
            if seq in members and members[seq].join_index == join_index:
                return step
            heapq.heappop(heap)
        return None

    def _capped(self, n: int) -> list[int]:
        """After how many of the next ``n`` steps members cease to grow, in order, an entry for each that does."""
        if not self._caps:
            return []
        stop, found = self.steps + n, []
        while (step := self._next(self._caps)) is not None and step <= stop:
            found.append(heapq.heappop(self._caps))
        for entry in found:
            heapq.heappush(self._caps, entry)
        return [step - self.steps for step, _, _ in found]
