"""The best settings of a search, in order: how surely each meets the service level, and up to which load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from kvsim.advice.recommend.candidates import Candidate
from kvsim.advice.recommend.slo import LATENCY_MEASURES, Bound, Slo
from kvsim.advice.recommend.trials import MOST_DOUBLINGS, TrialOutcome
from kvsim.experiments.estimates import Interval, replication_interval

Verdict = Literal["surely", "likely", "not"]
"""Whether the service level is met. ``surely``: all intervals lie within the bounds; ``likely``: the means do; ``not``:
they do not, or arrivals outpace service in a replication."""

_VERDICTS: tuple[Verdict, ...] = ("surely", "likely", "not")
_NEAR = 0.95
"""Loads of at least this share of the largest count as equal to it."""

RULE = (
    "ranked by how surely the service level is met at this load (surely: all intervals lie within the bounds; likely: "
    "the means do; not: a mean does not), then by the largest load sustained or, where there is none, by the worst "
    "bound over its limit; of settings up to 5 % behind the best of those left, the one with the least memory comes "
    "first, then the one with the smaller host cache"
)


class RuledOut(NamedTuple):
    """Why a setting was ruled out."""

    reason: str
    """A key of ``candidates.REASONS``."""
    detail: str
    factor: float | None = None
    """Its worst measure divided by the limit, for a setting that missed the service level at the load asked about
    (below 1 if arrivals outpace service); None if there is no finite factor."""


@dataclass(frozen=True)
class Finalist:
    """One of the best settings."""

    candidate: Candidate
    slo: Slo
    outcomes: tuple[TrialOutcome, ...]
    """Results at the load asked about, one per replication."""
    loads: tuple[float, ...]
    """The largest load that meets the service level, as a multiple of the load asked about, one per replication; 0 if
    no load tried met it. Empty if the workload has no load to change."""

    largest_load: float = 2.0**MOST_DOUBLINGS
    """The largest load that was tried, as a multiple of the load asked about."""

    @cached_property
    def measures(self) -> dict[str, Interval]:
        """Intervals over the replications for measures that all of them have; latencies in seconds."""
        intervals = {}
        for measure in (*LATENCY_MEASURES, "failed_share", "truncated_share", "throughput_tokens_per_s"):
            values = [outcome.measures.get(measure) for outcome in self.outcomes]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                intervals[measure] = replication_interval(known)
        return intervals

    @property
    def means(self) -> dict[str, float | None]:
        """The measures without their intervals."""
        return {measure: interval.value for measure, interval in self.measures.items()}

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the setting meets the service level at the load asked about."""
        if any(outcome.error or not outcome.settled for outcome in self.outcomes) or not self.slo.met(self.means):
            return "not"
        highs = {measure: interval.high for measure, interval in self.measures.items()}
        return "surely" if self.slo.met(highs) else "likely"

    @property
    def worst(self) -> tuple[Bound, float]:
        """The bound that is missed most, or met most narrowly, and its mean divided by its limit."""
        return self.slo.worst(self.means)

    @cached_property
    def sustained(self) -> Interval | None:
        """The largest load that meets the service level, as a multiple of the load asked about.

        A geometric mean over the replications, with a t interval of the logarithms. None if there is no load to change,
        or one of the replications met the service level at no load.
        """
        if not self.loads or min(self.loads) == 0:
            return None
        return replication_interval(np.log(self.loads)).exp()

    @property
    def at_least(self) -> bool:
        """Whether even larger loads might meet the service level, since the largest one tried did."""
        return any(load >= self.largest_load for load in self.loads)

    @property
    def score(self) -> float:
        """Value to rank by, higher is better: the largest load or, if there is none, the distance from the bounds."""
        if self.loads:
            # Settings that met no load come last, in order of how little they missed it.
            return self.sustained.value if self.sustained else 1e-9 / max(self.worst[1], 1e-9)
        return 1 / max(self.worst[1], 1e-9)


class TopTwo(NamedTuple):
    """The best setting compared with the second."""

    ratio: Interval
    """The best's largest load divided by the second's or, if no load can be changed, the ratio of a bounded measure."""
    measure: str
    """``load``, or the name of that measure."""

    @property
    def distinguishable(self) -> bool:
        """Whether the difference is more than chance."""
        return self.ratio.excludes(1.0)


def rank(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Sort finalists by ``RULE``, best first."""
    left, ordered = list(finalists), []
    while left:
        leading = min(_VERDICTS.index(f.verdict) for f in left)
        group = [f for f in left if _VERDICTS.index(f.verdict) == leading]
        highest = max(f.score for f in group)
        near = [f for f in group if f.score >= _NEAR * highest]
        ordered.append(min(near, key=lambda f: f.candidate.memory_order))
        left.remove(ordered[-1])
    return ordered
