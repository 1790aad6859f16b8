"""Searches for free cells as llama.cpp makes them: from a moving head, once round, first fit."""

from __future__ import annotations

import numpy as np

from policies.cells.free_cells import FreeCells
from policies.compiled import i64
from policies.vocabulary import Cells, IntArray


def cells_array(cells: Cells) -> IntArray:
    """The cells as an array; shape (n,)."""
    return np.arange(cells.start, cells.stop) if isinstance(cells, range) else cells


def start_of_search(head: int, used: int, n: int) -> int:
    """Where a search for ``n`` cells begins: at the head, or at 0 if the head is far above the number of used cells."""
    return 0 if head > used + 2 * n else head


def first_run(free: FreeCells, n: i64, start: i64) -> i64:
    """The first of ``n`` consecutive free cells from ``start`` on; -1 if there are none."""
    cell = free.first_cell(start)
    while cell < free.size:
        end = free.end_of_run(cell)
        if end - cell >= n:
            return cell
        cell = free.first_cell(end)
    return -1


def next_runs(free: FreeCells, n: i64, head: i64) -> list[tuple[int, int]]:
    """The first ``n`` free cells going once round from ``head``, as runs: first cell and length.

    There must be so many.
    """
    found, cell = list[tuple[int, int]](), free.first_cell(head)
    while n > 0:
        if cell == free.size:
            cell = free.first_cell(0)
        taken = min(free.end_of_run(cell) - cell, n)
        found.append((int(cell), int(taken)))
        n -= taken
        cell = free.first_cell(cell + taken)
    return found


def last_cells(free: FreeCells, n: i64) -> IntArray:
    """The last ``n`` free cells, descending; fewer if there are not as many."""
    found, cell = list[int](), free.last_before(free.size)
    while n > 0 and cell >= 0:
        found.append(int(cell))
        n -= 1
        cell = free.last_before(cell)
    return np.array(found, dtype=np.int64)


def find_contiguous(free: FreeCells, head: int, n: int) -> tuple[int | None, int]:
    """The first of ``n`` consecutive free cells, searching once round from ``head``, and the head after the search.

    ``llama_kv_cache_find_slot`` (b4666 to b4880; unchanged in ``llama_kv_cache_unified``). Counts the cells that the
    original tests, which gives up when it has tested as many as there are. If found, both results are the first cell;
    if not, None and the head that llama.cpp is left with.
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
        first = int(first_run(free, n, head))
        if first == head:
            return head, head
        goal = size if first < 0 else first
        if tested + goal - head < size:
            # Nothing on the way is wide enough, and the original does not give up before: go there at once.
            tested += goal - head
            head = goal
        else:
            return None, _head_after_failure(free, head, tested, n)


def _head_after_failure(free: FreeCells, head: int, tested: int, n: int) -> int:
    """The head after a search that finds nothing before it has tested as many cells as there are.

    The original steps over one used cell at a time, or over an extent and the used cell after it.
    """
    size = free.size
    while True:
        last = free.last_before(min(head + size - tested, size - n + 1))
        if last >= 0 and head < (before := free.start_of_run(last)):
            # The last extent before the end of the cache, or of the search: all before it are too short.
            tested, head = tested + before - head, before
        while head + n <= size:
            start = free.first_cell(head)
            # Among used cells it stops at the last start that fits (size - n), or when all cells have been tested.
            among_used = min(start - head, size - n + 1 - head, max(size - tested, 1))
            step = free.end_of_run(head) - head + 1 if start == head else among_used
            head += step
            tested += step
            if tested >= size:
                return head
        tested += size - head
        head = 0


def find_scattered(free: FreeCells, head: int, n: int) -> Cells | None:
    """The first ``n`` free cells going once round from ``head``, consecutive or not; None if there are fewer.

    llama.cpp since b6975 (``llama_kv_cache::find_slot`` with ``cont = false``).
    """
    if n > free.total:
        return None
    runs = next_runs(free, n, head)
    if len(runs) == 1:
        return range(runs[0][0], runs[0][0] + n)
    return np.concatenate([np.arange(start, start + length) for start, length in runs])
