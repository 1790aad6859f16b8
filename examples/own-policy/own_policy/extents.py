"""Free extents: free cells next to each other."""

import numpy as np
from numpy.typing import NDArray

from policies.api import IntArray


def free_extents(used: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """The first cell of each free extent, and its length; ``used`` has shape (n_cells,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], used, [True])).astype(np.int8)))
    first, end = edges[::2], edges[1::2]
    return first, end - first


def best_fit(used: NDArray[np.bool_], n: int) -> int | None:
    """The first cell of the smallest free extent of at least ``n`` cells, the lowest of several; None if none is."""
    first, length = free_extents(used)
    fitting = np.flatnonzero(length >= n)
    return int(first[fitting[length[fitting].argmin()]]) if len(fitting) else None
