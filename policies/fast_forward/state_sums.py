"""How full and how broken up the cache is during steps in lockstep, summed up as it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_NO_COPIES: Mapping[int, float] = {}


class StepWeights(NamedTuple):
    """How much each step of a lockstep batch counts in a sum: a clock gives the seconds that it takes."""

    each: float
    """Whatever the step reads."""
    per_score: float
    per_run: float
    copies: Mapping[int, float] = _NO_COPIES
    """What a step counts more if regions are copied before it, by its number among the steps, from 0."""


class StateSums:
    """The state of the first cache group after the next step, which the batch that takes the steps keeps up to date,
    and the weighted sums over the states after all steps so far.

    From one change to the next only what is stored, read and reached grows, by as much in every step.
    """

    __slots__ = (
        "allocated",
        "capacity",
        "external_fragmentation",
        "free_extents",
        "growth",
        "internal_fragmentation",
        "largest_free_extent",
        "placeable",
        "runs",
        "scores",
        "span",
        "span_stop",
        "steps",
        "stored",
        "sum_free_extents",
        "sum_largest_free_extent",
        "sum_span",
        "sum_stored",
        "weight",
        "weights",
    )

    def __init__(self, weights: StepWeights):
        self.weights = weights
        self.steps = 0
        """Steps summed up so far."""
        self.weight = 0.0
        """Their weight."""
        self.sum_stored = self.sum_span = self.sum_free_extents = self.sum_largest_free_extent = 0.0
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
        each, per_score, per_run, copies = self.weights
        first = each + per_score * self.scores + per_run * self.runs
        slope, growth, free = per_score * self.growth, self.growth, self.capacity - self.allocated
        # Sums of k and of k * k for k < n, the number of a step from here on.
        numbers = n * (n - 1) / 2
        weight = n * first + slope * numbers
        later = first * numbers + slope * numbers * (2 * n - 1) / 3
        if copies:
            weight += copies.get(self.steps, 0.0)
        stored = self.stored * weight + growth * later
        self.weight += weight
        self.sum_stored += stored
        self.sum_span += self.span * weight
        if self.span < self.span_stop:
            self.sum_span += later
            self.span = min(self.span + n, self.span_stop)
        self.sum_free_extents += self.free_extents * weight
        self.sum_largest_free_extent += self.largest_free_extent * weight
        if self.allocated:
            self.internal_fragmentation += weight - stored / self.allocated
        if self.placeable != free:
            self.external_fragmentation += weight - self.placeable / free * weight
        self.steps += n
        self.scores += growth * n
        self.stored += growth * n
