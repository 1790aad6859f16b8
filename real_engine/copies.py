"""Three ways to carry out moves on K and V, with equal results.

Each works head by head: within a head a run of cells is contiguous memory, which can be moved in place even where it
overlaps itself. Across heads, NumPy could not rule out an overlap between source and target, and would copy every run
twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from policies import Moves

Array = NDArray[np.generic]
"""Shape (heads, cells, ...), C-ordered."""

CopyKernel = Literal["slices", "gather", "threads"]
"""``slices``: one copy for each run and head, in order; as fast as memory for long runs. ``gather``: the moved cells of
a head are read through an index table, a piece at a time, then written; everything is copied twice, but many short runs
cost no more than a few long ones. ``threads``: ``slices`` with the heads spread over the processor's cores; for long
runs."""

COPY_KERNELS: tuple[CopyKernel, ...] = get_args(CopyKernel)

_PIECE = 1 << 18
"""Bytes gathered at a time, so that they stay in the second-level cache until they are written."""

_Bytes = NDArray[np.uint8]
_Runs = list[tuple[int, int, int]]
"""``(source, target, length)`` in bytes."""


def carry_out(kernel: CopyKernel, arrays: Sequence[Array], moves: Moves) -> None:
    """Move cells of each array in place; runs may overlap themselves and each other as ``Moves`` allows."""
    _IMPLEMENTATIONS[kernel](arrays, moves)


def _by_slices(arrays: Sequence[Array], moves: Moves) -> None:
    for array in arrays:
        runs = _runs(array, moves)
        for head in _heads(array):
            # A memoryview takes a third less time for each run than a NumPy array.
            memory = head.data
            for source, target, n in runs:
                memory[target : target + n] = memory[source : source + n]


def _by_gather(arrays: Sequence[Array], moves: Moves) -> None:
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


def _by_threads(arrays: Sequence[Array], moves: Moves) -> None:
    heads = [(head, runs) for array in arrays for runs in [_runs(array, moves)] for head in _heads(array)]
    workers = os.cpu_count() or 1

    def work(first: int) -> None:
        for head, runs in heads[first::workers]:
            # Unlike a memoryview, a NumPy array releases the GIL while it copies.
            for source, target, n in runs:
                head[target : target + n] = head[source : source + n]

    list(_pool(workers).map(work, range(workers)))


def _heads(array: Array) -> list[_Bytes]:
    """Each head's cells as contiguous bytes."""
    return [head.reshape(-1, copy=False).view(np.uint8) for head in array]


def _cell_bytes(array: Array) -> int:
    """Bytes of one cell in one head."""
    heads, cells = array.shape[:2]
    return int(array.nbytes // (heads * cells))


def _runs(array: Array, moves: Moves) -> _Runs:
    size = _cell_bytes(array)
    columns = ((column * size).tolist() for column in (moves.src, moves.dst, moves.length))
    return list(zip(*columns, strict=True))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="copies")


_IMPLEMENTATIONS: dict[CopyKernel, Callable[[Sequence[Array], Moves], None]] = {
    "slices": _by_slices,
    "gather": _by_gather,
    "threads": _by_threads,
}
