"""What a comparison of policies supports: a ranking, intervals, and a conclusion in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvsim.errors import counted
from kvsim.experiments.estimates import LEVEL, Interval, LowestMean, lowest_mean, paired_difference, paired_ratio
from kvsim.experiments.measures import MORE_IS_BETTER, Measures, failed_requests, measure_interval

BOUND = "oracle"
"""The policy that knows the future: a bound on the others, never a recommendation."""

PARETO = ("e2e_mean", "memory_bytes")
"""The two measures of the Pareto front."""

FEWEST_REQUESTS = 50
"""Runs of fewer requests support no conclusion about latency."""


Key = TypeVar("Key")

_MOST_FAILED = 0.2
"""Largest share of failed requests for which ``max_failed`` is suggested."""


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
    """Policies ranked by mean end-to-end latency, one of each group in ``identical``; without those ``not_ranked``."""
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
    """Policies that failed requests."""
    not_ranked: Mapping[str, str] = field(default_factory=dict)
    """Policies that take no part in the ranking, with the reason; the oracle never does and is not listed."""
    identical: tuple[tuple[str, ...], ...] = ()
    """Groups of ranked policies under which every request of every run had the same times."""
    max_failed: float = 0.0
    """Share of its requests that a ranked policy may have failed."""

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
            "max_failed": self.max_failed,
            "not_ranked": dict(self.not_ranked),
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
) -> Verdict:
    """Draw conclusions from the runs of several policies, the r-th of each on the same requests.

    ``forgetful``: policies that drop tokens; where one is best, the conclusion says as well which of the others is.
    ``clairvoyant``: policies that know what no server knows, and are not ranked. ``max_failed``: share of its requests
    that a policy may have failed and still be ranked. ``times``: digests of the times of all requests, one for each
    run; policies are called identical where all of them are equal.
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
    reasons = {policy: reason_not_to_rank(each, max_failed) for policy, each in runs.items() if policy != BOUND}
    reasons |= {policy: NotRanked("with lengths known in advance") for policy in clairvoyant if policy in reasons}
    not_ranked = {policy: reason for policy, reason in reasons.items() if reason is not None}
    identical = identical_groups({p: each for p, each in (times or {}).items() if p in means and p not in not_ranked})
    repeated = {policy for group in identical for policy in group[1:]}
    ranked = {p: v for p, v in means.items() if p not in not_ranked and p not in repeated and p != BOUND}
    ranking = rank(ranked, "e2e_mean", level) if ranked else None
    bound = means.get(BOUND)
    from_bound = {p: paired_ratio(v, bound, level) for p, v in means.items()} if bound and min(bound) > 0 else {}
    points = {p: (i[PARETO[0]].value, i[PARETO[1]].value) for p, i in intervals.items() if set(PARETO) <= i.keys()}
    # An unstable policy is on the front: its memory is what it is.
    failing = tuple(policy for policy, each in runs.items() if failed_requests(each)[0])
    excluded = {policy for policy in failing if _fails_too_many(runs[policy], max_failed)}
    front = pareto({p: point for p, point in points.items() if p not in {*excluded, *clairvoyant, BOUND}})
    from_best: dict[str, Interval] = {}
    if ranking is not None:
        from_best = dict(zip(ranking.names, ranking.comparison.differences, strict=True))
        # Policies outside the ranking are compared with its best too, each by itself.
        best = means[ranking.best]
        unranked = {p: v for p, v in means.items() if p not in from_best and len(v) == len(best)}
        from_best |= {p: paired_difference(v, best, level) for p, v in unranked.items()}
    same_answers = {p: v for p, v in ranked.items() if p not in forgetful}
    second = rank(same_answers, "e2e_mean", level) if same_answers and len(same_answers) < len(ranked) else None
    parts = _Conclusion(runs, ranking, from_bound, not_ranked, identical, tuple(forgetful), max_failed, second)
    return Verdict(
        parts.line(),
        ranking,
        intervals,
        from_best,
        from_bound,
        tuple(front),
        replications,
        failing,
        {policy: reason.why for policy, reason in not_ranked.items()},
        identical,
        max_failed,
    )


