"""Searches for free cells, as llama.cpp makes them: from a moving head, once round, first fit."""

from __future__ import annotations

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
        start = free.starts[i] if i < len(free) else size
        if start <= head:
            end = free.ends[i]
            if end - head >= n:
                return head, head
            step = end - head + 1
        else:
            # Among used cells the original advances one at a time; it stops early at the end of the array
            # (last start that fits: size - n) or of its patience.
            step = min(start - head, size - n + 1 - head, max(size - tested, 1))
        head += step
        tested += step
        if tested >= size:
            return None, head


def find_scattered(free: FreeRuns, head: int, n: int) -> IntArray | None:
    """The first ``n`` free cells going once round from ``head``, wherever they lie; None if there are fewer.

    llama.cpp since b6975 (``llama_kv_cache::find_slot`` with ``cont = false``).
    """
    if n > free.total:
        return None
    pieces: list[IntArray] = []
    first = free.index_after(head)
    order = [*range(first, len(free)), *range(min(first + 1, len(free)))]
    for turn, i in enumerate(order):
        start, end = free.starts[i], free.ends[i]
        if turn == 0 and first < len(free):
            start = max(start, head)
        elif turn == len(order) - 1 and i == first:
            end = min(end, head)
        if end > start:
            pieces.append(np.arange(start, min(end, start + n)))
            n -= len(pieces[-1])
        if n == 0:
            break
    return np.concatenate(pieces)
