"""The best settings of a search, in order: how surely each meets the service level, and up to which load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from kvsim.advice.memory.engine_flags import Flags, command_line
from kvsim.advice.recommend.candidates import Candidate
from kvsim.advice.recommend.slo import LATENCY_MEASURES, Bound, Slo
from kvsim.advice.recommend.trials import MOST_DOUBLINGS, TrialOutcome
from kvsim.experiments.estimates import Interval, prediction_limit, replication_interval

Verdict = Literal["surely", "likely", "not"]
"""Whether the service level is met. ``surely``: all intervals lie within the bounds; ``likely``: the means do; ``not``:
they do not, or arrivals outpace service in a replication."""

VERDICTS: tuple[Verdict, ...] = ("surely", "likely", "not")
"""The better first."""
_NEAR = 0.95
"""Loads of at least this share of the largest count as equal to it."""

RULE = (
    "ranked by how surely the service level is met at this load (surely: all intervals lie within the bounds; likely: "
    "the means do; not: a mean does not), then by the largest load sustained or, where the level is not met but the "
    "server keeps up, or no load is sustained, by the worst bound over its limit; of settings up to 5 % behind the "
    "best of those left, the one with the widest K and V comes first, then the one with the least memory, then the one "
    "with the smaller host cache"
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
    same: tuple[Candidate, ...] = ()
    """Settings that do the same."""

    @property
    def notes(self) -> list[str]:
        """What to read along with the setting, and which others do the same."""
        others = list(dict.fromkeys(filter(None, (_differing(c.flags, self.candidate.flags) for c in self.same))))
        same = [f"any of these does the same: {'; '.join(['as typed', *others])}"] if others else []
        return [*self.candidate.notes, *same]

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
    def promised(self) -> float | None:
        """The load that meets the service level in 95 of 100 further replications; None if too little is known.

        A prediction limit of the logarithms of the replications' largest loads.
        """
        if self.sustained is None or len(self.loads) < 2:
            return None
        return float(np.exp(prediction_limit(np.log(self.loads))))

    @property
    def at_least(self) -> bool:
        """Whether even larger loads might meet the service level, since the largest one tried did."""
        return any(load >= self.largest_load for load in self.loads)

    @property
    def settled(self) -> bool:
        """Whether the server keeps up in all replications, so that latencies do not depend on the length of a run."""
        return all(outcome.settled and not outcome.error for outcome in self.outcomes)

    @property
    def score(self) -> float:
        """Value to rank by, higher is better: the largest load or, if that is none or too little, the worst bound."""
        if self.verdict == "not" and self.settled:
            return 1 / max(self.worst[1], 1e-9)
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

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``--json``."""
        return {"measure": self.measure, "distinguishable": self.distinguishable, **self.ratio.to_dict()}


def _standing(f: Finalist) -> tuple[int, bool]:
    """How surely the service level is met and, where it is not, whether the server keeps up; smaller is better."""
    return VERDICTS.index(f.verdict), f.verdict == "not" and not f.settled


def rank(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Sort finalists by ``RULE``, best first."""
    left, ordered = list(finalists), []
    while left:
        leading = min(map(_standing, left))
        group = [f for f in left if _standing(f) == leading]
        highest = max(f.score for f in group)
        near = [f for f in group if f.score >= _NEAR * highest]
        ordered.append(min(near, key=lambda f: f.candidate.memory_order))
        left.remove(ordered[-1])
    return ordered


def _differing(flags: Flags, mine: Flags) -> str:
    """What is typed otherwise than mine, and which of mine are not typed."""
    names = {name for name, _ in flags}
    without = [f"without {name}" for name, _ in mine if name not in names]
    return ", ".join(filter(None, [command_line(tuple(flag for flag in flags if flag not in mine)), *without]))


def missed_slo(outcome: TrialOutcome, slo: Slo) -> RuledOut:
    """Why a setting is ruled out that misses the service level at the load asked about."""
    failing = bool(outcome.error) or (outcome.factor(slo) > 1 and slo.worst(outcome.measures)[0].is_share)
    factor = outcome.factor(slo)
    detail = describe_miss(outcome, slo)
    return RuledOut("fails" if failing else "slo", detail, factor if math.isfinite(factor) else None)


def describe_miss(outcome: TrialOutcome, slo: Slo) -> str:
    """Which bound is missed and by how much, in words."""
    if outcome.error:
        return outcome.error
    bound, factor = slo.worst(outcome.measures)
    name = bound.text or bound.measure
    if factor <= 1 and not outcome.settled:
        return "arrivals outpace service"
    if bound.is_share:
        return f"{bound.measure} {outcome.measures[bound.measure]:.1%}"
    return f"{name} missed by {factor:.2f} ×" if math.isfinite(factor) else f"{name}: no request completed"
