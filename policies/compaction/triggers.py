"""Triggers: when to compact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.cells.arena import Arena
from policies.cells.reads import padded_span
from policies.compaction.compactors import min_cells_to_move
from policies.vocabulary import IntArray, Moves, RelativeCosts

Count = TypeVar("Count", int, IntArray)
Number = TypeVar("Number", float, np.float32, NDArray[np.float32])


class TriggerInput(NamedTuple):
    """What a trigger decides by: counts of cells and tokens, never a clock."""

    used: int
    """Cells that hold a token."""
    top: int
    """One past the highest used cell."""
    span: int
    """``top`` rounded up to the kernel's padding: what attention over all cells reads."""
    pad: int
    """The kernel's padding."""
    tokens: int
    """Tokens of the step."""
    min_cells_to_move: Callable[[], int]
    """The fewest cells that compaction must move; a function, since it takes time to count them."""

    @staticmethod
    def of(arena: Arena, pad: int, tokens: int) -> TriggerInput:
        """The present state of an arena, and a step of ``tokens`` tokens."""
        span = padded_span(arena.top, pad, arena.size)
        return TriggerInput(arena.used, arena.top, span, pad, tokens, partial(min_cells_to_move, arena))


@dataclass(frozen=True, slots=True)
class TriggerForecast:
    """``TriggerInput`` before the first of some steps and after each of them, if no compaction comes in between.

    Arrays of shape (steps + 1,).
    """

    used: IntArray
    top: IntArray
    span: IntArray
    pad: int
    tokens: int
    min_cells_to_move: Callable[[], IntArray]

    def inputs(self) -> list[TriggerInput]:
        """The forecast as steps + 1 inputs."""
        columns = (self.used, self.top, self.span, self.min_cells_to_move())
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            TriggerInput(used, top, span, self.pad, self.tokens, partial(int, least)) for used, top, span, least in rows
        ]


