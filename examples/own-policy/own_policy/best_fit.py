"""The policy: each chunk of a step takes the smallest free extent that holds it."""

from collections.abc import Sequence

import numpy as np

from own_policy.extents import FreeExtents
from policies.api import (
    CacheConfig,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    OutOfCells,
    Place,
    Policy,
    Unsupported,
    Usage,
    View,
    reads_of,
    split_batch,
)


class BestFit(Policy):
    """Each chunk in the smallest free extent that holds it; a table for each sequence says where its tokens are."""

    name = "best-fit"
    contiguous = True

    def __init__(self, config: CacheConfig):
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or "gather"
        self._n_ubatch = config.n_ubatch
        self._free = FreeExtents(config.cells)
        self._cells: dict[int, IntArray] = {}
        """Each sequence's cells, in order of position."""

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Take cells for all chunks first, and give them back if one finds no room, so that nothing has changed."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells")
        batches = split_batch(step, self._n_ubatch)
        found: list[IntArray] = []
        for chunk in (chunk for chunks in batches for chunk in chunks):
            first = self._free.take(chunk.n)
            if first is None:
                free = sum(self._free.lengths)
                for cells in found:
                    self._release(cells)
                raise OutOfCells(f"no free extent of {chunk.n} cells; {free} of {self.capacity} are free")
            found.append(np.arange(first, first + chunk.n))
        places = iter(found)
        return tuple(self._place(chunks, [next(places) for _ in chunks], views) for chunks in batches)

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Free a sequence, or its end."""
        held = self._cells.get(seq)
        if held is None or start >= len(held) or (stop is not None and stop <= start):
            return
        if stop is not None and stop < len(held):
            raise Unsupported(f"{self.name}: only the end of a sequence can be freed, not [{start}, {stop})")
        self._release(held[start:])
        self._cells[seq] = held[:start]
        if start == 0:
            del self._cells[seq]

    def can_truncate(self, seq: int, n: int) -> int:
        """Any number of a sequence's first tokens can be kept."""
        return n

    def usage(self) -> Usage:
        """Asked for at every step: from the extents, since to count the cells of a GPU's cache takes milliseconds."""
        lengths = self._free.lengths
        stored, largest = self.capacity - sum(lengths), max(lengths, default=0)
        return Usage(
            capacity=self.capacity,
            stored=stored,
            allocated=stored,
            placeable=largest,
            free_extents=len(lengths),
            largest_free_extent=largest,
            span=self._span,
        )

    def first_owners(self, group: int = 0) -> IntArray:
        """The sequence in each cell, for snapshots; without it they would ask for ``occupancy``, which is slow."""
        owners = np.full(self.capacity, -1)
        for seq, cells in self._cells.items():
            owners[cells] = seq
        return owners

    def occupancy(self, group: int = 0) -> CellMap:
        """The cells of all tables."""
        position = np.full(self.capacity, -1)
        owners: list[frozenset[int]] = [frozenset()] * self.capacity
        for seq, cells in self._cells.items():
            position[cells] = np.arange(len(cells))
            for cell in cells.tolist():
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))

    def sequences(self) -> list[int]:
        """Those that have a table."""
        return sorted(self._cells)

    def _place(self, chunks: tuple[Chunk, ...], found: list[IntArray], views: bool) -> MicroBatch:
        for chunk, cells in zip(chunks, found, strict=True):
            self._cells[chunk.seq] = np.append(self._cells.get(chunk.seq, cells[:0]), cells)
        reads = reads_of(self.kernel, chunks, self._cells.__getitem__, self._span)
        tables = [self._cells[chunk.seq] for chunk in chunks]
        seen = tuple(View(cells, np.arange(len(cells))) for cells in tables) if views else ()
        return MicroBatch(chunks, (Place(np.concatenate(found), reads, views=seen),))

    @property
    def _span(self) -> int:
        """Cells up to the highest used one."""
        free = self._free
        return free.firsts[-1] if free.ends[-1:] == [self.capacity] else self.capacity

    def _release(self, cells: IntArray) -> None:
        """Give cells back, run by run."""
        for run in np.split(cells, np.flatnonzero(np.diff(cells) != 1) + 1):
            self._free.release(int(run[0]), len(run))
