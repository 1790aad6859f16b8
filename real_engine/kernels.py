"""Attention over a cache indexed by cell, with one way of reading it for each kernel.

``select`` determines once for a pass which cells each kernel reads and which of them are masked; ``attend`` then works
layer by layer on q of shape (n_tokens, n_heads, d_head) and that layer's K and V, read as float32 however stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from policies import Chunk, Group, Kernel, View
from policies.cells.free_extents import extents_of_cells
from policies.cells.reads import TILE
from real_engine.arrays import FloatArray, IntArray

Read = Callable[[slice | IntArray], FloatArray]
"""Reads K or V of some cells of a layer, float32 of shape (n_kv_heads, n_cells, d_head)."""

BLOCK = 256
"""Cells read at a time: copied or dequantised numbers then stay in the second-level cache until they are used, and
products of a few rows with them are small enough for the BLAS not to repack."""

_KEEP_SCORES_UP_TO = 16
"""Most tokens for which all scores are kept before the softmax. Deliberately not a number of scores: a cell's cost
should depend on how many tokens scan it, not on how many cells there are."""

_OTHER_SEQUENCE = np.iinfo(np.int64).max
"""Position given to cells of other sequences: after every token, so that they are masked."""

Blocks = tuple[tuple[slice | IntArray, FloatArray | None], ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Cells that some rows of a pass attend to."""

    rows: slice
    """The rows' tokens within the pass."""
    blocks: Blocks
    """At most ``BLOCK`` cells each, with the bias to add to the scores against them: 0 or minus infinity, shape
    (n_rows, n_cells); None where nothing is masked. The softmax runs over all blocks together."""


