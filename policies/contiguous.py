"""Contiguous slots: each micro-batch takes one run of cells, found first-fit from a moving head.

llama.cpp of 2024 and early 2025 (``llama_kv_cache_find_slot``, builds b4666 to b4880).
"""

from __future__ import annotations

from policies.arena import Arena


def find_run(arena: Arena, n: int) -> int | None:
    """The first cell of a run of ``n`` free cells, searching once round from ``arena.head``.

    As llama.cpp does, a search that fails leaves the head where it stopped, and one that begins far beyond
    what is in use (``head > used + 2n``) begins at 0 instead. Visits runs, not cells, but counts cells tested
    exactly as the original, which ends the search after ``size`` of them.
    """
    size, free = arena.size, arena.free
    if arena.head > arena.used + 2 * n:
        arena.head = 0
    if n > size:
        return None
    head, tested = arena.head, 0
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
                arena.head = head
                return head
            step = end - head + 1
        else:
            # Among used cells the original advances one at a time; it stops early at the end of the array
            # (last start that fits: size - n) or of its patience.
            step = min(start - head, size - n + 1 - head, max(size - tested, 1))
        head += step
        tested += step
        if tested >= size:
            arena.head = head
            return None
