"""How many cells each attention kernel reads, given the cells of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.cells.free_extents import extents_of_cells
from policies.policy import Kernel
from policies.vocabulary import Chunk, IntArray, Reads

TILE = 64
"""Cells in a tile of the ``tiled`` kernel."""

_SHORTEST_KEPT = 1024
"""Length of the arrays that ``repeated`` keeps: nearly all that it gives out are shorter."""
_kept: dict[int, IntArray] = {}


def repeated(value: int, n: int) -> IntArray:
    """``value`` n times; shape (n,), not to be written to. Arrays are kept, so use it for few different values."""
    kept = _kept.get(value)
    if kept is None or len(kept) < n:
        kept = _kept[value] = np.full(max(n, _SHORTEST_KEPT), value)
        kept.flags.writeable = False
    return kept[:n]


def padded_span(top: int, pad: int, size: int) -> int:
    """llama.cpp's ``n_kv``: one past the highest used cell, rounded up to ``pad``, at most ``size``."""
    return min(size, max(pad, -(-top // pad) * pad))


def reads_of(
    kernel: Kernel, chunks: Sequence[Chunk], cells_of: Callable[[int], IntArray], span: int, most: int | None = None
) -> Reads:
    """What attention reads for a micro-batch.

    ``masked`` scores every token against all ``span`` cells, used or not; ``gather`` against its sequence's own
    cells; ``tiled`` against all cells of the tiles that hold one of those; ``sliced`` against all cells from the
    lowest of those to the highest. ``cells_of`` gives a sequence's cells, ``span`` is what ``padded_span`` says, and
    ``most`` bounds how many tokens a sequence can see.
    """
    tokens = np.array([chunk.n for chunk in chunks], dtype=np.int64)
    if kernel == "masked":
        useful = np.array([start + n for _, start, n, _ in chunks], dtype=np.int64)
        useful = useful if most is None else np.minimum(useful, most)
        one = repeated(1, len(chunks))
        return Reads(tokens, one * span, useful, one, span)
    rows = np.array([(len(cells), *_scanned(kernel, cells)) for cells in map(cells_of, (c.seq for c in chunks))])
    return Reads(tokens, rows[:, 1], rows[:, 0], rows[:, 2], int(rows[:, 1].sum()))


def table_reads(chunks: Sequence[Chunk], lengths: IntArray, runs: IntArray) -> Reads:
    """What attention reads of sequences whose cells a table lists: ``lengths`` cells in ``runs`` pieces each."""
    tokens = np.array([chunk.n for chunk in chunks], dtype=np.int64)
    return Reads(tokens, lengths, lengths, runs, int(lengths.sum()))


def tile_counts(cells: IntArray) -> tuple[int, int]:
    """Number of tiles that ``cells`` lie in, and of contiguous pieces that these form."""
    tiles = cells // TILE
    holds = np.zeros(int(tiles.max(initial=0)) + 2, dtype=np.bool_)
    tiles += 1
    holds[tiles] = True
    return int(np.count_nonzero(holds)), int(np.count_nonzero(holds[1:] > holds[:-1]))


def _scanned(kernel: Kernel, cells: IntArray) -> tuple[int, int]:
    """Number of cells scanned, and of contiguous pieces that they form."""
    if kernel == "gather":
        return len(cells), len(extents_of_cells(np.sort(cells))[0])
    if kernel == "tiled":
        tiles, runs = tile_counts(cells)
        return tiles * TILE, runs
    return int(cells.max() - cells.min()) + 1, 1