class NotRanked(NamedTuple):
    """Why a policy takes no part in a ranking."""

    why: str
    """In words, with the numbers."""
    failed_share: float = 0.0
    """Share of its requests that failed, if that is the reason."""
    unstable: bool = False


def reason_not_to_rank(runs: Sequence[Measures], max_failed: float = 0.0) -> NotRanked | None:
    """Why a policy takes no part in a ranking: it failed more than a share of its requests, or it is unstable."""
    unstable = any(run["unstable"] for run in runs)
    if _fails_too_many(runs, max_failed):
        failed, requests = failed_requests(runs)
        share = failed / requests
        return NotRanked(f"failed {failed:,} of {requests:,} requests ({100 * share:.1f} %)", share, unstable)
    return NotRanked("is unstable", unstable=True) if unstable else None


def limit_that_includes(not_ranked: Mapping[Key, NotRanked]) -> tuple[str, list[Key]]:
    """The value of ``--max-failed`` with which policies that failed requests would be ranked, and which these are.

    Policies that failed more than a fifth of their requests, or are unstable, are not among them. Both are empty if
    there is none.
    """
    included = {key: why.failed_share for key, why in not_ranked.items() if 0 < why.failed_share <= _MOST_FAILED}
    included = {key: share for key, share in included.items() if not not_ranked[key].unstable}
    if not included:
        return "", []
    return f"{math.ceil(100 * max(included.values()) - 1e-9)}%", list(included)


def _fails_too_many(runs: Sequence[Measures], max_failed: float) -> bool:
    failed, requests = failed_requests(runs)
    return failed > max_failed * requests + 1e-9


