"""The regions of all sequences in one arena, and in which order a region's cells hold its sequence's tokens."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from policies.cells.region_search import RegionSearch
from policies.fast_forward.region_lockstep import Region
from policies.fast_forward.state_sums import StateSums
from policies.vocabulary import NO_SHIFT, Chunk, IntArray, Moves, NoSlot, Shift, View

_start = attrgetter("start")


class TokenOrder:
    """Token ``i`` of a sequence lies in the ``i``-th cell of its region."""

    max_held: int | None = None
    """Cells of a region that can hold a token at the same time; None: all of them."""

    def held(self, region: Region) -> int:
        """Cells of a region that hold a token."""
        return region.length

    def least_size(self, tokens: int) -> int:
        """Cells that a region for ``tokens`` tokens must have."""
        return tokens

    def room(self, seq: int, region: Region) -> int:
        """Tokens that the sequence can be given before its region must grow or be renumbered."""
        return region.size - region.length

    def append(self, chunk: Chunk, region: Region) -> int:
        """Count a chunk's tokens as written; returns the cells that then hold a token."""
        region.length = end = chunk.start + chunk.n
        return end

    def offsets(self, numbers: IntArray) -> IntArray:
        """Where in a region the tokens of these numbers lie; shape (n,)."""
        return numbers

    def cells(self, region: Region) -> IntArray:
        """The cells that hold a token, in order of position; shape (n,)."""
        return np.arange(region.start, region.start + region.length)

    def view(self, seq: int, region: Region) -> View:
        """What attention may see of a sequence."""
        return View(self.cells(region), np.arange(region.length))

    def forget(self, seq: int) -> None:
        """Drop what is remembered of a sequence that has gone."""

    def settle_rotations(self) -> Shift:
        """The keys to rotate that no micro-batch has reported yet; from now on they are reported."""
        return NO_SHIFT


class RegionTable:
    """Where each sequence's region lies, how many cells hold a token, and which cells are free for new regions."""

    def __init__(self, order: TokenOrder, search: RegionSearch):
        """``search``: finds the cells of new regions, in an empty cache."""
        self.order = order
        self.max_held = order.max_held
        self.search = search
        self.free = search.free
        self.regions: dict[int, Region] = {}
        self.stored = 0
        """Cells of all regions that hold a token."""
        self._largest: tuple[int, int] | None = None
        """What ``largest`` says; None where it must be looked for."""
        self._highest: Region | None = None
        """The region behind all others that hold a token; None where it must be looked for, or there is none."""

    def largest(self) -> tuple[int, int]:
        """Cells of the largest region that there is room for, and of the largest free extent."""
        if self._largest is None:
            self._largest = self.search.largest, self.free.largest
        return self._largest

    @property
    def room_to_grow(self) -> int:
        """Cells of an extent in which every region finds room that has no more of them."""
        return self.search.room

    def room_after(self, room: int, size: int) -> int:
        """What is left at least of ``room`` when a region of ``size`` cells, no more than these, has been taken."""
        return self.search.room_after(room, size)

    def take(self, n: int) -> Region:
        """A new region for ``n`` cells. Raises ``NoSlot``."""
        region = self.take_if_free(n)
        if region is None:
            raise NoSlot(f"no free extent of {n} cells: the largest has {self.largest()[0]} of {self.free.total}")
        return region

    def take_if_free(self, n: int) -> Region | None:
        """A new region for ``n`` cells; None where there is no room for one."""
        start = self.search.find(n)
        if start is None:
            return None
        region = Region(start, self.search.size_of(n))
        self.search.take(start, region.size)
        self._largest = None
        return region

    def release(self, region: Region) -> None:
        """Give back all cells of a region."""
        self.search.give_back(region.start, region.size)
        self._largest = None
        if region is self._highest:
            self._highest = None

    def move_to_larger(self, region: Region, size: int) -> Moves:
        """Replace a full region by one of ``size`` cells, for which there must be room; the cells to copy."""
        start, before = region.start, region.size
        new = self.take(size)
        region.start, region.size = new.start, new.size
        self.search.give_back(start, before)
        if region is self._highest:
            self._highest = None
        self._note_filled(region)
        return Moves.from_runs([(start, region.start, before)])

    def truncate(self, region: Region, length: int) -> None:
        """Keep the first ``length`` tokens of a region."""
        self.stored -= self.order.held(region)
        region.length = length
        self.stored += self.order.held(region)
        if region is self._highest:
            self._highest = None

    def append(self, chunk: Chunk) -> int:
        """Count a chunk's tokens as written; returns the cells in which its sequence then has one."""
        region = self.regions[chunk.seq]
        before = self.order.held(region)
        held = self.order.append(chunk, region)
        self.stored += held - before
        self._note_filled(region)
        return held

    def write(self, chunk: Chunk) -> IntArray:
        """Count a chunk's tokens as written; returns their cells; shape (n,)."""
        self.append(chunk)
        numbers = np.arange(chunk.start, chunk.start + chunk.n)
        return self.regions[chunk.seq].start + self.order.offsets(numbers)

    def view(self, seq: int) -> View:
        """What attention may see of a sequence."""
        return self.order.view(seq, self.regions[seq])

    def region(self, seq: int) -> Region | None:
        """A sequence's region, if it has one."""
        return self.regions.get(seq)

    def held(self, seq: int) -> int:
        """Cells in which the sequence has a token; it must have a region."""
        return self.order.held(self.regions[seq])

    def room(self, seq: int) -> int:
        """Tokens that the sequence can be given before its region must grow or be renumbered; it must have one."""
        return self.order.room(seq, self.regions[seq])

    def add_stored(self, cells: int) -> None:
        """Count ``cells`` more that hold a token."""
        self.stored += cells

    def top(self) -> int:
        """One past the highest cell that holds a token."""
        region = self._highest_region()
        return 0 if region is None else region.start + self.order.held(region)

    def look(self, sums: StateSums, growing: int) -> None:
        """Note the state after the next step, in which ``growing`` regions get a token in one cell more each."""
        free = self.free
        sums.capacity, sums.allocated = free.size, free.size - free.total
        sums.placeable, sums.largest_free_extent = self.largest()
        sums.free_extents = len(free)
        sums.stored, sums.growth = self.stored + growing, growing
        region = self._highest_region()
        sums.span = sums.span_stop = 0
        if region is not None:
            sums.span = sums.span_stop = region.start + self.order.held(region)
            if region.lockstep_batch is not None:
                sums.span_stop = region.start + (region.size if self.max_held is None else self.max_held)
                sums.span = min(sums.span + 1, sums.span_stop)

    def _note_filled(self, region: Region) -> None:
        """A region that holds a token may be the highest now."""
        highest = self._highest
        if highest is not None and region.start > highest.start:
            self._highest = region

    def _highest_region(self) -> Region | None:
        if self._highest is None:
            self._highest = max([r for r in self.regions.values() if r.length], key=_start, default=None)
        return self._highest
