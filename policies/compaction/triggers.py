"""When an arena is compacted: the triggers, and what brings a trigger and a compactor together.

A trigger is asked before and after each step, so all of this is compiled. Compiled classes can be copied only where
they allow interpreted subclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import FreeCells
from policies.compaction.compactors import Compactor, min_cells_to_move
from policies.compiled import i64, mypyc_attr
from policies.vocabulary import NO_MOVES, Moves, RelativeCosts

_IDLE_RUNS: Final = 8
"""Runs moved in one slice of idle compaction."""
_REPLAN_STEPS: Final = 32
"""Steps for which an adaptive trigger makes no new plan after one that cost too much."""
_DOUBT: Final = 1e-5
"""Ratios from 0 to 1 that differ by more do so in single precision too."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TriggerInput:
    """What a trigger decides by: counts of cells and tokens, never a clock."""

    def __init__(self, used: int, top: int, span: int, pad: int, tokens: int, min_cells_to_move: Callable[[], int]):
        self.used: i64 = used
        """Cells that hold a token."""
        self.top: i64 = top
        """One past the highest used cell."""
        self.span: i64 = span
        """``top`` rounded up to the kernel's padding: what attention over all cells reads."""
        self.pad: i64 = pad
        """The kernel's padding."""
        self.tokens: i64 = tokens
        """Tokens of the step."""
        self.min_cells_to_move = min_cells_to_move
        """The fewest cells that compaction must move; a function, since it takes time to count them."""

    @staticmethod
    def of(arena: Arena, pad: int, tokens: int) -> TriggerInput:
        """The present state of an arena, and a step of ``tokens`` tokens."""
        state = TriggerInput(0, 0, 0, pad, 0, partial(min_cells_to_move, arena))
        state.look(arena.free, tokens)
        return state

    def look(self, free: FreeCells, tokens: int) -> None:
        """Take on the present state of an arena, by its free cells, and a step of ``tokens`` tokens."""
        self.used = free.size - free.total
        self.top = free.top
        self.span = free.span(self.pad)
        self.tokens = tokens

    @property
    def holes(self) -> int:
        """Cells that attention would no longer read if all used cells were packed."""
        packed = (self.used + self.pad - 1) // self.pad * self.pad
        return max(self.span - packed, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class Trigger:
    """Never compacts. Other triggers override what they need.

    A trigger that decides by step sets ``checks_steps`` and implements ``due_before_step`` or ``due_after_step``.
    """

    checks_steps: ClassVar[bool] = False
    """Whether it is asked before and after each step."""
    when_idle: ClassVar[bool] = False
    """Compact while the server has nothing to do, a slice at a time."""

    def __init__(self, *, on_failure: bool = False):
        self.on_failure = on_failure
        """Compact when a step finds no room, and try once more before giving up."""

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Whether to compact before this step. ``plan`` returns the moves that would take."""
        return False

    def due_after_step(self, state: TriggerInput) -> bool:
        """Whether to compact before the next step, asked when a step has been placed."""
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class OnFailure(Trigger):
    """Compacts only when a step finds no room (llama.cpp b5589 to b6244: ``init_batch`` tries once more)."""

    def __init__(self) -> None:
        super().__init__(on_failure=True)


@mypyc_attr(allow_interpreted_subclasses=True)
class Idle(Trigger):
    """Compacts only while no request waits or runs; an arrival stops it between two slices."""

    when_idle: ClassVar[bool] = True


Formula = Literal["b2278", "b2422", "b4875", "b6170"]
"""llama.cpp's measures of fragmentation, by the build that they are taken from."""


class _Measure(NamedTuple):
    """How a build of llama.cpp measures fragmentation, and when."""

    before_step: bool
    """Before a step; otherwise after it, to compact before the next."""
    of_span: bool
    """Whether cells below the padded span count; otherwise those below the highest used one."""
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


def fragmentation(used: int, cells: int) -> float:
    """llama.cpp's ratio: the share of ``cells`` cells that are not used."""
    return 1.0 - float(used) / float(cells)


@mypyc_attr(allow_interpreted_subclasses=True)
class Threshold(Trigger):
    """Compacts when the fragmentation ratio exceeds ``threshold`` (``defrag_thold``), by one of llama.cpp's formulas.

    ``b4875`` (b4666 to b4880) asks after a step and compacts before the next; ``b6170`` (b5589 to b6244) asks
    before a step, without padding the span. Both leave caches alone that reach below 2,048 cells; the older
    ``b2422`` does so for none, and ``b2278`` below 128. In single precision, as the original. 0 or less: never.
    """

    checks_steps: ClassVar[bool] = True

    def __init__(self, threshold: float, formula: Formula = "b2422", *, on_failure: bool = False):
        super().__init__(on_failure=on_failure)
        self.threshold = float(threshold)
        measure = _MEASURES[formula]
        self._before_step = measure.before_step
        self._of_span = measure.of_span
        self._least: i64 = measure.least
        self._counts_pad = measure.counted_as_used == "pad"
        self._counts_tokens = measure.counted_as_used == "tokens"

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Answers for ``b6170`` only."""
        return self._before_step and self._is_due(state)

    def due_after_step(self, state: TriggerInput) -> bool:
        """Answers for all other formulas."""
        return not self._before_step and self._is_due(state)

    def _is_due(self, state: TriggerInput) -> bool:
        used, cells = state.used, state.top
        if self._of_span:
            cells = state.span
        if self._counts_pad:
            used += state.pad
        if self._counts_tokens:
            used += state.tokens
        if self.threshold <= 0 or cells < self._least:
            return False
        # Single precision takes long, and matters only near the threshold.
        beyond = fragmentation(used, cells) - self.threshold
        if abs(beyond) > _DOUBT:
            return beyond > 0
        return bool(1 - np.float32(used) / np.float32(cells) > np.float32(self.threshold))


@mypyc_attr(allow_interpreted_subclasses=True)
class Adaptive(Trigger):
    """Compacts when the attention that it saves, over a horizon learned during the run, costs more than the moves.

    The saving of one step is (its tokens) x (``TriggerInput.holes``) x (cost of a score). How many steps it
    lasts is not known ahead: holes come back as sequences end. So the trigger learns it: after a compaction it
    counts the steps until the holes have come back to what they were when it compacted, and keeps an
    exponentially weighted mean of these counts, the horizon H. Holes grow back about evenly, so half of them are
    missing on average over those steps, and compacting saves H / 2 steps' worth. It is due when

        tokens x holes x score x H / 2  >  run x runs + cell x cells

    with runs and cells counted on the actual plan. A plan is made only where the fewest cells that any plan must move
    do not already cost more; after a plan that cost too much none is made for 32 steps unless the saving exceeds its
    cost. A step that finds no room always compacts.
    """

    checks_steps: ClassVar[bool] = True

    def __init__(self, costs: RelativeCosts, horizon: float = 64.0, weight: float = 0.2):
        super().__init__(on_failure=True)
        self.horizon = float(horizon)
        """Steps; the first guess, then what has been learned."""
        self._weight = float(weight)
        """Weight of the newest observation in the mean."""
        self._score, self._run, self._cell = float(costs.score), float(costs.run), float(costs.cell)
        self._awaited_holes: i64 = 0
        """Holes at the last compaction, while their return is being observed; otherwise 0."""
        self._observed_steps: i64 = 0
        """Steps since that compaction."""
        self._refused_cost = 0.0
        """Cost of the last plan, if it was too much; otherwise 0."""
        self._steps_since_plan: i64 = 0

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Weigh the saving against the cost of the plan, where it could pay."""
        holes: i64 = state.holes
        if self._awaited_holes:
            self._observe(holes)
        saving = float(state.tokens * holes) * self._score * self.horizon / 2.0
        self._steps_since_plan += 1
        if saving <= self._run or (saving <= self._refused_cost and self._steps_since_plan < _REPLAN_STEPS):
            return False
        if saving <= self._run + self._cell * float(state.min_cells_to_move()):
            return False
        moves = plan()
        cost = self._run * float(moves.n_runs) + self._cell * float(moves.n_cells)
        if moves.n_runs == 0 or saving <= cost:
            self._refused_cost, self._steps_since_plan = cost, 0
            return False
        self._observed_steps, self._awaited_holes, self._refused_cost = 0, holes, 0.0
        return True

    def _observe(self, holes: i64) -> None:
        """Count a step since the last compaction, and learn if the holes are back.

        Where they never come back, the observation ends anyway, so that a long horizon is learned.
        """
        self._observed_steps += 1
        if holes >= self._awaited_holes or float(self._observed_steps) >= 8.0 * self.horizon:
            self.horizon += self._weight * (float(self._observed_steps) - self.horizon)
            self._awaited_holes = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class CompactionPlanner:
    """Asks the trigger when compaction is due, and the compactor for the moves. Changes nothing in the arena."""

    def __init__(self, arena: Arena, compactor: Compactor | None, trigger: Trigger, pad: int):
        self._arena = arena
        self._free: FreeCells = arena.free
        self._compactor = compactor
        self._trigger = trigger
        self._state = TriggerInput.of(arena, pad, 0)
        self.checks_steps = compactor is not None and trigger.checks_steps
        """Whether the trigger is asked before and after each step."""
        self.wanted = False
        """llama.cpp's ``do_defrag``: compact before the next micro-batch."""
        self._idle_runs: list[tuple[int, int, int]] = []
        """Rest of the plan for idle compaction; empty when the arena has changed since."""
        self._seen_by_trigger: Moves | None = None
        """The plan that the trigger has just weighed; None when the arena has changed since."""

    def ask_before_step(self, tokens: int) -> None:
        """Have the trigger say whether to compact before a step of ``tokens`` tokens."""
        if self.checks_steps:
            self._state.look(self._free, tokens)
            if self._trigger.due_before_step(self._state, self._plan_for_trigger):
                self.wanted = True

    def ask_after_step(self, tokens: int) -> None:
        """Have the trigger say whether to compact before the next step, when one of ``tokens`` tokens is placed."""
        if self.checks_steps:
            self._state.look(self._free, tokens)
            if self._trigger.due_after_step(self._state):
                self.wanted = True

    def plan(self) -> Moves:
        """Moves that compact the arena as it is."""
        if self._seen_by_trigger is not None:
            return self._seen_by_trigger
        return NO_MOVES if self._compactor is None else self._compactor(self._arena)

    def next_idle_moves(self) -> Moves:
        """The next few runs of a plan, to be carried out at once; no moves where idle time is not used."""
        if self._compactor is None or not self._trigger.when_idle:
            return NO_MOVES
        if not self._idle_runs:
            plan = self._compactor(self._arena)
            self._idle_runs = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True))
        now, self._idle_runs = self._idle_runs[:_IDLE_RUNS], self._idle_runs[_IDLE_RUNS:]
        return Moves.from_runs(now) if now else NO_MOVES

    def forget_plans(self) -> None:
        """Drop the plans made so far; to be called whenever the arena changes other than by them."""
        if self._idle_runs:
            self._idle_runs = []
        self._seen_by_trigger = None

    def _plan_for_trigger(self) -> Moves:
        self._seen_by_trigger = None
        self._seen_by_trigger = self.plan()
        return self._seen_by_trigger
