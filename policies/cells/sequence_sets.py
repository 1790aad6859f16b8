"""Interned sets of sequences: a cell stores the index of the set of sequences that see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from policies.vocabulary import IntArray


class SetBounds:
    """For each set, by its index, bounds of its cells."""

    __slots__ = ("high", "low", "size")

    def __init__(self, size: int):
        self.size = size
        self.low: list[int] = []
        """No cell of the set is below this one."""
        self.high: list[int] = []
        """All cells of the set are below this one; it has none where this is not above ``low``."""

    def reset(self) -> None:
        """Forget all sets."""
        self.low.clear()
        self.high.clear()

    def add_set(self) -> None:
        """Add the next set, which has no cells yet."""
        self.low.append(self.size)
        self.high.append(0)

    def may_have_cells(self, index: int) -> bool:
        """Whether a set may have cells: certain if False."""
        return self.low[index] < self.high[index]

    def set_empty(self, index: int) -> None:
        """Note that a set has no cells any more."""
        self.low[index], self.high[index] = self.size, 0

    def widen(self, index: int, low: int, high: int) -> None:
        """Note that a set may have cells in ``[low, high)`` too."""
        if low < self.low[index]:
            self.low[index] = low
        if high > self.high[index]:
            self.high[index] = high

    def widen_to_all_cells(self) -> None:
        """Note that any set that has cells may have them anywhere now."""
        for index in range(1, len(self.low)):
            if self.low[index] < self.high[index]:
                self.low[index], self.high[index] = 0, self.size


SetIndices = NDArray[np.int32]
"""Indices of sets of sequences; int32, since a cache of them is searched twice as fast as one of int64."""

_MANY_SETS = 4096
"""With more sets than these, the ones that no cell uses are dropped now and then."""


class SequenceSets:
    """Every set of sequences that a cell may have, stored once; index 0 is the empty set.

    Sets stay after the last cell that used them, so that "in no other set" is certain and "in another set" is not.
    """

    __slots__ = ("_index", "_members", "_with", "bounds", "singletons")

    def __init__(self, size: int):
        self.bounds = SetBounds(size)
        """Where the cells of each set may be, by its index."""
        self._members: list[frozenset[int]] = []
        self._index: dict[frozenset[int], int] = {}
        self.singletons: dict[int, int] = {}
        """Sequence to the index of the set that has no other member."""
        self._with: dict[int, list[int]] = {}
        """Sequence to the indices of all sets that it is in."""
        self.reset()

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: SupportsIndex) -> frozenset[int]:
        return self._members[index]

    def __iter__(self) -> Iterator[frozenset[int]]:
        return iter(self._members)

    def reset(self, sets: Sequence[frozenset[int]] = (frozenset(),)) -> None:
        """Start again with just these sets, the empty one first, each of which may have cells anywhere."""
        for table in (self._members, self._index, self.singletons, self._with):
            table.clear()
        bounds = self.bounds
        bounds.reset()
        for key in sets:
            bounds.widen(self.index_of(key), 0, bounds.size if key else 0)

    def index_of(self, seqs: Iterable[int]) -> int:
        """Index of a set of sequences, which is added if it is new."""
        key = frozenset(seqs)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._members)
            self._members.append(key)
            self.bounds.add_set()
            for seq in key:
                self._with.setdefault(seq, []).append(index)
            if len(key) == 1:
                self.singletons[min(key)] = index
        return index

    def indices_with(self, seq: int) -> Sequence[int]:
        """Indices of all sets that a sequence is in."""
        return self._with.get(seq, ())

    def shares_nothing(self, seq: int) -> bool:
        """Whether a sequence shares no cell: certain if True."""
        return self._with.get(seq, []) in ([], [self.singletons.get(seq)])

    def singletons_in_use(self) -> list[tuple[int, int]]:
        """Sequences that may have cells of their own, each with the index of its singleton."""
        may_have_cells = self.bounds.may_have_cells
        return [(seq, index) for seq, index in self.singletons.items() if may_have_cells(index)]

    def drop_unused(self, owner: SetIndices) -> None:
        """Drop the sets that no cell uses, if there are many sets, and renumber ``owner`` in place."""
        if len(self._members) > _MANY_SETS:
            present = np.union1d([0], owner)
            owner[:] = np.searchsorted(present, owner)
            self.reset([self._members[index] for index in present.tolist()])

    def smallest_members(self) -> IntArray:
        """Shape (len(self),): the smallest sequence of each set, -1 for the empty one."""
        return np.array([min(seqs, default=-1) for seqs in self._members], dtype=np.int64)
