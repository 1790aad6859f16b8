"""What a comparison of policies supports: a ranking, intervals, and a conclusion in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.experiments.estimates import LEVEL, Interval, LowestMean, lowest_mean, paired_difference, paired_ratio
from kvsim.experiments.measures import MORE_IS_BETTER, Measures, measure_interval

BOUND = "oracle"
"""The policy that knows the future: a bound on the others, never a recommendation."""

PARETO = ("e2e_mean", "memory_bytes")
"""The two measures of the Pareto front."""

FEWEST_REQUESTS = 50
"""Runs of fewer requests support no conclusion about latency."""


@dataclass(frozen=True)
class Ranking:
    """Policies ranked by one measure."""

    measure: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    """Mean of each policy over the replications that all policies have."""
    comparison: LowestMean
    """Comparison of all policies with the best, by value, or by negated value where higher is better; either way its
    ``ratios`` are those of the measure itself."""
    replications: int
    varies: bool = True
    """Whether replications differ at all; those of a replayed trace do not depend on the seed."""

    @property
    def best(self) -> str:
        """Name of the policy with the best mean."""
        return self.names[self.comparison.lowest]

    @property
    def order(self) -> list[int]:
        """Indices of all policies, best first."""
        sign = -1 if self.measure in MORE_IS_BETTER else 1
        return sorted(range(len(self.names)), key=lambda i: (i != self.comparison.lowest, sign * self.values[i]))

    @property
    def runner_up(self) -> str | None:
        """Name of the second-best policy; None if there is only one."""
        return self.names[self.order[1]] if len(self.names) > 1 else None

    @property
    def ties(self) -> tuple[str, ...]:
        """Names of the policies that cannot be distinguished from the best."""
        return tuple(self.names[i] for i in self.order if i in self.comparison.ties)

    @property
    def holds(self) -> bool:
        """Whether the best beats all others at the level asked for, with all comparisons taken together."""
        return self.replications > 1 and self.varies and not self.comparison.ties


def rank(values: Mapping[str, Sequence[float]], measure: str, level: float = LEVEL) -> Ranking:
    """Rank policies by a measure of their replications, the r-th of each with the same seed.

    If some policies have more replications than others, only those that all have count. Raises ``ValueError`` for no
    policies, or one without replications.
    """
    if not values:
        raise ValueError("no policies to rank")
    common = min(len(replications) for replications in values.values())
    samples = np.array([list(replications)[:common] for replications in values.values()], dtype=np.float64)
    comparison = lowest_mean(-samples if measure in MORE_IS_BETTER else samples, level)
    means = tuple(float(mean) for mean in samples.mean(axis=1))
    return Ranking(measure, tuple(values), means, comparison, common, bool((samples != samples[:, :1]).any()))


def replication_values(runs: Sequence[Measures], measure: str) -> list[float] | None:
    """Return a measure of all replications; None if it is unknown in one of them."""
    values = [run[measure] for run in runs]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) and known else None


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the points that no other beats in both coordinates, in order; lower is better."""
    front: list[str] = []
    lowest = math.inf
    for name, (_, other) in sorted(points.items(), key=lambda item: item[1]):
        if other < lowest:
            front.append(name)
            lowest = other
    return front


