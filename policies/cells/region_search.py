"""Searches for a region: which free cells a region takes, and how many more than were asked for."""

from __future__ import annotations

from bisect import insort
from typing import Literal, get_args

import numpy as np

from policies.cells.free_extents import FreeExtents
from policies.vocabulary import IntArray

SearchName = Literal["first-fit", "best-fit", "next-fit", "worst-fit", "buddy", "slab"]
"""``first-fit``: the lowest free extent that is large enough. ``best-fit``: the smallest. ``next-fit``: the first from
where the last search ended. ``worst-fit``: the largest. ``buddy``: powers of two, each split from and joined with its
buddy only. ``slab``: classes of sizes, a few regions of one class side by side."""
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)

_STEPS = 8
"""Size classes between two powers of two, so that less than an eighth of a region of ``slab`` is empty."""
_SLAB_REGIONS = 8
"""Regions of a slab, where a free extent has room for them; otherwise it has one."""


class RegionSearch:
    """First fit: the lowest free extent that is large enough; a region has just the cells that were asked for.

    Knuth, The Art of Computer Programming, volume 1, section 2.5; Wilson, Johnstone, Neely and Boles, "Dynamic storage
    allocation: a survey and critical review" (1995), on this and the others.
    """

    def __init__(self, cells: int):
        self.free = FreeExtents(cells)
        """The cells of no region."""
        self.cursor = 0
        """Where the next search begins; only next fit moves it."""
        self.most = self.largest
        """Cells of the largest region that an empty cache has room for."""

    def size_of(self, n: int) -> int:
        """Cells of a region for ``n`` cells; of a region of that size, the same."""
        return n

    def find(self, n: int) -> int | None:
        """Where a region for ``n`` cells would begin; None where there is no room for one."""
        at = self._extent(n)
        return None if at is None else self.free.starts[at]

    def _extent(self, n: int) -> int | None:
        """Index of the free extent to take ``n`` cells from."""
        return self.free.first_of(n, 0)

    def take(self, start: int, size: int) -> None:
        """Take the region that ``find`` has found, of ``size_of(n)`` cells."""
        self.free.take(start, size)

    def give_back(self, start: int, size: int) -> None:
        """The region's cells are free again."""
        self.free.give_back(start, size)

    @property
    def largest(self) -> int:
        """Cells of the largest region that there is room for."""
        return self.free.largest


class BestFit(RegionSearch):
    """The smallest free extent that is large enough, the lowest of several."""

    def _extent(self, n: int) -> int | None:
        return self.free.best_of(n)


class WorstFit(RegionSearch):
    """The largest free extent, the lowest of several."""

    def _extent(self, n: int) -> int | None:
        largest = self.free.largest
        return self.free.first_of(largest, 0) if 0 < n <= largest else None


class NextFit(RegionSearch):
    """The first free extent that is large enough, from where the last region taken ends, once round.

    Knuth's roving pointer. An extent around that point counts as a whole.
    """

    def _extent(self, n: int) -> int | None:
        here = self.free.index_after(self.cursor)
        at = self.free.first_of(n, here)
        return self.free.first_of(n, 0, here) if at is None else at

    def take(self, start: int, size: int) -> None:
        """Take the region; the next search begins behind it."""
        super().take(start, size)
        self.cursor = start + size


