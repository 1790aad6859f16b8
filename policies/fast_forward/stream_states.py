"""How full and how broken up the streams of the first cache group are while some sequences take a cell in each step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from policies.cells.stream_arenas import StreamArenas
from policies.fast_forward.forecast import Usages
from policies.vocabulary import Usage


class StreamStates:
    """Now, and after each of the next steps."""

    def __init__(self, streams: StreamArenas, growing: Mapping[int, tuple[int, int]]):
        """``growing``: by stream, the next of the free cells in a row that a sequence takes, as its arena has it, and
        how many it has taken since then."""
        size = streams.specs[0].size
        self._capacity = size * streams.n_streams
        self._growing = len(growing)
        self._used = self._extents = 0
        self._largest = self._room = self._top = 0
        """Among streams that do not grow; the largest extent also among those that others grow into."""
        self._largest_grown = self._room_grown = self._top_grown = 0
        """Among streams that grow, and the extents that they grow into."""
        self._ends: list[int] = []
        """Cells that are left of each of these extents."""
        for i, arena in enumerate(streams.arenas[0]):
            free = arena.free
            if i not in growing:
                if free.total == size:
                    self._extents += 1
                    self._largest = self._room = size
                    continue
                largest, top = free.largest, i * size + arena.top
                self._room = max(self._room, free.total)
            else:
                first, taken = growing[i]
                end = free.end_of_run(first)
                self._ends.append(end - first - taken)
                largest = free.largest_between(end, size, free.largest_between(0, first, 0))
                self._largest_grown = max(self._largest_grown, end - first - taken)
                self._room_grown = max(self._room_grown, free.total - taken)
                self._used += taken
                top = i * size + arena.top
                self._top_grown = max(self._top_grown, i * size + first + taken)
            self._used += arena.used
            self._extents += len(free)
            self._largest = max(self._largest, largest)
            self._top = max(self._top, top)

    def usage(self, *, contiguous: bool = False) -> Usage:
        """The state now; ``contiguous``: a micro-batch's cells in a stream must lie in a row."""
        largest = max(self._largest, self._largest_grown)
        placeable = largest if contiguous else max(self._room, self._room_grown)
        extents = self._extents - self._ends.count(0)
        top = max(self._top, self._top_grown)
        return Usage(self._capacity, self._used, self._used, placeable, extents, largest, top)

    def usages(self, n: int) -> Usages:
        """The states after each of the next ``n`` steps, in which all that grow go on; single cells can be taken."""
        steps = np.arange(1, n + 1)
        used = self._used + self._growing * steps
        extents = np.full(n, self._extents)
        extents[-1] -= self._ends.count(n)
        largest = np.maximum(self._largest, self._largest_grown - steps)
        room = np.maximum(self._room, self._room_grown - steps)
        top = np.maximum(self._top, self._top_grown + steps)
        return Usages(used, used, room, extents, largest, top, np.zeros(n, dtype=np.int64))
