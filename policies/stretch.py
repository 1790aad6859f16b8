"""The free run in which an arena's next search begins: decode steps go along it, cell after cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.arena import Arena
from policies.leap import MOST, Leap, Pass, Sums, Usages, rising
from policies.reads import padded_spans
from policies.search import start_of_search
from policies.triggers import Facts
from policies.vocabulary import Chunk


class Stretch:
    """What at most ``n`` steps in a row would take of it. Changes nothing until ``take``."""

    def __init__(self, arena: Arena, step: Sequence[Chunk], n: int, pad: int):
        self.arena = arena
        self.step = step
        self._pad = pad
        tokens, free = len(step), arena.free
        self.first = start_of_search(arena.head, arena.used, tokens)
        at = free.index_after(self.first)
        self._begin, self._end = (free.starts[at], free.ends[at]) if at < len(free) else (arena.size, arena.size)
        inside = self._begin <= self.first
        self.steps = min(n, MOST, (self._end - self.first) // tokens) if inside else 0
        """That find room in it, each with the cells behind those of the one before."""
        self._taken = tokens * np.arange(self.steps + 1)
        self._used = arena.used + self._taken
        self._tops = np.maximum(self.first + self._taken, arena.top)
        self._tops[0] = arena.top
        self.spans = padded_spans(self._tops, pad, arena.size)
        """What attention over all cells reads; shape (steps + 1,), the first before any step."""
        self._rest = [stop - start for i, (start, stop) in enumerate(free) if i != at]
        if self._begin < self.first:
            self._rest.append(self.first - self._begin)

    def facts(self) -> list[Facts]:
        """For triggers: now, and after each step."""
        filled = np.concatenate(([0], np.cumsum(self.arena.owner > 0)))
        below = filled[self._used] + np.clip(self._used - self.first, 0, self._taken)
        columns = (self._used, self._tops, self.spans, self._used - below)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Facts(used, top, span, self._pad, len(self.step), above) for used, top, span, above in rows]

    def take(self, k: int, *, anywhere: bool, look: bool) -> Usages | None:
        """Take ``k`` steps' cells; ``anywhere``: a sequence can be given free cells wherever they lie;
        ``look``: say how full the cache is after each."""
        arena, tokens = self.arena, len(self.step)
        arena.free.take(self.first, k * tokens)
        for i, chunk in enumerate(self.step):
            arena.put(self.first + i + tokens * np.arange(k), chunk.seqs, chunk.start)
        if not look:
            return None
        filled, left = self._used[1 : k + 1], self._end - self.first - self._taken[1 : k + 1]
        largest = np.maximum(left, max(self._rest, default=0))
        return Usages(
            stored=filled,
            allocated=filled,
            placeable=arena.size - filled if anywhere else largest,
            free_runs=len(self._rest) + (left > 0),
            largest_free_run=largest,
            span=self._tops[1 : k + 1],
            cached=np.zeros(k, dtype=np.int64),
        )

    def leap(self, steps: int, take: Callable[[int, bool], Usages | None]) -> Leap | None:
        """The first ``steps`` of them, under the kernel ``masked``; None where that is not worth it."""
        if steps < 2:
            return None
        tokens, span = len(self.step), self.spans[1 : steps + 1]
        useful = rising([chunk.start for chunk in self.step], steps).sum(axis=1)
        return Leap((Pass(tokens, (Sums(tokens * span, useful, np.full(steps, tokens), span, span),)),), take)
