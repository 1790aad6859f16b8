"""What a comparison of policies supports: a ranking, intervals, and a conclusion in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from kvsim.experiments.conclusions import conclude
from kvsim.experiments.estimates import LEVEL, Interval, paired_difference, paired_ratio
from kvsim.experiments.measures import Measures, failed_requests, measure_interval
from kvsim.experiments.pooled_percentiles import LatencySketches
from kvsim.experiments.ranking import (
    BOUND,
    NotRanked,
    Ranking,
    fails_too_many,
    identical_groups,
    pareto,
    rank,
    reason_not_to_rank,
    replication_values,
)

PARETO = ("e2e_mean", "memory_bytes")
"""The two measures of the Pareto front."""


@dataclass(frozen=True)
class Verdict:
    """The conclusions that a comparison of policies supports."""

    runs: Mapping[str, Sequence[Measures]]
    """What each policy's runs measured; the r-th of each is on the same requests."""
    ranking: Ranking | None
    """Policies ranked by mean end-to-end latency, one of each group in ``identical``; without those ``not_ranked``."""
    same_answers: Ranking | None
    """The ranking of those that drop no tokens, where others are ranked too."""
    intervals: dict[str, dict[str, Interval]]
    """Intervals over the replications, by policy and measure: all latencies, and the memory."""
    from_best: dict[str, Interval]
    """Paired difference of each policy's mean end-to-end latency from the best's, simultaneously valid at the level."""
    from_bound: dict[str, Interval]
    """Paired ratio of each policy's mean end-to-end latency to the oracle's; each valid at the level by itself."""
    front: tuple[str, ...]
    """The policies that no other beats in both mean end-to-end latency and memory."""
    not_ranked: Mapping[str, NotRanked]
    """Policies that take no part in the ranking; the oracle never does and is not listed."""
    identical: tuple[tuple[str, ...], ...]
    """Groups of ranked policies under which every request of every run had the same times."""
    forgetful: tuple[str, ...] = ()
    """Policies that drop tokens."""
    max_failed: float = 0.0
    """Share of its requests that a ranked policy may have failed."""

    @cached_property
    def line(self) -> str:
        """The conclusion, in one line."""
        return conclude(self)

    @property
    def replications(self) -> int:
        """Number of runs that all policies have."""
        return min((len(each) for each in self.runs.values()), default=0)

    @property
    def failing(self) -> tuple[str, ...]:
        """Policies that failed requests."""
        return tuple(policy for policy, each in self.runs.items() if failed_requests(each)[0])

    def latency_and_memory(self) -> dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]]:
        """Mean end-to-end latency (seconds) and memory (bytes) of each policy, each as (value, low, high)."""
        both = ((p, [i[m] for m in PARETO]) for p, i in self.intervals.items() if set(PARETO) <= i.keys())
        return {policy: (astuple(latency), astuple(memory)) for policy, (latency, memory) in both}

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that a verdict adds to ``--json``; a single replication has no intervals."""
        keys: dict[str, Any] = {
            "replications": self.replications,
            "conclusion": self.line,
            "max_failed": self.max_failed,
            "not_ranked": {policy: reason.why for policy, reason in self.not_ranked.items()},
            "identical": [list(group) for group in self.identical],
            "pareto": list(self.front),
        }
        if self.replications > 1:
            keys |= {
                "intervals": {p: {m: i.to_dict() for m, i in each.items()} for p, each in self.intervals.items()},
                "best": None if self.ranking is None else self.ranking.best,
                "e2e_mean_delta_vs_best": {p: i.to_dict() for p, i in self.from_best.items()},
                "e2e_mean_over_oracle_interval": {p: i.to_dict() for p, i in self.from_bound.items()},
            }
        return keys


_WITH_INTERVAL = (
    *(f"{key}_{name}" for key in ("ttft", "tpot", "e2e") for name in ("mean", "p50", "p95", "p99")),
    "memory_bytes",
)


def judge(
    runs: Mapping[str, Sequence[Measures]],
    forgetful: Sequence[str] = (),
    level: float = LEVEL,
    *,
    clairvoyant: Sequence[str] = (),
    max_failed: float = 0.0,
    times: Mapping[str, Sequence[str]] | None = None,
    sketches: Mapping[str, Sequence[LatencySketches]] | None = None,
) -> Verdict:
    """Draw conclusions from the runs of several policies, the r-th of each on the same requests.

    ``forgetful``: policies that drop tokens; where one is best, the conclusion says as well which of the others is.
    ``clairvoyant``: policies that know what no server knows, and are not ranked. ``max_failed``: share of its requests
    that a policy may have failed and still be ranked. ``times``: digests of the times of all requests, one for each
    run; policies are called identical where all of them are equal. ``sketches``: of the latencies of each run, for the
    intervals of percentiles.
    """
    intervals = {policy: _intervals(each, level, (sketches or {}).get(policy, ())) for policy, each in runs.items()}
    means = {p: values for p, each in runs.items() if (values := replication_values(each, "e2e_mean")) is not None}
    reasons = {policy: reason_not_to_rank(each, max_failed) for policy, each in runs.items() if policy != BOUND}
    reasons |= {policy: NotRanked("is told lengths in advance") for policy in clairvoyant if policy in reasons}
    not_ranked = {policy: reason for policy, reason in reasons.items() if reason is not None}
    identical = identical_groups({p: each for p, each in (times or {}).items() if p in means and p not in not_ranked})
    repeated = {policy for group in identical for policy in group[1:]}
    ranked = {p: v for p, v in means.items() if p not in not_ranked and p not in repeated and p != BOUND}
    ranking = rank(ranked, "e2e_mean", level) if ranked else None
    same_answers = {p: v for p, v in ranked.items() if p not in forgetful}
    second = rank(same_answers, "e2e_mean", level) if same_answers and len(same_answers) < len(ranked) else None
    bound = means.get(BOUND)
    from_bound = {p: paired_ratio(v, bound, level) for p, v in means.items()} if bound and min(bound) > 0 else {}
    from_best: dict[str, Interval] = {}
    if ranking is not None:
        from_best = dict(zip(ranking.names, ranking.comparison.differences, strict=True))
        # Policies outside the ranking are compared with its best too, each by itself.
        best = means[ranking.best]
        unranked = {p: v for p, v in means.items() if p not in from_best and len(v) == len(best)}
        from_best |= {p: paired_difference(v, best, level) for p, v in unranked.items()}
    # An unstable policy is on the front: its memory is what it is.
    excluded = {*(p for p, each in runs.items() if fails_too_many(each, max_failed)), *clairvoyant, BOUND}
    points = {p: (i[PARETO[0]].value, i[PARETO[1]].value) for p, i in intervals.items() if set(PARETO) <= i.keys()}
    front = tuple(pareto({p: point for p, point in points.items() if p not in excluded}))
    found = (ranking, second, intervals, from_best, from_bound, front, not_ranked, identical)
    return Verdict(runs, *found, tuple(forgetful), max_failed)


def _intervals(runs: Sequence[Measures], level: float, sketches: Sequence[LatencySketches]) -> dict[str, Interval]:
    values = {measure: replication_values(runs, measure) for measure in _WITH_INTERVAL}
    return {measure: measure_interval(measure, v, level, sketches) for measure, v in values.items() if v is not None}