def identical_groups(times: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more policies with the same digests of times, in order; the oracle is in none."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for policy, digests in times.items():
        if policy != BOUND and all(digests):
            groups.setdefault(tuple(digests), []).append(policy)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


@dataclass(frozen=True)
class _Conclusion:
    """The facts that a conclusion is drawn from, and its parts in words; fields as in ``judge`` and ``Verdict``."""

    runs: Mapping[str, Sequence[Measures]]
    ranking: Ranking | None
    from_bound: Mapping[str, Interval]
    not_ranked: Mapping[str, NotRanked]
    identical: tuple[tuple[str, ...], ...]
    forgetful: tuple[str, ...]
    max_failed: float
    same_answers: Ranking | None = None
    """The ranking of those that drop no tokens, where others are ranked too."""

    def line(self) -> str:
        """The conclusion in one line."""
        ranking = self.ranking
        if ranking is None:
            return "; ".join([self._none_ranked(), *self._left_out()])
        if too_short := _too_short(self.runs, ranking):
            return "; ".join([too_short, *self._left_out()])
        second, alike = ranking.runner_up, self._alike(ranking.best)
        if second is None and len(alike) > 1:
            return "; ".join([f"no difference: {_and(alike)} are identical in every request", *self._left_out()])
        if second is None:
            alone = f"{ranking.best} has no competitor: there is nothing to compare it with"
            return "; ".join([alone, *self._left_out()])
        oracle = f"; {self.from_bound[ranking.best].value:.2f} × {BOUND}" if ranking.best in self.from_bound else ""
        line = self._best_of(ranking, self._among()) + oracle
        if self.same_answers is not None and ranking.best in self.forgetful:
            line += f"; of those that drop none, {self._best_of(self.same_answers)}"
        remarks = self._left_out()
        if ranking.replications == 1:
            remarks.append("this is one run: ask for --replications 5 to see whether the differences hold")
        elif not ranking.varies:
            remarks.append("all replications are identical: this workload does not depend on the seed")
        return "; ".join([line, *remarks])

    def _best_of(self, ranking: Ranking, among: str = "") -> str:
        """Which policies of a ranking have the lowest latency, and by how much; ``among``: of which they are it."""
        second, best = ranking.runner_up, self._alike(ranking.best)
        if second is None:
            return self._lowest(best, among)
        if ranking.holds or ranking.replications == 1 or not ranking.varies:
            margin = _percent_below(ranking.comparison.ratios[ranking.names.index(second)])
            return f"{self._lowest(best, among)}: {margin} below {_and(self._alike(second))}"
        behind = len(ranking.names) > 1 + len(ranking.ties)
        others = "; all others are slower" if behind else ""
        ties = [policy for tie in ranking.ties for policy in self._alike(tie)]
        return (
            f"no single best: {self._lowest(best, among)}, but {ranking.replications} replications cannot distinguish "
            f"{'them' if len(best) > 1 else 'it'} from {', '.join(ties)}{others}"
        )

    def _none_ranked(self) -> str:
        unstable = any(reason.unstable for reason in self.not_ranked.values())
        if unstable and set(self.not_ranked) | {BOUND} >= set(self.runs):
            return (
                "unstable: arrivals outpace service under every policy without failed requests, so latencies depend on "
                "how long the run is; lower the rate"
            )
        return "no conclusion: every policy failed requests or completed none"

    def _alike(self, policy: str) -> tuple[str, ...]:
        """The policy and those that are identical to it."""
        return next((group for group in self.identical if policy in group), (policy,))

    def _among(self) -> str:
        """Among which policies the best is looked for."""
        if self.max_failed and any(failed_requests(each)[0] for each in self.runs.values()):
            return f"among policies that failed at most {100 * self.max_failed:g} % of the requests"
        if any(_fails_too_many(each, self.max_failed) for each in self.runs.values()):
            return "among policies without failed requests"
        return "of all policies"

    def _lowest(self, best: Sequence[str], among: str) -> str:
        """Which policies have the lowest latency, and among which."""
        names = [self._labelled(policy) for policy in best]
        verb = "are identical in every request and have" if len(best) > 1 else "has"
        return f"{_and(names)} {verb} the lowest mean end-to-end latency {among}".rstrip()

    def _labelled(self, policy: str) -> str:
        """The name of a policy, with what must be known to choose it."""
        failed, requests = failed_requests(self.runs[policy])
        labels = ["drops tokens"] if policy in self.forgetful else []
        labels += [f"failed {100 * failed / requests:.1f} %"] if failed else []
        return f"{policy} (which {' and '.join(labels)})" if labels else policy

    def _left_out(self) -> list[str]:
        """Which policies are left out, why, and what would include them."""
        if not self.not_ranked:
            return []
        policies: dict[str, list[str]] = {}
        for policy, reason in self.not_ranked.items():
            policies.setdefault(reason.why, []).append(policy)
        said = [
            f"{_and(each)} {why.replace('is ', 'are ', 1) if len(each) > 1 and why.startswith('is ') else why}"
            for why, each in policies.items()
        ]
        parts = ["left out: " + ", ".join(said)]
        limit, included = limit_that_includes(self.not_ranked)
        if included:
            all_of_them = len(included) == len(self.not_ranked)
            what = ("it" if len(included) == 1 else "them") if all_of_them else ", ".join(included)
            parts.append(f"--max-failed {limit} would include {what}")
        return parts


def _too_short(runs: Mapping[str, Sequence[Measures]], ranking: Ranking) -> str:
    """Why the runs are too short for a conclusion; empty if they are not."""
    fewest = min(int(run["requests"] or 0) for policy in ranking.names for run in runs[policy])
    if fewest < FEWEST_REQUESTS:
        return (
            f"too short: {counted(fewest, 'request')} can say little about latency; ask for at least {FEWEST_REQUESTS}"
        )
    best = runs[ranking.best]
    if 2 * sum(bool(run["too_short"]) for run in best) > len(best):
        return (
            f"too short: under {ranking.best} latencies do not settle within the first half of the run; "
            "ask for more requests"
        )
    return ""


def _percent_below(ratio: Interval) -> str:
    """How far the best is below another policy, in percent; ``ratio`` is the other's mean divided by the best's."""
    value = _percent(1 - 1 / ratio.value)
    if ratio.low == ratio.high or not math.isfinite(ratio.low) or ratio.low <= 0:
        return value
    low, high = _percent(1 - 1 / ratio.low), _percent(1 - 1 / ratio.high)
    return value if low == high == value else f"{value} ({low.removesuffix(' %')} to {high})"


def _percent(share: float) -> str:
    if abs(share) < 0.0005:
        return "less than 0.1 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
