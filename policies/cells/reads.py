"""What each attention kernel reads, given where the cells lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.cells.free_extents import runs_of
from policies.policy import Kernel
from policies.vocabulary import Chunk, IntArray, Reads

TILE = 64
"""Cells in a tile of the ``tiled`` kernel."""


_LEAST = 1024
"""Length of the arrays that are kept: longer than nearly all that are asked for."""
_constants: dict[int, IntArray] = {}


def constants(value: int, n: int) -> IntArray:
    """So many times the same; shape (n,), not to be written to. For values that come again and again."""
    kept = _constants.get(value)
    if kept is None or len(kept) < n:
        kept = _constants[value] = np.full(max(n, _LEAST), value)
        kept.flags.writeable = False
    return kept[:n]


def padded_span(top: int, pad: int, size: int) -> int:
    """llama.cpp's ``n_kv``: one past the highest used cell, rounded up to ``pad``, at most ``size``."""
    return min(size, max(pad, -(-top // pad) * pad))


def padded_spans(tops: IntArray, pad: int, size: int) -> IntArray:
    """``padded_span`` of each of some tops, which rise."""
    if pad & (pad - 1):
        spans = -(-tops // pad) * pad
    else:
        spans = tops + (pad - 1)
        spans &= -pad
    if len(spans) and spans[0] < pad:
        np.maximum(spans, pad, out=spans)
    if len(spans) and spans[-1] > size:
        np.minimum(spans, size, out=spans)
    return spans


def reads_of(
    kernel: Kernel, chunks: Sequence[Chunk], cells_of: Callable[[int], IntArray], span: int, most: int | None = None
) -> Reads:
    """The reads of a micro-batch whose sequences' cells ``cells_of`` gives; ``span`` as by ``padded_span``.

    ``masked`` scores every token against all ``span`` cells, used or not; ``gather`` against its sequence's own;
    ``tiled`` against all cells of the tiles that hold one of them; ``sliced`` against all from the lowest of them
    to the highest. ``most``: tokens that a sequence can see at most.
    """
    tokens = np.array([chunk.n for chunk in chunks], dtype=np.int64)
    if kernel == "masked":
        useful = np.array([start + n for _, start, n, _ in chunks], dtype=np.int64)
        useful = useful if most is None else np.minimum(useful, most)
        one = constants(1, len(chunks))
        return Reads(tokens, one * span, useful, one, span)
    rows = np.array([(len(cells), *_scanned(kernel, cells)) for cells in map(cells_of, (c.seq for c in chunks))])
    return Reads(tokens, rows[:, 1], rows[:, 0], rows[:, 2], int(rows[:, 1].sum()))


def table_reads(chunks: Sequence[Chunk], lengths: IntArray, runs: IntArray) -> Reads:
    """Reads of sequences that are found through a table and hold ``lengths`` cells in ``runs`` pieces each."""
    tokens = np.array([chunk.n for chunk in chunks], dtype=np.int64)
    return Reads(tokens, lengths, lengths, runs, int(lengths.sum()))


def _scanned(kernel: Kernel, cells: IntArray) -> tuple[int, int]:
    """Cells scanned and the pieces they lie in."""
    if kernel == "gather":
        return len(cells), len(runs_of(np.sort(cells))[0])
    if kernel == "tiled":
        tiles = np.unique(cells // TILE)
        return len(tiles) * TILE, len(runs_of(tiles)[0])
    return int(cells.max() - cells.min()) + 1, 1
