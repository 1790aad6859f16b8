"""Triggers: when to compact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.vocabulary import IntArray, Moves, RelativeCosts


class Facts(NamedTuple):
    """What a trigger may look at: counts of cells and tokens, never a clock."""

    used: int
    """Cells that hold a token."""
    top: int
    """One past the highest of them."""
    span: int
    """``top`` rounded up to the kernel's padding: what attention over all cells reads."""
    pad: int
    tokens: int
    """Tokens of the step."""
    above: Callable[[], int]
    """Used cells at or above the ``used``-th: the fewest that any compaction must move. Counted only for those who
    ask."""


@dataclass(frozen=True, slots=True)
class TriggerForecast:
    """What a trigger would be asked with along some steps if it says no to all: ``Facts``, each count an array of shape
    (steps + 1,): before any step, and after each."""

    used: IntArray
    top: IntArray
    span: IntArray
    pad: int
    tokens: int
    above: Callable[[], IntArray]
    """Counted only for those who ask."""

    def facts(self) -> list[Facts]:
        """One by one."""
        rows = zip(*(column.tolist() for column in (self.used, self.top, self.span, self.above())), strict=True)
        return [Facts(used, top, span, self.pad, self.tokens, partial(int, above)) for used, top, span, above in rows]


class _Asked(Exception):
    """The trigger wants to see a plan: what follows is a decision."""


class Trigger:
    """Never. The other triggers override what they need."""

    on_failure = False
    """Compact when a step finds no room, and try once more before giving up."""
    when_idle = False
    """Compact while the server has nothing to do, a slice at a time."""
    learns = True
    """Whether what it says may depend on what it was asked before."""

    def before(self, facts: Facts, plan: Callable[[], Moves]) -> bool:
        """Whether to compact before this step. ``plan`` tells which moves that would take."""
        return False

    def after(self, facts: Facts) -> bool:
        """Whether to compact before the next step, asked when a step has been placed."""
        return False

    @property
    def asks(self) -> bool:
        """Whether it wants to be asked before and after steps at all."""
        return type(self).before is not Trigger.before or type(self).after is not Trigger.after

    def calm(self, facts: Facts, holes: int, steps: int) -> bool:
        """Whether it is certain, without a look at each, that it says no to so many steps and learns nothing but how
        many they were. In ``facts`` is the least that is used and above, and the largest span on the way; ``holes``:
        the most padded cells that packing would save. May say no where a closer look says yes. Changes nothing."""
        return not self.asks

    def pass_calmly(self, steps: int) -> None:
        """So many steps were taken of which ``calm`` was certain."""

    def quiet(self, forecast: TriggerForecast, steps: int) -> int:
        """For how many of at most so many steps it would say no, before each and after it, without asking for a plan.
        Changes nothing."""
        return copy.copy(self)._ask(forecast, steps) if self.asks else steps

    def pass_by(self, forecast: TriggerForecast, steps: int) -> None:
        """So many steps were taken in which it stays quiet: learn what it would have learned."""
        if self.asks:
            self._ask(forecast, steps)

    def _ask(self, forecast: TriggerForecast, steps: int) -> int:
        """Ask before and after each step until it does not say no."""

        def plan() -> Moves:
            raise _Asked

        facts = forecast.facts()
        for i in range(steps):
            try:
                if self.before(facts[i], plan) or self.after(facts[i + 1]):
                    return i
            except _Asked:
                return i
        return steps


class OnFailure(Trigger):
    """Only when a step finds no room (llama.cpp b5589 to b6244: ``init_batch`` tries once more)."""

    on_failure = True


class Idle(Trigger):
    """Only while no request waits or runs; an arrival cuts it short between two slices."""

    when_idle = True


_DOUBT = 1e-5
"""Ratios from 0 to 1 that differ by more do so in single precision too."""

Formula = Literal["b2278", "b2422", "b4875", "b6170"]
"""llama.cpp's measures of fragmentation, by the build that they are taken from."""


