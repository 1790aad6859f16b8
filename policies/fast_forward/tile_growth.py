"""Tiles that sequences hold which grow by a cell in every step: all together, from the count of steps alone."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from policies.cells.reads import TILE
from policies.vocabulary import IntArray


class TileGrowth:
    """The tiles of some sequences in one cache group after any number of steps.

    A sequence that grows has ``(steps + phase) // TILE`` tiles, the others always as many.
    """

    __slots__ = ("_fixed", "_growing", "_phases", "_whole", "runs")

    def __init__(self) -> None:
        self._fixed = 0
        """Tiles of sequences that do not grow."""
        self._growing = 0
        """Sequences that grow."""
        self._whole = 0
        """Whole tiles in their phases."""
        self._phases = [0] * TILE
        """How many of them have each remainder of a phase."""
        self.runs = 0
        """Contiguous pieces that the tiles form."""

    def add(self, phase: int | None, tiles: int, runs: int, times: int = 1) -> None:
        """Count a sequence in, or out again with ``times`` -1; ``phase`` None: it always has that many ``tiles``."""
        self.runs += times * runs
        if phase is None:
            self._fixed += times * tiles
        else:
            whole, rest = divmod(phase, TILE)
            self._growing += times
            self._whole += times * whole
            self._phases[rest] += times

    def copy(self) -> TileGrowth:
        """Copy it, so that the copy can be changed by itself."""
        other = TileGrowth()
        other._fixed, other._growing, other._whole = self._fixed, self._growing, self._whole
        other._phases, other.runs = self._phases.copy(), self.runs
        return other

    def after(self, steps: int) -> int:
        """Tiles after that many steps in all."""
        whole, rest = divmod(steps, TILE)
        entered = sum(self._phases[TILE - rest :]) if rest else 0
        return self._fixed + self._whole + self._growing * whole + entered

    def forecast(self, steps: int) -> TileForecast:
        """The steps that follow after ``steps`` steps in all."""
        rest, phases = steps % TILE, self._phases
        # In the j-th step from now on, those enter a tile whose phase has the remainder -(steps + j).
        turned = phases[TILE - 1 - rest :: -1] + phases[: TILE - 1 - rest : -1]
        entered = list(accumulate(turned, initial=0))
        return TileForecast(self.after(steps), self._growing, entered, self.runs)


class TileForecast:
    """Tiles in several steps from the next one on; all sums are exact."""

    __slots__ = ("_entered", "_growing", "_now", "_sums", "runs")

    def __init__(self, now: int, growing: int, entered: list[int], runs: int):
        """``entered``: tiles that ``growing`` sequences enter in the first 0 to ``TILE`` steps."""
        self._now = now
        self._growing = growing
        self._entered = entered
        self._sums = list(accumulate(entered))
        self.runs = runs
        """Contiguous pieces that the tiles form in each step."""

    def total(self, n: int) -> int:
        """Tiles in the first ``n`` steps, summed up."""
        rounds, rest = divmod(n, TILE)
        found = n * self._now + rounds * self._sums[TILE] + self._sums[rest]
        return found + self._growing * rounds * (TILE * (rounds - 1) // 2 + rest)

    def each(self, n: int) -> IntArray:
        """Tiles in each of the first ``n`` steps; shape (n,)."""
        steps = np.arange(1, n + 1)
        tiles: IntArray = np.array(self._entered)[steps % TILE]
        tiles += self._now + self._growing * (steps // TILE)
        return tiles
