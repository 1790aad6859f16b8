"""Attention over a cache indexed by cell: one way of reading it for each kernel.

``select`` says once for a pass what each kernel reads and what must be hidden; ``attend`` then works layer by layer on
q of shape (n_tokens, n_heads, d_head) and what it reads of that layer's K and V, float32 whatever they are kept as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from policies import Chunk, Group, Kernel, View
from policies.free_runs import runs_of
from policies.reads import TILE
from real_engine.model import Floats, Ints

Read = Callable[[slice | Ints], Floats]
"""K or V of some cells of a layer, shape (n_kv_heads, n_cells, d_head), float32."""

_NOWHERE = np.iinfo(np.int64).max
"""The position of a cell that is not the sequence's own: after every token."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What some rows of a pass attend to."""

    rows: slice
    """Their tokens."""
    pieces: tuple[tuple[slice | Ints, Floats | None], ...]
    """Cells, and what to add to the scores of rows against them: 0 or minus infinity, shape (n_rows, n_cells);
    None where nothing is hidden. The softmax runs over all pieces together."""


def select(
    kernel: Kernel, chunks: Sequence[Chunk], views: Sequence[View], span: int, group: Group
) -> tuple[Selection, ...]:
    """What each token of a pass reads. ``span``, cells of each stream, is for ``masked``."""
    window = group.window
    if kernel == "masked" and group.streams == 1:
        hidden = []
        for chunk, view in zip(chunks, views, strict=True):
            position = np.full(span, _NOWHERE)
            position[view.cells] = view.positions
            bias = _bias(position, _own(chunk, view), window)
            hidden.append(np.zeros((chunk.n, span), dtype=np.float32) if bias is None else bias)
        return (Selection(slice(None), ((slice(0, span), np.concatenate(hidden)),)),)
    found, at = [], 0
    for chunk, view in zip(chunks, views, strict=True):
        rows, own = slice(at, at + chunk.n), _own(chunk, view)
        at += chunk.n
        if kernel == "masked":
            size = group.cells // group.streams
            first = int(view.cells[0]) // size * size
            position = np.full(span, _NOWHERE)
            position[view.cells - first] = view.positions
            found.append(Selection(rows, ((slice(first, first + span), _bias(position, own, window)),)))
            continue
        if kernel == "gather":
            found.append(Selection(rows, ((view.cells, _bias(view.positions, own, window)),)))
            continue
        if kernel == "sliced":
            starts, ends = np.array([view.cells.min()]), np.array([view.cells.max() + 1])
        else:
            tile_starts, tile_ends = runs_of(np.unique(view.cells // TILE))
            starts, ends = tile_starts * TILE, tile_ends * TILE
        pieces = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            position = np.full(end - start, _NOWHERE)
            inside = (view.cells >= start) & (view.cells < end)
            position[view.cells[inside] - start] = view.positions[inside]
            pieces.append((slice(start, end), _bias(position, own, window)))
        found.append(Selection(rows, tuple(pieces)))
    return tuple(found)


def attend(q: Floats, keys: Read, values: Read, n_kv: int, selections: Sequence[Selection]) -> Floats:
    """Softmax attention of every row over its selection, with ``n_kv`` heads of keys; an array of q's shape."""
    d = q.shape[2]
    out = np.empty_like(q)
    for selection in selections:
        part = q[selection.rows]
        n, heads, _ = part.shape
        by_token = (part * np.float32(1 / np.sqrt(d))).reshape(n, n_kv, heads // n_kv, d)
        grouped = by_token.transpose(1, 0, 2, 3).reshape(n_kv, -1, d)
        if len(selection.pieces) == 1:
            cells, bias = selection.pieces[0]
            result = _softmax(_scores(grouped, keys, cells, bias)) @ values(cells)
        else:
            result = _running(grouped, keys, values, selection)
        out[selection.rows] = result.reshape(n_kv, n, -1, d).transpose(1, 0, 2, 3).reshape(n, heads, d)
    return out


def _own(chunk: Chunk, view: View) -> Ints:
    """Positions of the chunk's own tokens: the last of its view."""
    return view.positions[len(view.positions) - chunk.n :]


def _bias(position: Ints, own: Ints, window: int | None) -> Floats | None:
    hidden = position[None, :] > own[:, None]
    if window is not None:
        hidden |= own[:, None] - position[None, :] >= window
    if not hidden.any():
        return None
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _scores(grouped: Floats, keys: Read, cells: slice | Ints, bias: Floats | None) -> Floats:
    """Shape (n_kv_heads, n_rows * heads per kv head, n_cells)."""
    scores: Floats = grouped @ keys(cells).transpose(0, 2, 1)
    if bias is not None:
        n, span = bias.shape
        scores.reshape(len(grouped), n, -1, span)[...] += bias[None, :, None, :]
    return scores


def _softmax(scores: Floats) -> Floats:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _running(grouped: Floats, keys: Read, values: Read, selection: Selection) -> Floats:
    """Piece by piece with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867)."""
    peak: Floats = np.full((*grouped.shape[:2], 1), -3e38, dtype=np.float32)
    total = np.zeros_like(peak)
    result = np.zeros_like(grouped)
    for cells, bias in selection.pieces:
        scores = _scores(grouped, keys, cells, bias)
        higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        scores -= higher
        np.exp(scores, out=scores)
        rescale = np.exp(peak - higher)
        result = result * rescale + scores @ values(cells)
        total = total * rescale + scores.sum(axis=-1, keepdims=True)
        peak = higher
    result /= total
    return result
