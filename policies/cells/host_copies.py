"""Copies of whole sequences between cells and the host tier, as runs."""

from __future__ import annotations

import numpy as np

from policies.vocabulary import Chunk, IntArray, Transfer


def transfers_of(cells: IntArray, host: IntArray, *, to_host: bool) -> tuple[Transfer, ...]:
    """Copies between ``cells`` and ``host``, cell by cell, both of shape (n,), as the fewest runs that rise in both."""
    if len(cells) == 0:
        return ()
    breaks = np.flatnonzero((np.diff(cells) != 1) | (np.diff(host) != 1)) + 1
    firsts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((firsts, [len(cells)])))
    return tuple(
        Transfer(to_host, cell, at, n)
        for cell, at, n in zip(cells[firsts].tolist(), host[firsts].tolist(), lengths.tolist(), strict=True)
    )


def chunks_of(seq: int, positions: IntArray) -> tuple[Chunk, ...]:
    """The tokens of a sequence at ``positions``, in that order, as the fewest chunks."""
    firsts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(positions))
    return tuple(Chunk(seq, start, n) for start, n in zip(positions[firsts].tolist(), lengths.tolist(), strict=True))
