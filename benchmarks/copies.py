"""Three ways to carry out moves on K and V, with equal results; the engine's own is ``slices``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from policies import Moves
from real_engine.storage import Array, carry_out

_PIECE = 1 << 18
"""Bytes gathered at a time, so that they stay in the second-level cache until they are written."""


def by_gather(arrays: Sequence[Array], moves: Moves) -> None:
    """Read the moved cells of a head through an index table, a piece at a time, then write them.

    Everything is copied twice, but many short runs cost no more than a few long ones.
    """
    # Where each cell's content comes from after all moves.
    top = int(max((moves.src + moves.length).max(), (moves.dst + moves.length).max()))
    origin = np.arange(top)
    moves.apply(origin)
    moved = np.flatnonzero(origin != np.arange(top))
    origin = origin[moved]
    downward = bool((origin > moved).all())
    for array in arrays:
        size = _cell_bytes(array)
        # If all cells move down, each piece is written below everything that later pieces read.
        step = max(_PIECE // size, 1) if downward else len(moved)
        buffer = np.empty(min(step, len(moved)), dtype=(np.void, size))
        for head in _heads(array):
            cells = head.view(buffer.dtype)
            for start in range(0, len(moved), step):
                source, target = origin[start : start + step], moved[start : start + step]
                piece = buffer[: len(source)]
                np.take(cells, source, out=piece, mode="clip")  # Unlike "raise", "clip" needs no buffer.
                first, end = int(target[0]), int(target[-1]) + 1
                if end - first == len(target):
                    cells[first:end] = piece
                else:
                    cells[target] = piece


def by_threads(arrays: Sequence[Array], moves: Moves) -> None:
    """``slices`` with the heads spread over the processor's cores; for long runs."""
    heads = [(head, runs) for array in arrays for runs in [_runs(array, moves)] for head in _heads(array)]
    workers = os.cpu_count() or 1

    def work(first: int) -> None:
        for head, runs in heads[first::workers]:
            # Unlike a memoryview, a NumPy array releases the GIL while it copies.
            for source, target, n in runs:
                head[target : target + n] = head[source : source + n]

    list(_pool(workers).map(work, range(workers)))


def _heads(array: Array) -> list[Array]:
    """Each head's cells as contiguous bytes."""
    return [head.reshape(-1, copy=False).view(np.uint8) for head in array]


def _cell_bytes(array: Array) -> int:
    """Bytes of one cell in one head."""
    heads, cells = array.shape[:2]
    return int(array.nbytes // (heads * cells))


def _runs(array: Array, moves: Moves) -> list[tuple[int, int, int]]:
    """``(source, target, length)`` in bytes."""
    size = _cell_bytes(array)
    columns = ((column * size).tolist() for column in (moves.src, moves.dst, moves.length))
    return list(zip(*columns, strict=True))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="copies")


COPY_KERNELS: dict[str, Callable[[Sequence[Array], Moves], None]] = {
    "slices": carry_out,
    "gather": by_gather,
    "threads": by_threads,
}