@dataclass(frozen=True)
class Verdict:
    """The conclusions that a comparison of policies supports."""

    line: str
    """The conclusion, in one line."""
    ranking: Ranking | None
    """Stable policies without failed requests, ranked by mean end-to-end latency; without the oracle."""
    intervals: dict[str, dict[str, Interval]]
    """Intervals over the replications, by policy and measure: all latencies, and the memory."""
    from_best: dict[str, Interval]
    """Paired difference of each policy's mean end-to-end latency from the best's, simultaneously valid at the level."""
    from_bound: dict[str, Interval]
    """Paired ratio of each policy's mean end-to-end latency to the oracle's; each valid at the level by itself."""
    front: tuple[str, ...]
    """The policies that no other beats in both mean end-to-end latency and memory."""
    replications: int
    failing: tuple[str, ...] = ()
    """Policies that failed requests: they are not on the front."""

    def latency_and_memory(self) -> dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]]:
        """Mean end-to-end latency (seconds) and memory (bytes) of each policy, each as (value, low, high)."""
        by_policy = {}
        for policy, intervals in self.intervals.items():
            if set(PARETO) <= intervals.keys():
                latency, memory = (intervals[measure] for measure in PARETO)
                by_policy[policy] = (
                    (latency.value, latency.low, latency.high),
                    (memory.value, memory.low, memory.high),
                )
        return by_policy

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that a verdict adds to ``--json``; a single replication has no intervals."""
        keys: dict[str, Any] = {
            "replications": self.replications,
            "conclusion": self.line,
            "pareto": list(self.front),
        }
        if self.replications > 1:
            keys |= {
                "intervals": {p: {m: _ends(i) for m, i in each.items()} for p, each in self.intervals.items()},
                "best": None if self.ranking is None else self.ranking.best,
                "e2e_mean_delta_vs_best": {p: _ends(i) for p, i in self.from_best.items()},
                "e2e_mean_over_oracle_interval": {p: _ends(i) for p, i in self.from_bound.items()},
            }
        return keys


def _ends(interval: Interval) -> dict[str, float | None]:
    """The interval as JSON, with None for an infinite end."""
    ends = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}


_WITH_INTERVAL = (
    *(f"{key}_{name}" for key in ("ttft", "tpot", "e2e") for name in ("mean", "p50", "p95", "p99")),
    "memory_bytes",
)


def judge(runs: Mapping[str, Sequence[Measures]], forgetful: Sequence[str] = (), level: float = LEVEL) -> Verdict:
    """Draw conclusions from the runs of several policies, the r-th of each on the same requests.

    ``forgetful``: policies that drop tokens.
    """
    replications = min((len(each) for each in runs.values()), default=0)
    intervals = {
        policy: {
            m: measure_interval(m, values, level)
            for m in _WITH_INTERVAL
            if (values := replication_values(each, m)) is not None
        }
        for policy, each in runs.items()
    }
    means = {p: values for p, each in runs.items() if (values := replication_values(each, "e2e_mean")) is not None}
    unstable = [policy for policy, each in runs.items() if any(run["unstable"] for run in each)]
    failing = [policy for policy, each in runs.items() if any(run["failed_share"] for run in each)]
    ranked = {p: v for p, v in means.items() if p not in unstable and p not in failing and p != BOUND}
    ranking = rank(ranked, "e2e_mean", level) if ranked else None
    bound = means.get(BOUND)
    from_bound = {p: paired_ratio(v, bound, level) for p, v in means.items()} if bound and min(bound) > 0 else {}
    points = {p: (i[PARETO[0]].value, i[PARETO[1]].value) for p, i in intervals.items() if set(PARETO) <= i.keys()}
    front = pareto({p: point for p, point in points.items() if p not in failing and p != BOUND})
    from_best: dict[str, Interval] = {}
    if ranking is not None:
        from_best = dict(zip(ranking.names, ranking.comparison.differences, strict=True))
        # Policies outside the ranking are compared with its best too, each by itself.
        best = means[ranking.best]
        unranked = {p: v for p, v in means.items() if p not in from_best and len(v) == len(best)}
        from_best |= {p: paired_difference(v, best, level) for p, v in unranked.items()}
    line = _conclude(runs, ranking, from_bound, unstable, failing, forgetful)
    return Verdict(line, ranking, intervals, from_best, from_bound, tuple(front), replications, tuple(failing))


def _conclude(
    runs: Mapping[str, Sequence[Measures]],
    ranking: Ranking | None,
    from_bound: Mapping[str, Interval],
    unstable: Sequence[str],
    failing: Sequence[str],
    forgetful: Sequence[str],
) -> str:
    if ranking is None:
        if unstable and set(unstable) | set(failing) | {BOUND} >= set(runs):
            return (
                "unstable: arrivals outpace service under every policy without failed requests, so latencies depend on "
                "how long the run is; lower the rate"
            )
        return "no conclusion: every policy failed requests or completed none"
    remarks = [f"{len(unstable)} unstable left out"] if unstable else []
    remarks += [f"{len(failing)} with failed requests left out"] if failing else []
    if too_short := _too_short(runs, ranking):
        return "; ".join([too_short, *remarks])
    best, second = ranking.best, ranking.runner_up
    if second is None:
        return "; ".join([f"{best} has no competitor: there is nothing to compare it with", *remarks])
    among = "among policies without failed requests" if failing else "of all policies"
    tokens = " (which drops tokens)" if best in forgetful else ""
    lowest = f"{best}{tokens} has the lowest mean end-to-end latency {among}"
    oracle = f"; {from_bound[best].value:.2f} × {BOUND}" if best in from_bound else ""
    if ranking.holds or ranking.replications == 1 or not ranking.varies:
        margin = _percent_below(ranking.comparison.ratios[ranking.names.index(second)])
        line = f"{lowest}: {margin} below {second}{oracle}"
    else:
        behind = len(ranking.names) > 1 + len(ranking.ties)
        others = "; all others are slower" if behind else ""
        line = (
            f"no single best: {lowest}, but {ranking.replications} replications cannot distinguish it from "
            f"{', '.join(ranking.ties)}{others}{oracle}"
        )
    if ranking.replications == 1:
        remarks.append("this is one run: ask for --replications 5 to see whether the differences hold")
    elif not ranking.varies:
        remarks.append("all replications are identical: this workload does not depend on the seed")
    return "; ".join([line, *remarks])


def _too_short(runs: Mapping[str, Sequence[Measures]], ranking: Ranking) -> str:
    """Why the runs are too short for a conclusion; empty if they are not."""
    fewest = min(int(run["requests"] or 0) for policy in ranking.names for run in runs[policy])
    if fewest < FEWEST_REQUESTS:
        return f"too short: {fewest} requests say little about latency; ask for at least {FEWEST_REQUESTS}"
    best = runs[ranking.best]
    if 2 * sum(bool(run["too_short"]) for run in best) > len(best):
        return (
            f"too short: under {ranking.best} latencies do not settle within the first half of the run; "
            "ask for more requests"
        )
    return ""


def _percent_below(ratio: Interval) -> str:
    """How far the best is below another policy, in percent; ``ratio`` is the other's mean divided by the best's."""
    value = 1 - 1 / ratio.value
    if ratio.low == ratio.high or not math.isfinite(ratio.low) or ratio.low <= 0:
        return _percent(value)
    return f"{_percent(value)} ({_percent(1 - 1 / ratio.low)[:-2]} to {_percent(1 - 1 / ratio.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"