def select(
    kernel: Kernel, chunks: Sequence[Chunk], views: Sequence[View], span: int, group: Group
) -> tuple[Selection, ...]:
    """Cells that each token of a pass reads; ``span``, in cells of each stream, is used by ``masked`` only."""
    window = group.window
    if kernel == "masked" and group.streams == 1:
        masked = []
        for chunk, view in zip(chunks, views, strict=True):
            position = np.full(span, _OTHER_SEQUENCE)
            position[view.cells] = view.positions
            bias = _bias(position, _own(chunk, view), window)
            masked.append(np.zeros((chunk.n, span), dtype=np.float32) if bias is None else bias)
        return (Selection(slice(None), tuple(_blocks(slice(0, span), np.concatenate(masked)))),)
    found, at = [], 0
    for chunk, view in zip(chunks, views, strict=True):
        rows, own = slice(at, at + chunk.n), _own(chunk, view)
        at += chunk.n
        if kernel == "masked":
            size = group.cells // group.streams
            first = int(view.cells[0]) // size * size
            position = np.full(span, _OTHER_SEQUENCE)
            position[view.cells - first] = view.positions
            found.append(Selection(rows, tuple(_blocks(slice(first, first + span), _bias(position, own, window)))))
            continue
        if kernel == "gather":
            found.append(Selection(rows, tuple(_blocks(view.cells, _bias(view.positions, own, window)))))
            continue
        if kernel == "sliced":
            starts, ends = np.array([view.cells.min()]), np.array([view.cells.max() + 1])
        else:
            tile_starts, tile_ends = extents_of_cells(np.unique(view.cells // TILE))
            starts, ends = tile_starts * TILE, tile_ends * TILE
        blocks: list[tuple[slice | IntArray, FloatArray | None]] = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            position = np.full(end - start, _OTHER_SEQUENCE)
            inside = (view.cells >= start) & (view.cells < end)
            position[view.cells[inside] - start] = view.positions[inside]
            blocks += _blocks(slice(start, end), _bias(position, own, window))
        found.append(Selection(rows, tuple(blocks)))
    return tuple(found)


def attend(
    q: FloatArray,
    keys: Read,
    values: Read,
    n_kv: int,
    selections: Sequence[Selection],
    received: FloatArray | None = None,
) -> FloatArray:
    """Softmax attention of every row over its selection, with ``n_kv`` key heads; an array of q's shape.

    ``received``: shape (n_tokens, n_cells), to which each row's weights on each cell are added, summed over its heads.
    """
    d = q.shape[2]
    out = np.empty_like(q)
    for selection in selections:
        part = q[selection.rows]
        n, heads, _ = part.shape
        by_token = (part * np.float32(1 / np.sqrt(d))).reshape(n, n_kv, heads // n_kv, d)
        grouped = by_token.transpose(1, 0, 2, 3).reshape(n_kv, -1, d)
        if received is not None:
            result = _attend_at_once(grouped, keys, values, selection.blocks, received[selection.rows])
        elif n <= _KEEP_SCORES_UP_TO or len(selection.blocks) == 1:
            result = _attend_at_once(grouped, keys, values, selection.blocks)
        else:
            result = _attend_blockwise(grouped, keys, values, selection.blocks)
        out[selection.rows] = result.reshape(n_kv, n, -1, d).transpose(1, 0, 2, 3).reshape(n, heads, d)
    return out


def _own(chunk: Chunk, view: View) -> IntArray:
    """Positions of the chunk's own tokens, the last of its view."""
    return view.positions[len(view.positions) - chunk.n :]


def _bias(position: IntArray, own: IntArray, window: int | None) -> FloatArray | None:
    masked = position[None, :] > own[:, None]
    if window is not None:
        masked |= own[:, None] - position[None, :] >= window
    if not masked.any():
        return None
    return np.where(masked, np.float32(-np.inf), np.float32(0))


def _blocks(cells: slice | IntArray, bias: FloatArray | None) -> Iterator[tuple[slice | IntArray, FloatArray | None]]:
    """Cells and bias in blocks of at most ``BLOCK`` cells."""
    for start in range(0, _size(cells), BLOCK):
        stop = min(start + BLOCK, _size(cells))
        part = slice(cells.start + start, cells.start + stop) if isinstance(cells, slice) else cells[start:stop]
        masked = None if bias is None else bias[:, start:stop]
        yield part, masked if masked is not None and masked.any() else None


def _size(cells: slice | IntArray) -> int:
    return int(cells.stop - cells.start) if isinstance(cells, slice) else len(cells)


def _score(grouped: FloatArray, keys: Read, cells: slice | IntArray, bias: FloatArray | None, out: FloatArray) -> None:
    """Write scores into ``out``, shape (n_kv_heads, n_rows * heads per kv head, n_cells)."""
    np.matmul(grouped, keys(cells).transpose(0, 2, 1), out=out)
    if bias is not None:
        # Still a view: only the axis of rows is split.
        by_row = out.reshape(len(grouped), len(bias), -1, bias.shape[1], copy=False)
        by_row += bias[None, :, None, :]


def _attend_at_once(
    grouped: FloatArray, keys: Read, values: Read, blocks: Blocks, received: FloatArray | None = None
) -> FloatArray:
    """Attention with all scores kept until one softmax over them, whose weights are added to ``received``."""
    stops = np.cumsum([_size(cells) for cells, _ in blocks]).tolist()
    scores = np.empty((*grouped.shape[:2], stops[-1]), dtype=np.float32)
    parts = [slice(start, stop) for start, stop in pairwise([0, *stops])]
    for part, (cells, bias) in zip(parts, blocks, strict=True):
        _score(grouped, keys, cells, bias, scores[:, :, part])
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    result: FloatArray = scores[:, :, parts[0]] @ values(blocks[0][0])
    for part, (cells, _) in zip(parts[1:], blocks[1:], strict=True):
        result += scores[:, :, part] @ values(cells)
    total = scores.sum(axis=-1, keepdims=True)
    result /= total
    if received is not None:
        scores /= total
        by_row = scores.reshape(len(scores), len(received), -1, scores.shape[2], copy=False).sum(axis=(0, 2))
        for part, (cells, _) in zip(parts, blocks, strict=True):
            received[:, cells] += by_row[:, part]
    return result


def _attend_blockwise(grouped: FloatArray, keys: Read, values: Read, blocks: Blocks) -> FloatArray:
    """Attention block by block with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867)."""
    peak: FloatArray = np.full((*grouped.shape[:2], 1), -3e38, dtype=np.float32)
    total = np.zeros_like(peak)
    result = np.zeros_like(grouped)
    for cells, bias in blocks:
        scores = np.empty((*grouped.shape[:2], _size(cells)), dtype=np.float32)
        _score(grouped, keys, cells, bias, scores)
        higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        scores -= higher
        np.exp(scores, out=scores)
        rescale = np.exp(peak - higher)
        result *= rescale
        result += scores @ values(cells)
        total *= rescale
        total += scores.sum(axis=-1, keepdims=True)
        peak = higher
    result /= total
    return result
