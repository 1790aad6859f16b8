"""Copies of whole sequences between cells and the host tier, as runs, and what is known of them there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.vocabulary import Cells, Chunk, HostRuns, IntArray


def host_cells(host: Cells, positions: IntArray) -> Cells:
    """The host cells of these positions, which ascend; ``host`` has one for each position from 0 on."""
    if len(positions) and int(positions[-1]) - int(positions[0]) == len(positions) - 1:
        return host[int(positions[0]) : int(positions[-1]) + 1]
    return host_cells_at(host, positions)


def host_cells_at(host: Cells, positions: IntArray) -> IntArray:
    """``host_cells`` of positions in any order; the same shape."""
    return host.start + positions if isinstance(host, range) else host[positions]


def transfers_of(cells: IntArray, host: Cells, *, to_host: bool) -> HostRuns:
    """Copies between ``cells`` and ``host``, cell by cell, both of shape (n,), as the fewest runs that rise in both."""
    if len(cells) == 0:
        return HostRuns(to_host, cells, cells, cells)
    follows = cells[1:] - cells[:-1] == 1
    if not isinstance(host, range):
        follows &= host[1:] - host[:-1] == 1
    breaks = (~follows).nonzero()[0]
    bounds = np.empty(len(breaks) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(cells)
    bounds[1:-1] = breaks
    bounds[1:-1] += 1
    firsts = bounds[:-1]
    return HostRuns(to_host, cells[firsts], host_cells_at(host, firsts), bounds[1:] - firsts)


class SavedPlaces(NamedTuple):
    """Where the tokens of a sequence lay in a group when it was exported; both arrays of shape (n,)."""

    cells: IntArray
    positions: IntArray

    def by_cell(self) -> IntArray:
        """The positions in the order of their cells."""
        found: IntArray = self.positions[np.argsort(self.cells, kind="stable")]
        return found


def chunks_of(seq: int, positions: IntArray) -> tuple[Chunk, ...]:
    """The tokens of a sequence at ``positions``, in that order, as the fewest chunks."""
    firsts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(positions))
    return tuple(Chunk(seq, start, n) for start, n in zip(positions[firsts].tolist(), lengths.tolist(), strict=True))