@dataclass(frozen=True, slots=True)
class Threshold(Trigger):
    """When the fragmentation ratio exceeds ``threshold`` (``defrag_thold``), by one of llama.cpp's formulas.

    ``b4875`` (b4666 to b4880) asks after a step and compacts before the next; ``b6170`` (b5589 to b6244) asks
    before a step, without padding the span. Both leave caches alone that reach below 2,048 cells; the older
    ``b2422`` does so for none, and ``b2278`` below 128. In single precision, as the original.
    """

    threshold: float
    formula: Formula = "b2422"
    on_failure: bool = False
    learns = False

    def before(self, facts: Facts, plan: Callable[[], Moves]) -> bool:
        """Asked by ``b6170`` only."""
        if self.formula != "b6170":
            return False
        return facts.top >= 2048 and self._exceeds(facts.used + facts.pad, facts.top)

    def after(self, facts: Facts) -> bool:
        """Asked by all others."""
        if self.formula == "b4875":
            return facts.span >= 2048 and self._exceeds(facts.used + facts.pad, facts.span)
        if self.formula == "b2422":
            return self._exceeds(facts.used, facts.span)
        if self.formula == "b2278":
            return facts.span >= 128 and self._exceeds(facts.used + facts.tokens, facts.span)
        return False

    def calm(self, facts: Facts, holes: int, steps: int) -> bool:
        """By the fewest that are used and the longest span, where these leave no doubt."""
        if self.threshold <= 0 or facts.span == 0:
            return True
        filled = facts.used + {"b2422": 0, "b2278": facts.tokens}.get(self.formula, facts.pad)
        if 1 - filled / facts.span < self.threshold - _DOUBT:
            return True
        # Or by the most that is not used: less than a padding beyond the holes, of at least what is used now.
        return facts.used > 0 and (holes + facts.pad + facts.used - filled) / facts.used < self.threshold - _DOUBT

    def quiet(self, forecast: TriggerForecast, steps: int) -> int:
        """By the formula, over all steps at once."""
        before, after = slice(0, steps), slice(1, steps + 1)
        if self.formula == "b6170":
            due = (forecast.top[before] >= 2048) & self._exceed(
                forecast.used[before] + forecast.pad, forecast.top[before]
            )
        elif self.formula == "b4875":
            due = (forecast.span[after] >= 2048) & self._exceed(
                forecast.used[after] + forecast.pad, forecast.span[after]
            )
        elif self.formula == "b2422":
            due = self._exceed(forecast.used[after], forecast.span[after])
        else:
            due = (forecast.span[after] >= 128) & self._exceed(
                forecast.used[after] + forecast.tokens, forecast.span[after]
            )
        return _first(due)

    def pass_by(self, forecast: TriggerForecast, steps: int) -> None:
        """Nothing is learned."""

    def _exceeds(self, filled: int, span: int) -> bool:
        if self.threshold <= 0 or span == 0:
            return False
        beyond = 1 - filled / span - self.threshold
        if abs(beyond) > _DOUBT and filled <= span:
            return beyond > 0
        ratio = max(np.float32(0), np.float32(1) - np.float32(filled) / np.float32(span))
        return bool(ratio > np.float32(self.threshold))

    def _exceed(self, filled: IntArray, span: IntArray) -> NDArray[np.bool_]:
        """``_exceeds`` of each."""
        if self.threshold <= 0:
            return np.zeros(len(span), dtype=np.bool_)
        # A span of 0 has nothing filled: 1 - 0 / 1 would exceed, so it is taken as full.
        whole = np.maximum(span, 1).astype(np.float32)
        ratio = np.float32(1) - np.where(span == 0, 1, filled).astype(np.float32) / whole
        due: NDArray[np.bool_] = np.maximum(ratio, np.float32(0)) > np.float32(self.threshold)
        return due


def _first(due: NDArray[np.bool_]) -> int:
    """How many come before the first that is due; all, if none is."""
    at = int(due.argmax()) if len(due) else 0
    return at if len(due) and due[at] else len(due)


_ASK_AGAIN = 32


