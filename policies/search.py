"""Searches for free cells, as llama.cpp makes them: from a moving head, once round, first fit."""

from __future__ import annotations

from itertools import chain

import numpy as np

from policies.free_runs import FreeRuns
from policies.vocabulary import IntArray


def start_of_search(head: int, used: int, n: int) -> int:
    """Where a search for ``n`` cells begins: at the head, or at 0 if that is far beyond what is in use."""
    return 0 if head > used + 2 * n else head


def find_run(free: FreeRuns, head: int, n: int) -> tuple[int | None, int]:
    """The first of ``n`` free cells in a row, searching once round from ``head``, and where the search stopped.

    ``llama_kv_cache_find_slot`` (b4666 to b4880; unchanged in ``llama_kv_cache_unified``). Visits runs, not cells,
    but counts cells tested exactly as the original, which ends the search after as many as there are. Found: the
    run's first cell twice. Not found: None and the head that llama.cpp is left with.
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
            # Nothing on the way is wide enough, nor is the search given up before: go there at once.
            tested += goal - head
            head = goal
        else:
            return None, _where_it_stops(free, head, tested, n)


def _where_it_stops(free: FreeRuns, head: int, tested: int, n: int) -> int:
    """The head that a search is left with which finds nothing before it has tested as many cells as there are.

    It steps past one used cell at a time, or past a run and the used cell behind it.
    """
    size = free.size
    before = free.index_before(head + size - tested)
    if before >= 0 and head < free.starts[before] <= size - n:
        # The last run on the way: until there it would only go from hole to hole.
        tested, head = tested + free.starts[before] - head, free.starts[before]
    while True:
        if head + n > size:
            tested += size - head
            head = 0
            continue
        i = free.index_after(head)
        start = free.starts[i] if i < len(free) else size
        # Among used cells it stops early at the last start that fits (size - n), or when its patience ends.
        among_used = min(start - head, size - n + 1 - head, max(size - tested, 1))
        step = free.ends[i] - head + 1 if start <= head else among_used
        head += step
        tested += step
        if tested >= size:
            return head


def find_scattered(free: FreeRuns, head: int, n: int) -> IntArray | None:
    """The first ``n`` free cells going once round from ``head``, wherever they lie; None if there are fewer.

    llama.cpp since b6975 (``llama_kv_cache::find_slot`` with ``cont = false``).
    """
    if n > free.total:
        return None
    pieces: list[IntArray] = []
    first = free.index_after(head)
    count = len(free)
    # The run that the head lies in comes twice: its end first, its beginning last.
    for turn, i in enumerate(chain(range(first, count), range(min(first + 1, count)))):
        start, end = free.starts[i], free.ends[i]
        if turn == 0 and first < count:
            start = max(start, head)
        elif i == first:
            end = min(end, head)
        if end > start:
            pieces.append(np.arange(start, min(end, start + n)))
            n -= len(pieces[-1])
        if n == 0:
            break
    return np.concatenate(pieces)
