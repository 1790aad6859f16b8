"""Copies of whole sequences between cells and the host tier, as runs."""

from __future__ import annotations

import numpy as np

from policies.vocabulary import Chunk, HostRuns, IntArray


def transfers_of(cells: IntArray, host: IntArray, *, to_host: bool) -> HostRuns:
    """Copies between ``cells`` and ``host``, cell by cell, both of shape (n,), as the fewest runs that rise in both."""
    if len(cells) == 0:
        return HostRuns(to_host, cells, host, cells)
    follows = (cells[1:] - cells[:-1] == 1) & (host[1:] - host[:-1] == 1)
    bounds = np.concatenate(([0], (~follows).nonzero()[0] + 1, [len(cells)]))
    firsts = bounds[:-1]
    return HostRuns(to_host, cells[firsts], host[firsts], bounds[1:] - firsts)


def chunks_of(seq: int, positions: IntArray) -> tuple[Chunk, ...]:
    """The tokens of a sequence at ``positions``, in that order, as the fewest chunks."""
    firsts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(positions))
    return tuple(Chunk(seq, start, n) for start, n in zip(positions[firsts].tolist(), lengths.tolist(), strict=True))
