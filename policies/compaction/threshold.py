"""The trigger that compacts above a fragmentation ratio, as llama.cpp did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.compaction.triggers import Count, Trigger, TriggerForecast, TriggerInput, first_due
from policies.vocabulary import Moves

Number = TypeVar("Number", float, np.float32, NDArray[np.float32])

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
        return _MEASURES[self.formula].before_step and self._is_due(state)

    def due_after_step(self, state: TriggerInput) -> bool:
        """Answers for all other formulas."""
        return not _MEASURES[self.formula].before_step and self._is_due(state)

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
        return first_due((cells >= measure.least) & (ratio > np.float32(self.threshold)))

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
