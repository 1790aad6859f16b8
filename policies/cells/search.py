"""Searches for free cells as llama.cpp makes them: from a moving head, once round, first fit."""

from __future__ import annotations

import numpy as np

from policies.cells.free_extents import FreeExtents
from policies.vocabulary import IntArray

Cells = range | IntArray
"""Cells in the order in which they are filled; a range if they are consecutive and ascend."""


def cells_array(cells: Cells) -> IntArray:
    """The cells as an array; shape (n,)."""
    return np.arange(cells.start, cells.stop) if isinstance(cells, range) else cells


def start_of_search(head: int, used: int, n: int) -> int:
    """Where a search for ``n`` cells begins: at the head, or at 0 if the head is far above the number of used cells."""
    return 0 if head > used + 2 * n else head


def find_contiguous(free: FreeExtents, head: int, n: int) -> tuple[int | None, int]:
    """The first of ``n`` consecutive free cells, searching once round from ``head``, and the head after the search.

    ``llama_kv_cache_find_slot`` (b4666 to b4880; unchanged in ``llama_kv_cache_unified``). Visits extents, not cells,
    but counts the cells that the original tests, which gives up when it has tested as many as there are. If found,
    both results are the first cell; if not, None and the head that llama.cpp is left with.
    """
    size = free.size
    if n > size:
        return None, head
    tested = 0
    while True:
        if head + n > size:
            tested += size - head
            head = 0
            continue
        i = free.index_after(head)
        inside = i < len(free) and free.starts[i] <= head
        if inside and free.ends[i] - head >= n:
            return head, head
        wide = free.first_of(n, i + 1 if inside else i)
        goal = size if wide is None else free.starts[wide]
        if tested + goal - head < size:
            # Nothing on the way is wide enough, and the original does not give up before: go there at once.
            tested += goal - head
            head = goal
        else:
            return None, _head_after_failure(free, head, tested, n)


def _head_after_failure(free: FreeExtents, head: int, tested: int, n: int) -> int:
    """The head after a search that finds nothing before it has tested as many cells as there are.

    The original steps over one used cell at a time, or over an extent and the used cell after it.
    """
    size = free.size
    while True:
        before = free.index_before(min(head + size - tested, size - n + 1))
        if before >= 0 and head < free.starts[before]:
            # The last extent before the end of the cache, or of the search: all before it are too short.
            tested, head = tested + free.starts[before] - head, free.starts[before]
        while head + n <= size:
            i = free.index_after(head)
            start = free.starts[i] if i < len(free) else size
            # Among used cells it stops at the last start that fits (size - n), or when all cells have been tested.
            among_used = min(start - head, size - n + 1 - head, max(size - tested, 1))
            step = free.ends[i] - head + 1 if start <= head else among_used
            head += step
            tested += step
            if tested >= size:
                return head
        tested += size - head
        head = 0


def find_scattered(free: FreeExtents, head: int, n: int) -> Cells | None:
    """The first ``n`` free cells going once round from ``head``, consecutive or not; None if there are fewer.

    llama.cpp since b6975 (``llama_kv_cache::find_slot`` with ``cont = false``).
    """
    if n > free.total:
        return None
    at = free.index_after(head)
    if at < len(free):
        start = max(free.starts[at], head)
        if free.ends[at] - start >= n:
            return range(start, start + n)
        # No more extents than cells are needed, unless the search goes round.
        starts, ends = free.arrays(at, at + n)
        lengths = ends - starts
        lengths[0] = ends[0] - start
        if int(lengths.sum()) >= n:
            starts = starts.copy()
            starts[0] = start
            return first_cells(starts, lengths, n)
    starts, ends = free.arrays()
    if at < len(free):
        # The extent that contains the head comes twice: its end first, its beginning last.
        starts, ends = np.concatenate((starts[at:], starts[: at + 1])), np.concatenate((ends[at:], ends[: at + 1]))
        starts[0] = max(head, int(starts[0]))
        ends[-1] = min(head, int(ends[-1]))
        ends[-1] = max(starts[-1], ends[-1])
    return first_cells(starts, ends - starts, n)


def first_cells(starts: IntArray, lengths: IntArray, n: int) -> IntArray:
    """The first ``n`` cells of some extents in the given order; shape (n,)."""
    upto = np.cumsum(lengths)
    last = int(np.searchsorted(upto, n))
    before = upto[: last + 1] - lengths[: last + 1]
    taken = lengths[: last + 1].copy()
    taken[-1] = n - before[-1]
    cells: IntArray = np.repeat(starts[: last + 1] - before, taken)
    cells += np.arange(n)
    return cells
