"""What each attention kernel reads, given where the cells lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.vocabulary import Chunk, IntArray, Reads


def padded_span(top: int, pad: int, size: int) -> int:
    """llama.cpp's ``n_kv``: one past the highest used cell, rounded up to ``pad``, at most ``size``."""
    return min(size, max(pad, -(-top // pad) * pad))


def masked_reads(chunks: Sequence[Chunk], span: int) -> Reads:
    """Every token is scored against all ``span`` cells, used or not."""
    tokens, useful = _tokens_and_ends(chunks)
    n = len(chunks)
    return Reads(tokens, np.full(n, span, dtype=np.int64), useful, np.ones(n, dtype=np.int64), span)


def gather_reads(chunks: Sequence[Chunk], runs: IntArray) -> Reads:
    """Every token is scored against its own sequence's cells, which lie in ``runs`` pieces; shape (n_chunks,)."""
    tokens, useful = _tokens_and_ends(chunks)
    return Reads(tokens, useful, useful, runs, int(useful.sum()))


def _tokens_and_ends(chunks: Sequence[Chunk]) -> tuple[IntArray, IntArray]:
    table = np.array(chunks, dtype=np.int64)
    return table[:, 2], table[:, 1] + table[:, 2]
