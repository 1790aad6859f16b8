"""A published figure beside our own, and how ours is measured: with the same seeds for both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvsim.experiments.estimates import Interval, paired_ratio, replication_interval
from kvsim.experiments.workers import map_ordered

SEEDS = tuple(range(1, 6))
"""Seeds of the runs behind a figure, unless there are more."""


class Finding(NamedTuple):
    """One claim, and what we found."""

    idea: str
    """The heading of docs/reproduced.md under which it stands."""
    claim: str
    """What was published, in a few words with its figure."""
    source: str
    """The paper, issue or pull request, and what it was measured on."""
    ours: Interval
    """What was published, as measured here, with its interval over seeds."""
    unit: str
    """What the interval counts: "times", "share" or a unit."""
    differs: str
    """In what ours differs: model, device, traffic, engine."""

    def figure(self) -> str:
        """Our figure with its interval, as the page has it."""
        if self.unit == "share":
            return f"{self.ours.value:.1%} ({self.ours.low:.1%} to {self.ours.high:.1%})"
        return f"{self.ours.value:.3g} ({self.ours.low:.3g} to {self.ours.high:.3g}) {self.unit}"


Measure = Callable[[int], Any]
"""Measures something with a seed; a function of a module, since it is run in another process."""


def measured(measure: Measure, seeds: Sequence[int] = SEEDS) -> list[Any]:
    """What a function measures with each seed, on all cores."""
    return list(map_ordered(measure, seeds))


def mean(values: Sequence[float]) -> Interval:
    """The mean over seeds, by Student's t."""
    return replication_interval(values)


def ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """The ratio of the means of two measures taken with the same seeds (Fieller)."""
    return paired_ratio(values, others)
