"""Copies of whole sequences between cells and the host tier, as runs, and what is known of them there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from policies.vocabulary import Cells, Chunk, HostRuns, IntArray

State = TypeVar("State")


class HostStates(Generic[State]):
    """What is known of the sequences that were copied to host cells, until others are copied over them."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        """By number."""
        self._kept = 0
        # Runs of host cells that something was copied to, ascending: first cells, ends, and numbers of states.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        """Number of states."""
        return len(self._states)

    def keep(self, host: Cells, state: State) -> None:
        """Keep a state that is copied to the host cells, of which there is one at least; forget those that any of them
        belong to."""
        self._kept += 1
        for start, end in _runs(host):
            first, stop = bisect_right(self._ends, start), bisect_left(self._starts, end)
            for number in self._numbers[first:stop]:
                self._states.pop(number, None)
            self._starts[first:stop], self._ends[first:stop] = [start], [end]
            self._numbers[first:stop] = [self._kept]
        self._states[self._kept] = state

    def at(self, host: Cells) -> State:
        """The state that was copied to these host cells last."""
        return self._states[self._numbers[bisect_right(self._starts, int(host[0])) - 1]]


def _runs(cells: Cells) -> list[tuple[int, int]]:
    """Cells as runs: first cell and end of each."""
    if isinstance(cells, range):
        return [(cells.start, cells.stop)]
    bounds = [0, *((cells[1:] - cells[:-1] != 1).nonzero()[0] + 1).tolist(), len(cells)]
    return [(int(cells[first]), int(cells[stop - 1]) + 1) for first, stop in pairwise(bounds)]


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
    """Where the tokens of a sequence lay in a group when it was copied out; both arrays of shape (n,)."""

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