def cells_saved(used: Count, span: Count, pad: int) -> Count:
    """Cells that attention would no longer read if all used cells were packed; for counts or arrays of them."""
    saved = span - -(-used // pad) * pad
    return saved * (saved > 0)


class _PlanRequested(Exception):
    """The trigger asked for a plan while it was only questioned about the future."""


class Trigger:
    """Never compacts. Other triggers override what they need.

    A trigger that decides by step sets ``checks_steps`` and implements ``due_before_step`` or ``due_after_step``; the
    other methods are then right, but slow where they question it step by step.
    """

    on_failure = False
    """Compact when a step finds no room, and try once more before giving up."""
    when_idle = False
    """Compact while the server has nothing to do, a slice at a time."""
    checks_steps = False
    """Whether it is asked before and after each step."""
    stateful = True
    """Whether an answer may depend on what it was asked before."""

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Whether to compact before this step. ``plan`` returns the moves that would take."""
        return False

    def due_after_step(self, state: TriggerInput) -> bool:
        """Whether to compact before the next step, asked when a step has been placed."""
        return False

    def rules_out(self, bounds: TriggerInput, saved: int, steps: int) -> bool:
        """Whether it is certain that none of the next ``steps`` steps is due. A quick test that may miss some cases.

        ``bounds`` has the least number of used cells and of cells to move, and the largest top and span on the way;
        ``saved`` is the largest ``cells_saved`` on the way. Where this is True, the trigger must need to know nothing
        about the steps but their number (see ``skip``). Changes nothing.
        """
        return not self.checks_steps

    def skip(self, steps: int) -> None:
        """Note that ``steps`` steps were taken for which ``rules_out`` was True."""

    def steps_until_due(self, forecast: TriggerForecast, steps: int) -> int:
        """How many of the next ``steps`` steps can be taken before compaction is due or a plan is needed to tell.

        Changes nothing.
        """
        return copy.copy(self)._question(forecast, steps) if self.checks_steps else steps

    def advance(self, forecast: TriggerForecast, steps: int) -> None:
        """Note that ``steps`` steps of the forecast were taken, none of them due."""
        if self.checks_steps:
            self._question(forecast, steps)

    def _question(self, forecast: TriggerForecast, steps: int) -> int:
        """Ask before and after each step until compaction is due or a plan is needed; returns the steps before."""

        def plan() -> Moves:
            raise _PlanRequested

        states = forecast.inputs()
        for i in range(steps):
            try:
                if self.due_before_step(states[i], plan) or self.due_after_step(states[i + 1]):
                    return i
            except _PlanRequested:
                return i
        return steps


class OnFailure(Trigger):
    """Compacts only when a step finds no room (llama.cpp b5589 to b6244: ``init_batch`` tries once more)."""

    on_failure = True


class Idle(Trigger):
    """Compacts only while no request waits or runs; an arrival stops it between two slices."""

    when_idle = True


Formula = Literal["b2278", "b2422", "b4875", "b6170"]
"""llama.cpp's measures of fragmentation, by the build that they are taken from."""


class _Measure(NamedTuple):
    """How a build of llama.cpp measures fragmentation, and when."""

    before_step: bool
    """Before a step; otherwise after it, to compact before the next."""
    of_span: bool
    """Of the cells below the padded span; otherwise below the highest used one."""
    least: int
    """Where these are fewer cells, the cache is left alone."""
    counted_as_used: Literal["pad", "tokens"] | None
    """How many empty cells count as used: the padding, or the step's tokens."""


_MEASURES: dict[Formula, _Measure] = {
    "b2278": _Measure(before_step=False, of_span=True, least=128, counted_as_used="tokens"),
    "b2422": _Measure(before_step=False, of_span=True, least=1, counted_as_used=None),
    "b4875": _Measure(before_step=False, of_span=True, least=2048, counted_as_used="pad"),
    "b6170": _Measure(before_step=True, of_span=False, least=2048, counted_as_used="pad"),
}

_DOUBT = 1e-5
"""Ratios from 0 to 1 that differ by more do so in single precision too."""


def fragmentation(used: Number, cells: Number) -> Number:
    """llama.cpp's ratio: the share of ``cells`` cells that are not used, in the precision of the arguments."""
    return 1 - used / cells


@dataclass(frozen=True, slots=True)
class Threshold(Trigger):
    """Compacts when the fragmentation ratio exceeds ``threshold`` (``defrag_thold``), by one of llama.cpp's formulas.

    ``b4875`` (b4666 to b4880) asks after a step and compacts before the next; ``b6170`` (b5589 to b6244) asks
    before a step, without padding the span. Both leave caches alone that reach below 2,048 cells; the older
    ``b2422`` does so for none, and ``b2278`` below 128. In single precision, as the original. 0 or less: never.
    """

    threshold: float
    formula: Formula = "b2422"
    on_failure: bool = False
    checks_steps = True
    stateful = False

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Answers for ``b6170`` only."""
        return self.formula == "b6170" and self._is_due(state)

    def due_after_step(self, state: TriggerInput) -> bool:
        """Answers for all other formulas."""
        return self.formula != "b6170" and self._is_due(state)

    def rules_out(self, bounds: TriggerInput, saved: int, steps: int) -> bool:
        """By the fewest used cells and the longest span, where these leave no doubt."""
        used, cells = self._terms(bounds.used, bounds.top, bounds.span, bounds.pad, bounds.tokens)
        if self.threshold <= 0 or cells < _MEASURES[self.formula].least:
            return True
        certain = self.threshold - _DOUBT
        if fragmentation(used, cells) < certain:
            return True
        # Or by the most empty cells: less than a padding more than packing saves, of at least the cells used now.
        most_empty = saved + bounds.pad - (used - bounds.used)
        return bounds.used > 0 and most_empty / bounds.used < certain

    def steps_until_due(self, forecast: TriggerForecast, steps: int) -> int:
        """By the formula, for all steps at once."""
        if self.threshold <= 0:
            return steps
        measure = _MEASURES[self.formula]
        asked = slice(0, steps) if measure.before_step else slice(1, steps + 1)
        top, span = forecast.top[asked], forecast.span[asked]
        used, cells = self._terms(forecast.used[asked], top, span, forecast.pad, forecast.tokens)
        ratio = fragmentation(used.astype(np.float32), np.maximum(cells, 1).astype(np.float32))
        return _first((cells >= measure.least) & (ratio > np.float32(self.threshold)))

    def advance(self, forecast: TriggerForecast, steps: int) -> None:
        """Does nothing: there is no state."""

    def _is_due(self, state: TriggerInput) -> bool:
        used, cells = self._terms(state.used, state.top, state.span, state.pad, state.tokens)
        if self.threshold <= 0 or cells < _MEASURES[self.formula].least:
            return False
        # Single precision takes long, and matters only near the threshold.
        beyond = fragmentation(used, cells) - self.threshold
        if abs(beyond) > _DOUBT:
            return beyond > 0
        return bool(fragmentation(np.float32(used), np.float32(cells)) > np.float32(self.threshold))

    def _terms(self, used: Count, top: Count, span: Count, pad: int, tokens: int) -> tuple[Count, Count]:
        """The cells that the formula counts as used, and the cells that these are a share of."""
        _, of_span, _, counted_as_used = _MEASURES[self.formula]
        if counted_as_used is not None:
            used = used + (pad if counted_as_used == "pad" else tokens)
        return used, span if of_span else top


def _first(due: NDArray[np.bool_]) -> int:
    """Index of the first step that is due; their number, if none is."""
    at = int(due.argmax()) if len(due) else 0
    return at if len(due) and due[at] else len(due)


_REPLAN_STEPS = 32


@dataclass(slots=True)
class Adaptive(Trigger):
    """Compacts when the attention that it saves, over a horizon learned on the way, costs more than the moves.

    The saving of one step is (its tokens) x (``cells_saved``, the holes) x (cost of a score). How many steps it
    lasts is not known ahead: holes come back as sequences end. So the trigger learns it: after a compaction it
    counts the steps until the holes have come back to what they were when it compacted, and keeps an
    exponentially weighted mean of these counts, the horizon H. Holes grow back about evenly, so half of them are
    missing on average over those steps, and compacting saves H / 2 steps' worth. It is due when

        tokens x holes x score x H / 2  >  run x runs + cell x cells

    with runs and cells counted on the actual plan. A plan is made only where the fewest cells that any plan must move
    do not already cost more; after a plan that cost too much none is made for 32 steps unless the saving exceeds its
    cost. A step that finds no room always compacts.
    """

    costs: RelativeCosts
    horizon: float = 64.0
    """Steps; the first guess, then what has been learned."""
    weight: float = 0.2
    """Weight of the newest observation in the mean."""
    on_failure: bool = field(default=True, init=False)
    when_idle: bool = field(default=False, init=False)
    checks_steps = True
    _awaited_holes: int = field(default=0, init=False)
    """Holes at the last compaction, while their return is being observed; otherwise 0."""
    _observed_steps: int = field(default=0, init=False)
    """Steps since that compaction."""
    _refused_cost: float = field(default=0.0, init=False)
    """Cost of the last plan, if it was too much; otherwise 0."""
    _steps_since_plan: int = field(default=0, init=False)

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Weigh the saving against the cost of the plan, where it could pay."""
        holes = cells_saved(state.used, state.span, state.pad)
        self._observe(holes)
        saving = state.tokens * holes * self.costs.score * self.horizon / 2
        self._steps_since_plan += 1
        if saving <= self.costs.run or (saving <= self._refused_cost and self._steps_since_plan < _REPLAN_STEPS):
            return False
        if saving <= self.costs.run + self.costs.cell * state.min_cells_to_move():
            return False
        moves = plan()
        cost = self.costs.run * moves.n_runs + self.costs.cell * moves.n_cells
        if moves.n_runs == 0 or saving <= cost:
            self._refused_cost, self._steps_since_plan = cost, 0
            return False
        self._observed_steps, self._awaited_holes, self._refused_cost = 0, holes, 0.0
        return True

    def rules_out(self, bounds: TriggerInput, saved: int, steps: int) -> bool:
        """By the most holes on the way, where the horizon stays as it is."""
        if self._awaited_holes and (
            saved >= self._awaited_holes or self._observed_steps + steps >= self._longest_observation
        ):
            return False
        saving = bounds.tokens * saved * self.costs.score * self.horizon / 2
        if saving <= self.costs.run:
            return True
        if saving <= self._refused_cost and self._steps_since_plan + steps < _REPLAN_STEPS:
            return True
        return saving <= self.costs.run + self.costs.cell * bounds.min_cells_to_move()

    def skip(self, steps: int) -> None:
        """Count the steps."""
        self._steps_since_plan += steps
        if self._awaited_holes:
            self._observed_steps += steps

    def steps_until_due(self, forecast: TriggerForecast, steps: int) -> int:
        """For all steps at once: on the way the horizon changes at most once."""
        holes = cells_saved(forecast.used, forecast.span, forecast.pad)[:steps]
        horizons = np.full(steps, self.horizon)
        ends = self._observation_ends(holes)
        if ends < steps:
            horizons[ends:] = self._horizon_after(self._observed_steps + ends + 1)
        saving = forecast.tokens * holes * self.costs.score * horizons / 2
        worth = saving > self.costs.run
        if not worth.any():
            return steps
        replan = self._steps_since_plan + np.arange(1, steps + 1) >= _REPLAN_STEPS
        worth &= saving > self.costs.run + self.costs.cell * forecast.min_cells_to_move()[:steps]
        return _first(worth & ((saving > self._refused_cost) | replan))

    def advance(self, forecast: TriggerForecast, steps: int) -> None:
        """Count the steps, and learn if the observation ends on the way."""
        self._steps_since_plan += steps
        if self._awaited_holes:
            holes = cells_saved(forecast.used, forecast.span, forecast.pad)[:steps]
            ends = self._observation_ends(holes)
            if ends < steps:
                self.horizon = self._horizon_after(self._observed_steps + ends + 1)
                self._awaited_holes = 0
            self._observed_steps += min(ends + 1, steps)

    @property
    def _longest_observation(self) -> float:
        """Steps after which an observation ends anyway: where holes never come back, a long horizon is learned."""
        return 8 * self.horizon

    def _observation_ends(self, holes: IntArray) -> int:
        """Index of the step in which the observation ends; the number of steps if it does not, or there is none."""
        if self._awaited_holes == 0:
            return len(holes)
        observed = self._observed_steps + np.arange(1, len(holes) + 1)
        return _first((holes >= self._awaited_holes) | (observed >= self._longest_observation))

    def _horizon_after(self, observed_steps: int) -> float:
        """The horizon once an observation has ended after so many steps."""
        return self.horizon + self.weight * (observed_steps - self.horizon)

    def _observe(self, holes: int) -> None:
        if self._awaited_holes == 0:
            return
        self._observed_steps += 1
        if holes >= self._awaited_holes or self._observed_steps >= self._longest_observation:
            self.horizon = self._horizon_after(self._observed_steps)
            self._awaited_holes = 0