class Buddy(RegionSearch):
    """Powers of two, each at a multiple of its size: the smallest free block that is large enough, halved to the size.

    Two halves are joined as soon as both are free (Knowlton, "A fast storage allocator", CACM 8(10), 1965). Which
    blocks are free thus follows from the free cells: the largest aligned ones that these extents hold. In a cache that
    is no power of two, its largest block is the largest power of two below.
    """

    def size_of(self, n: int) -> int:
        """The next power of two."""
        return 1 << max(n - 1, 0).bit_length()

    def find(self, n: int) -> int | None:
        """The lowest of the smallest free blocks that are large enough."""
        starts, ends = self.free.arrays()
        size = self.size_of(n)
        while size <= self.free.size:
            blocks = _free_blocks(starts, ends, size)
            if len(blocks):
                return int(blocks.min())
            size *= 2
        return None

    @property
    def largest(self) -> int:
        """The largest free block."""
        starts, ends = self.free.arrays()
        size = 1 << self.free.largest.bit_length() >> 1
        while size and not (-(-starts // size) * size + size <= ends).any():
            size //= 2
        return size


def _free_blocks(starts: IntArray, ends: IntArray, size: int) -> IntArray:
    """First cells of the free blocks of this size that are half of no free block; extents have at most two of them."""
    first, last = -(-starts // size) * size, ends // size * size - size
    fits = first <= last
    starts, ends, first, last = starts[fits], ends[fits], first[fits], last[fits]
    found = []
    for block in (first, last):
        whole = block // (2 * size) * (2 * size)
        found.append(block[(whole < starts) | (whole + 2 * size > ends)])
    return np.concatenate(found)


class Slabs(RegionSearch):
    """Size classes, eight between two powers of two: free cells are cut into slabs of regions of one class.

    A region is the lowest free one of its class; where there is none, the first free extent with room for eight of
    them, or else for one, becomes a slab, which is given up when all of its regions are free. After Bonwick, "The slab
    allocator" (USENIX Summer 1994), and Linux's SLUB, which takes a smaller slab where memory is short; the classes
    are spaced so that less than an eighth is empty, Bonwick's bound for a slab and TCMalloc's for its classes.
    """

    def __init__(self, cells: int):
        self._uncut = FreeExtents(cells)
        """The cells of no slab."""
        self._slabs: dict[int, tuple[int, int]] = {}
        """For each first cell of a region, in use or not: its slab's first cell, and how many regions that has."""
        self._free_regions: dict[int, list[int]] = {}
        """For each class: first cells of the regions that are free, ascending."""
        self._used: dict[int, int] = {}
        """For each slab, by its first cell: the regions in use."""
        super().__init__(cells)

    def size_of(self, n: int) -> int:
        """The smallest class that is large enough."""
        step = max((1 << max(n - 1, 0).bit_length() >> 1) // _STEPS, 1)
        return -(-n // step) * step

    def find(self, n: int) -> int | None:
        """A free region of the class, or where a new slab would begin."""
        size = self.size_of(n)
        free = self._free_regions.get(size)
        if free:
            return free[0]
        found = self._new_slab(size)
        return None if found is None else found[0]

    def _new_slab(self, size: int) -> tuple[int, int] | None:
        """Where a slab of a class would begin, and of how many regions."""
        for n in (_SLAB_REGIONS, 1):
            at = self._uncut.first_of(n * size, 0)
            if at is not None:
                return self._uncut.starts[at], n
        return None

    def take(self, start: int, size: int) -> None:
        """Take a free region, cutting a new slab where the class has none."""
        regions = self._free_regions.setdefault(size, [])
        if not regions:
            found = self._new_slab(size)
            assert found is not None, "nothing was found before"
            slab, n = found
            self._uncut.take(slab, n * size)
            regions += range(slab, slab + n * size, size)
            self._slabs |= dict.fromkeys(regions, found)
            self._used[slab] = 0
        regions.remove(start)
        self._used[self._slabs[start][0]] += 1
        super().take(start, size)

    def give_back(self, start: int, size: int) -> None:
        """The region is free for its class, or for all if nothing else of its slab is in use."""
        super().give_back(start, size)
        slab, n = self._slabs[start]
        regions = self._free_regions[size]
        insort(regions, start)
        self._used[slab] -= 1
        if not self._used[slab]:
            gone = range(slab, slab + n * size, size)
            self._free_regions[size] = [region for region in regions if region not in gone]
            for region in gone:
                del self._slabs[region]
            del self._used[slab]
            self._uncut.give_back(slab, n * size)

    @property
    def largest(self) -> int:
        """The largest class with a free region, or that the uncut cells have room for."""
        most = self._uncut.largest
        step = max((1 << most.bit_length() >> 1) // _STEPS, 1)
        return max([most // step * step, *(size for size, regions in self._free_regions.items() if regions)])


_CLASSES: dict[SearchName, type[RegionSearch]] = {
    "first-fit": RegionSearch,
    "best-fit": BestFit,
    "next-fit": NextFit,
    "worst-fit": WorstFit,
    "buddy": Buddy,
    "slab": Slabs,
}


def region_search(name: SearchName, cells: int) -> RegionSearch:
    """The search of this name, in an empty cache."""
    return _CLASSES[name](cells)
