"""Attention over a cache indexed by cell: one function for each way of reading it.

All take q of shape (n_tokens, n_heads, d_head) and one layer's K and V of shape (n_kv_heads, n_cells, d_head),
float32, and return an array of q's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies import Chunk, View
from real_engine.model import Floats


def causal_mask(chunks: Sequence[Chunk], views: Sequence[View], span: int) -> Floats:
    """What each token may see of cells ``[0, span)``: 0, or minus infinity; shape (n_tokens, span)."""
    rows = []
    for chunk, view in zip(chunks, views, strict=True):
        position = np.full(span, np.iinfo(np.int64).max)
        position[view.cells] = view.positions
        own = view.positions[len(view.positions) - chunk.n :]
        rows.append(np.where(position[None, :] <= own[:, None], np.float32(0), np.float32(-np.inf)))
    return np.concatenate(rows)


def masked(q: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
    """Score every token against all cells of the span, used or not, and mask afterwards."""
    n, span = mask.shape
    grouped, shape = _by_kv_head(q, keys.shape[0])
    scores = grouped @ keys[:, :span].transpose(0, 2, 1)
    scores.reshape(keys.shape[0], n, -1, span)[...] += mask[None, :, None, :]
    return _ungroup(_softmax(scores) @ values[:, :span], shape)


def gather(q: Floats, keys: Floats, values: Floats, chunks: Sequence[Chunk], views: Sequence[View]) -> Floats:
    """For each chunk, copy its sequence's cells together and score against those alone."""
    out = np.empty_like(q)
    at = 0
    for chunk, view in zip(chunks, views, strict=True):
        own = slice(at, at + chunk.n)
        grouped, shape = _by_kv_head(q[own], keys.shape[0])
        scores = grouped @ keys[:, view.cells].transpose(0, 2, 1)
        if chunk.n > 1:
            hidden = view.positions[None, :] > view.positions[len(view.positions) - chunk.n :, None]
            by_token = scores.reshape(keys.shape[0], chunk.n, -1, len(view.cells))
            by_token[...] += np.where(hidden, np.float32(-np.inf), np.float32(0))[None, :, None, :]
        out[own] = _ungroup(_softmax(scores) @ values[:, view.cells], shape)
        at += chunk.n
    return out


def _by_kv_head(q: Floats, n_kv: int) -> tuple[Floats, tuple[int, int, int]]:
    """Queries scaled and laid out (n_kv_heads, n_tokens * heads per kv head, d_head)."""
    n, heads, d = q.shape
    grouped = (q * np.float32(1 / np.sqrt(d))).reshape(n, n_kv, heads // n_kv, d)
    return grouped.transpose(1, 0, 2, 3).reshape(n_kv, -1, d), (n, heads, d)


def _ungroup(out: Floats, shape: tuple[int, int, int]) -> Floats:
    n, heads, d = shape
    return out.reshape(out.shape[0], n, -1, d).transpose(1, 0, 2, 3).reshape(n, heads, d)


def _softmax(scores: Floats) -> Floats:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