@dataclass(slots=True)
class Adaptive(Trigger):
    """When the attention that compaction would save, over a horizon learned on the way, costs more than the moves.

    The saving of one step is (its tokens) x (cells above the packed span) x (cost of a score). How many steps it
    lasts is not known ahead: holes come back as sequences end. So the trigger learns it: after a compaction it
    counts the steps until the holes have come back to what they were when it compacted, and keeps an
    exponentially weighted mean of these counts, the horizon H. Holes grow back about evenly, so half of them are
    missing on average over those steps, and compacting saves H / 2 steps' worth. It is due when

        tokens x holes x score x H / 2  >  run x runs + cell x cells

    with runs and cells counted on the actual plan. It is planned only where the fewest cells that any plan must move
    do not already cost more; a plan that was too dear is not made again for 32 steps unless the saving exceeds it. A
    step that finds no room always compacts.
    """

    costs: RelativeCosts
    horizon: float = 64.0
    """Steps; the first guess, then what has been learned."""
    weight: float = 0.2
    """Of the newest observation."""
    on_failure: bool = field(default=True, init=False)
    when_idle: bool = field(default=False, init=False)
    _steps: int = field(default=0, init=False)
    _target: int = field(default=0, init=False)
    """Holes at the last compaction; 0 while none is being observed."""
    _refused: float = field(default=0.0, init=False)
    """What the last plan would have cost, if it was too dear."""
    _since: int = field(default=0, init=False)
    """Steps since then."""

    def before(self, facts: Facts, plan: Callable[[], Moves]) -> bool:
        """Weigh the saving against the cost of the plan; plans only where moving one run could pay."""
        holes = facts.span - min(facts.span, -(-facts.used // facts.pad) * facts.pad)
        self._learn(holes)
        saving = facts.tokens * holes * self.costs.score * self.horizon / 2
        self._since += 1
        if saving <= self.costs.run or (saving <= self._refused and self._since < _ASK_AGAIN):
            return False
        if saving <= self.costs.run + self.costs.cell * facts.above():
            return False
        moves = plan()
        cost = self.costs.run * moves.n_runs + self.costs.cell * moves.n_cells
        if moves.n_runs == 0 or saving <= cost:
            self._refused, self._since = cost, 0
            return False
        self._steps, self._target, self._refused = 0, holes, 0.0
        return True

    def calm(self, facts: Facts, holes: int, steps: int) -> bool:
        """By the most holes that there can be on the way, and the horizon as it is."""
        if self._target and (holes >= self._target or self._steps + steps >= 8 * self.horizon):
            return False
        saving = facts.tokens * holes * self.costs.score * self.horizon / 2
        if saving <= self.costs.run or (saving <= self._refused and self._since + steps < _ASK_AGAIN):
            return True
        return saving <= self.costs.run + self.costs.cell * facts.above()

    def pass_calmly(self, steps: int) -> None:
        """Count them."""
        self._since += steps
        if self._target:
            self._steps += steps

    def quiet(self, forecast: TriggerForecast, steps: int) -> int:
        """As ``before``, step for step: what it learns on the way it learns once."""
        holes = self._holes(forecast)[:steps]
        horizons = np.full(steps, self.horizon)
        known = self._learned_at(holes)
        if known < steps:
            horizons[known:] = self._learned(known)
        saving = forecast.tokens * holes * self.costs.score * horizons / 2
        worth = saving > self.costs.run
        if not worth.any():
            return steps
        again = self._since + np.arange(1, steps + 1) >= _ASK_AGAIN
        worth &= saving > self.costs.run + self.costs.cell * forecast.above()[:steps]
        return _first(worth & ((saving > self._refused) | again))

    def pass_by(self, forecast: TriggerForecast, steps: int) -> None:
        """Count the steps, and learn where that is due."""
        self._since += steps
        if self._target:
            known = self._learned_at(self._holes(forecast)[:steps])
            if known < steps:
                self.horizon = self._learned(known)
                self._target = 0
            self._steps += min(known + 1, steps)

    def _holes(self, forecast: TriggerForecast) -> IntArray:
        """Before any step, and after each."""
        return forecast.span - np.minimum(forecast.span, -(-forecast.used // forecast.pad) * forecast.pad)

    def _learned_at(self, holes: IntArray) -> int:
        """In which of some steps the observation ends; as many as there are if it does not, or there is none."""
        if self._target == 0:
            return len(holes)
        seen = self._steps + np.arange(1, len(holes) + 1)
        return _first((holes >= self._target) | (seen >= 8 * self.horizon))

    def _learned(self, step: int) -> float:
        """The horizon, once the observation has ended in that step."""
        return self.horizon + self.weight * (self._steps + step + 1 - self.horizon)

    def _learn(self, holes: int) -> None:
        if self._target == 0:
            return
        self._steps += 1
        # Holes that never come back: the observation grows until it is learned as a long horizon.
        if holes >= self._target or self._steps >= 8 * self.horizon:
            self.horizon += self.weight * (self._steps - self.horizon)
            self._target = 0
