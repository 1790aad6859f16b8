"""The trigger that compacts when the attention saved is expected to cost more than the moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from policies.compaction.triggers import Trigger, TriggerForecast, TriggerInput, cells_saved, first_due
from policies.vocabulary import IntArray, Moves, RelativeCosts

_REPLAN_STEPS = 32


@dataclass(slots=True)
class Adaptive(Trigger):
    """Compacts when the attention that it saves, over a horizon learned during the run, costs more than the moves.

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
        """By the largest number of holes during the steps, where the horizon stays as it is."""
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
        """For all steps at once: during them the horizon changes at most once."""
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
        return first_due(worth & ((saving > self._refused_cost) | replan))

    def advance(self, forecast: TriggerForecast, steps: int) -> None:
        """Count the steps, and learn if the observation ends in one of them."""
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
        return first_due((holes >= self._awaited_holes) | (observed >= self._longest_observation))

    def _horizon_after(self, observed_steps: int) -> float:
        """The horizon once an observation has ended after ``observed_steps`` steps."""
        return self.horizon + self.weight * (observed_steps - self.horizon)

    def _observe(self, holes: int) -> None:
        if self._awaited_holes == 0:
            return
        self._observed_steps += 1
        if holes >= self._awaited_holes or self._observed_steps >= self._longest_observation:
            self.horizon = self._horizon_after(self._observed_steps)
            self._awaited_holes = 0
