"""Three ways to carry out moves on K and V; all leave the same cells behind."""

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
"""Shape (heads, cells, ...)."""

CopyKernel = Literal["slices", "gather", "threads"]
"""``slices``: one copy for each run and array, one run after another. ``gather``: all moved cells of an array read at
once, then written. ``threads``: ``slices``, the heads shared out over the processor's cores."""

COPY_KERNELS: tuple[CopyKernel, ...] = get_args(CopyKernel)


def carry_out(kernel: CopyKernel, arrays: Sequence[Array], moves: Moves) -> None:
    """Move cells of each array, in place; runs may overlap themselves and one another as ``Moves`` allows."""
    _WAYS[kernel](arrays, moves)


def _by_slices(arrays: Sequence[Array], moves: Moves) -> None:
    for array in arrays:
        moves.apply(array, axis=1)


def _by_gather(arrays: Sequence[Array], moves: Moves) -> None:
    # Where each cell's content comes from in the end, whatever way it took.
    top = int(max((moves.src + moves.length).max(), (moves.dst + moves.length).max()))
    origin = np.arange(top)
    moves.apply(origin)
    moved = np.flatnonzero(origin != np.arange(top))
    for array in arrays:
        array[:, moved] = array[:, origin[moved]]


def _by_threads(arrays: Sequence[Array], moves: Moves) -> None:
    workers = os.cpu_count() or 1
    parts: list[list[Array]] = [[] for _ in range(workers)]
    for array in arrays:
        for part, heads in zip(parts, np.array_split(np.arange(len(array)), workers), strict=True):
            if len(heads):
                part.append(array[heads[0] : heads[-1] + 1])
    list(_pool(workers).map(lambda part: _by_slices(part, moves), parts))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="copies")


_WAYS: dict[CopyKernel, Callable[[Sequence[Array], Moves], None]] = {
    "slices": _by_slices,
    "gather": _by_gather,
    "threads": _by_threads,
}
