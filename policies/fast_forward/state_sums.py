"""How full and how broken up the cache is during steps in lockstep, summed up as it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from policies.fast_forward.forecast import Usages
from policies.vocabulary import FloatArray

_NO_COPIES: Mapping[int, float] = {}


class StepWeights(NamedTuple):
    """How much each step of a lockstep batch counts in a sum: a clock gives the seconds that it takes."""

    each: float
    """Whatever the step reads."""
    per_score: float
    per_run: float
    copies: Mapping[int, float] = _NO_COPIES
    """What a step counts more if regions are copied before it, by its number among the steps, from 0."""
    by_step: Callable[[int], FloatArray] | None = None
    """What each of the first so many steps counts, where what it reads is known step by step; shape (steps,)."""


class StateSums:
    """The state of the first cache group after the next step, which the batch that takes the steps keeps up to date,
    and the weighted sums over the states after all steps so far.

    From one change to the next only what is stored, read and reached grows, by as much in every step.
    """

    __slots__ = (
        "_copies",
        "_each",
        "_per_run",
        "_per_score",
        "allocated",
        "by_step",
        "capacity",
        "external_fragmentation",
        "free_extents",
        "growth",
        "internal_fragmentation",
        "largest_free_extent",
        "last",
        "placeable",
        "runs",
        "scores",
        "span",
        "span_stop",
        "steps",
        "stored",
        "sum_allocated",
        "sum_free_extents",
        "sum_largest_free_extent",
        "sum_span",
        "sum_stored",
        "weight",
    )

    def __init__(self, weights: StepWeights):
        self._each, self._per_score, self._per_run, self._copies, self.by_step = weights
        self.steps = 0
        """Steps summed up so far."""
        self.weight = 0.0
        """Their weight."""
        self.sum_stored = self.sum_allocated = self.sum_span = self.sum_free_extents = self.sum_largest_free_extent = (
            0.0
        )
        self.external_fragmentation = self.internal_fragmentation = 0.0
        """Sums of the shares that ``Usage`` defines."""
        self.scores = 0
        """Scores computed in the next step."""
        self.runs = 0
        """Contiguous pieces that the scanned cells lie in."""
        self.growth = 0
        """By how many a step stores and scans more cells than the one before."""
        self.capacity = self.stored = self.allocated = self.placeable = 0
        self.free_extents = self.largest_free_extent = 0
        self.last = (0, 0, 0, 0, 0, 0)
        """The state after the last step so far: stored, allocated, placeable, free and largest extents, span."""
        self.span = 0
        self.span_stop = 0
        """What the span grows up to, by a cell in each step."""

    def take_steps(self, n: int) -> None:
        """Add the states after the next ``n`` steps, in which nothing changes but what grows."""
        growing = self.span_stop - self.span
        if 0 < growing < n - 1:
            self.take_steps(growing)
            n -= growing
        elif n < 1:
            return
        growth, stored, span = self.growth, self.stored, self.span
        weight, later = self._each + self._per_score * self.scores + self._per_run * self.runs, 0.0
        if n > 1:
            # The numbers of the steps from here on, 0 to n - 1, and their squares, summed up.
            numbers = n * (n - 1) / 2
            slope = self._per_score * growth
            later = numbers * (weight + slope * (2 * n - 1) / 3)
            weight = n * weight + slope * numbers
        if self._copies:
            weight += self._copies.get(self.steps, 0.0)
        weighted = stored * weight + growth * later
        self.weight += weight
        self.sum_stored += weighted
        self.sum_allocated += self.allocated * weight
        self.sum_span += span * weight
        if span < self.span_stop:
            self.sum_span += later
            self.span = min(span + n, self.span_stop)
        self.sum_free_extents += self.free_extents * weight
        self.sum_largest_free_extent += self.largest_free_extent * weight
        if self.allocated:
            self.internal_fragmentation += weight - weighted / self.allocated
        free = self.capacity - self.allocated
        if self.placeable != free:
            self.external_fragmentation += weight - self.placeable / free * weight
        self.steps += n
        self.scores += growth * n
        self.stored = stored + growth * n
        self.last = (
            self.stored - growth,
            self.allocated,
            self.placeable,
            self.free_extents,
            self.largest_free_extent,
            max(span, min(span + n - 1, self.span_stop)),
        )

    def take_states(self, states: Usages, steps: int) -> None:
        """Add the states after the first ``steps`` steps, which must be known step by step."""
        assert self.by_step is not None, "the clock knows each step"
        weights = self.by_step(steps)
        weight = float(weights.sum())
        self.weight += weight
        self.sum_stored += float(weights @ states.stored)
        self.sum_allocated += float(weights @ states.allocated)
        self.sum_span += float(weights @ states.span)
        self.sum_free_extents += float(weights @ states.free_extents)
        self.sum_largest_free_extent += float(weights @ states.largest_free_extent)
        free = self.capacity - states.allocated
        missing = free - states.placeable
        if missing.any():
            self.external_fragmentation += float(weights @ (missing / np.maximum(free, 1)))
        if states.allocated is not states.stored:
            self.internal_fragmentation += float(weights @ (1 - states.stored / states.allocated))
        self.steps += steps
        self.last = (
            int(states.stored[steps - 1]),
            int(states.allocated[steps - 1]),
            int(states.placeable[steps - 1]),
            int(states.free_extents[steps - 1]),
            int(states.largest_free_extent[steps - 1]),
            int(states.span[steps - 1]),
        )
