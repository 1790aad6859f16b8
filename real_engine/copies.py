"""Three ways to carry out moves on K and V; all leave the same cells behind.

Each works head by head: there a run of cells is one memory of memory, which may be copied onto itself as it is. Across
heads NumPy would have to take a run for one that overlaps itself, since its heads lie between one another's, and would
copy it twice.
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
"""``slices``: one copy for each run and head, one run after another; as fast as memory where runs are long. ``gather``:
the moved cells of a head read through a table, a piece at a time, then written; everything is copied twice, but many
short runs cost no more than a few long ones. ``threads``: ``slices``, the heads shared out over the processor's cores;
for long runs."""

COPY_KERNELS: tuple[CopyKernel, ...] = get_args(CopyKernel)

_PIECE = 1 << 18
"""Bytes that are gathered at a time: they stay in the second-level cache until they are written."""

_Bytes = NDArray[np.uint8]
_Runs = list[tuple[int, int, int]]
"""``(source, target, length)`` in bytes."""


def carry_out(kernel: CopyKernel, arrays: Sequence[Array], moves: Moves) -> None:
    """Move cells of each array, in place; runs may overlap themselves and one another as ``Moves`` allows."""
    _IMPLEMENTATIONS[kernel](arrays, moves)


def _by_slices(arrays: Sequence[Array], moves: Moves) -> None:
    for array in arrays:
        runs = _runs(array, moves)
        for head in _heads(array):
            # A third less for each run than with an array of NumPy's.
            memory = head.data
            for source, target, n in runs:
                memory[target : target + n] = memory[source : source + n]


def _by_gather(arrays: Sequence[Array], moves: Moves) -> None:
    # Where each cell's content comes from in the end, whatever way it took.
    top = int(max((moves.src + moves.length).max(), (moves.dst + moves.length).max()))
    origin = np.arange(top)
    moves.apply(origin)
    moved = np.flatnonzero(origin != np.arange(top))
    origin = origin[moved]
    downward = bool((origin > moved).all())
    for array in arrays:
        size = _cell_bytes(array)
        # Where all cells move down, those of a piece are written below all that later ones read.
        step = max(_PIECE // size, 1) if downward else len(moved)
        buffer = np.empty(min(step, len(moved)), dtype=(np.void, size))
        for head in _heads(array):
            cells = head.view(buffer.dtype)
            for start in range(0, len(moved), step):
                source, target = origin[start : start + step], moved[start : start + step]
                piece = buffer[: len(source)]
                np.take(cells, source, out=piece, mode="clip")  # Which, unlike "raise", takes no buffer of its own.
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
            # Unlike a memoryview an array lets go of the interpreter while it copies.
            for source, target, n in runs:
                head[target : target + n] = head[source : source + n]

    list(_pool(workers).map(work, range(workers)))


def _heads(array: Array) -> list[_Bytes]:
    """Each head's cells as one memory of bytes."""
    return [head.reshape(-1, copy=False).view(np.uint8) for head in array]


def _cell_bytes(array: Array) -> int:
    """Bytes of a cell in one head."""
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
