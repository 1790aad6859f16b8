"""What sequences with a stream each read in lockstep, in one or several passes: it follows from the steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import numpy as np

from policies.cells.reads import TILE
from policies.fast_forward.lockstep import PassReads
from policies.fast_forward.stream_growth import ENDLESS, StreamMember
from policies.fast_forward.tile_growth import TileForecast
from policies.vocabulary import IntArray


class StreamGroupForecast:
    """What some members read in one cache group in several steps from the next one on; all sums are exact."""

    __slots__ = ("_group", "_members", "_steps", "_tiles", "_window")

    def __init__(
        self, tiles: TileForecast, steps: int, group: int, members: Sequence[StreamMember], window: int | None
    ):
        """``steps``: those taken before."""
        self._tiles = tiles
        self._steps = steps
        self._group = group
        self._members = members
        self._window = window

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        return TILE * self._tiles.total(n)

    def total_useful(self, n: int) -> int:
        """Scores in the first ``n`` steps against a cell that the token's sequence can see."""
        if self._window is None:
            members = self._members
            return n * sum([member.length for member in members]) + len(members) * (n * (n + 1) // 2)
        total = 0
        for held, most in self._held():
            growing = min(n, most - held)
            total += growing * held + growing * (growing + 1) // 2 + (n - growing) * most
        return total

    def total_span(self, n: int) -> int:
        """All scores: each sequence reads its own cells."""
        return self.total_scanned(n)

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        return n * self._tiles.runs

    def each_scanned(self, n: int) -> IntArray:
        """Scores computed in each of the first ``n`` steps; shape (n,)."""
        return TILE * self._tiles.each(n)

    def each_useful(self, n: int) -> IntArray:
        """Scores in each of them against a cell that the token's sequence can see; shape (n,)."""
        useful = np.zeros(n, dtype=np.int64)
        for held, most in self._held():
            useful += np.minimum(np.arange(held + 1, held + n + 1), most)
        return useful

    def each_span(self, n: int) -> IntArray:
        """All scores; shape (n,)."""
        return self.each_scanned(n)

    def each_runs(self, n: int) -> IntArray:
        """Contiguous pieces read in each of them; shape (n,)."""
        return np.full(n, self._tiles.runs)

    def _held(self) -> list[tuple[int, int]]:
        """What each member holds before the first step, and the most that one of its tokens can see."""
        found = []
        for member in self._members:
            growth = member.groups[self._group]
            held = growth.held_after(self._steps - member.since)
            most = ENDLESS if self._window is None else self._window
            found.append((min(held, most), most))
        return found


class StreamForecast:
    """What members read in several steps, in several passes; its sums are those of the first cache group."""

    __slots__ = ("_groups", "_passes", "_reads_of", "_sizes", "steps")

    region_copies: ClassVar[Sequence[tuple[int, int]]] = ()

    def __init__(
        self,
        reads_of: Callable[[Sequence[int]], Sequence[StreamGroupForecast]],
        steps: int,
        passes: Sequence[Sequence[int]],
        groups: Sequence[StreamGroupForecast],
    ):
        """``reads_of``: what some members read. ``passes``: the members in each. ``groups``: what all read together."""
        self.steps = steps
        """Steps that can be taken before something must be decided."""
        self._reads_of = reads_of
        self._passes = passes
        self._sizes = [len(each) for each in passes]
        self._groups = groups

    def pass_sizes(self, members: int) -> Sequence[int]:
        """How many members each pass has."""
        return self._sizes

    def passes(
        self, members: int, alike: Callable[[int], Hashable]
    ) -> Sequence[tuple[Sequence[int], Sequence[PassReads]]]:
        """Group passes for whose sizes ``alike`` gives the same value."""
        kinds = {size: alike(size) for size in set(self._sizes)}
        if len(set(kinds.values())) == 1:
            return ((self._sizes, self._groups),)
        together: dict[Hashable, list[Sequence[int]]] = {}
        for seqs in self._passes:
            together.setdefault(kinds[len(seqs)], []).append(seqs)
        return [
            ([len(seqs) for seqs in passes], self._reads_of([seq for seqs in passes for seq in seqs]))
            for passes in together.values()
        ]

    def total_scanned(self, n: int) -> int:
        """Scores computed in the first ``n`` steps."""
        return self._groups[0].total_scanned(n)

    def total_useful(self, n: int) -> int:
        """Scores in the first ``n`` steps against a cell that the token's sequence can see."""
        return self._groups[0].total_useful(n)

    def total_span(self, n: int) -> int:
        """All scores: each sequence reads its own cells."""
        return self._groups[0].total_span(n)

    def total_runs(self, n: int) -> int:
        """Contiguous pieces read in the first ``n`` steps."""
        return self._groups[0].total_runs(n)
