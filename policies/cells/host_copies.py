"""Copies of whole sequences between cells and the host tier, as runs, and what is known of them there."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from policies.vocabulary import Chunk, HostRuns, IntArray

State = TypeVar("State")


class HostStates(Generic[State]):
    """What is known of the sequences that were copied to host cells, until others are copied over them."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._owner: IntArray = np.zeros(0, dtype=np.int64)
        """For each host cell the number of the state that lies there; 0 if none ever did."""
        self._kept = 0

    def __len__(self) -> int:
        """Number of states."""
        return len(self._states)

    def keep(self, host: IntArray, state: State) -> None:
        """Keep a state that is copied to ``host``, shape (n,); forget those any of whose cells are among them."""
        missing = int(host.max()) + 1 - len(self._owner)
        if missing > 0:
            self._owner = np.concatenate((self._owner, np.zeros(missing + len(self._owner), dtype=np.int64)))
        self._kept += 1
        breaks = (host[1:] - host[:-1] != 1).nonzero()[0].tolist()  # Mostly none.
        for first, last in zip([0, *(at + 1 for at in breaks)], [*breaks, len(host) - 1], strict=True):
            owner = self._owner[host[first] : host[last] + 1]
            for gone in {int(owner[0]), *owner[1:][owner[1:] != owner[:-1]].tolist()}:
                self._states.pop(gone, None)
            owner[:] = self._kept
        self._states[self._kept] = state

    def at(self, host: IntArray) -> State:
        """The state that was copied to ``host`` last."""
        return self._states[int(self._owner[host[0]])]


def transfers_of(cells: IntArray, host: IntArray, *, to_host: bool) -> HostRuns:
    """Copies between ``cells`` and ``host``, cell by cell, both of shape (n,), as the fewest runs that rise in both."""
    if len(cells) == 0:
        return HostRuns(to_host, cells, host, cells)
    breaks = ((cells[1:] - cells[:-1] != 1) | (host[1:] - host[:-1] != 1)).nonzero()[0]
    bounds = np.empty(len(breaks) + 2, dtype=np.int64)
    bounds[0], bounds[-1] = 0, len(cells)
    bounds[1:-1] = breaks
    bounds[1:-1] += 1
    firsts = bounds[:-1]
    return HostRuns(to_host, cells[firsts], host[firsts], bounds[1:] - firsts)


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
