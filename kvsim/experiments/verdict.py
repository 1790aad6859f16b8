"""What the numbers of several policies support, in words that a reader can repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.experiments.estimates import LEVEL, Best, Interval, best_of, paired, ratio
from kvsim.experiments.measures import MORE_IS_BETTER, Measures, over_runs

BOUND = "oracle"
"""The policy that bounds the others; it is no choice."""

PARETO = ("e2e_mean", "memory_bytes")
"""Between which the trade is shown."""

FEW = 50
"""Requests below which nothing is said to have settled."""


@dataclass(frozen=True)
class Ranking:
    """Which of several policies does best by one measure."""

    measure: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    """Of each its mean over the replications that all have."""
    found: Best
    """Of the values, turned round where more is better; ``found.ratios`` are of the measure itself."""
    replications: int
    spread: bool = True
    """Whether any replication differs from another; a trace that is replayed does not know seeds."""

    @property
    def best(self) -> str:
        """Whose mean is best."""
        return self.names[self.found.lowest]

    @property
    def order(self) -> list[int]:
        """All, from the best on."""
        sign = -1 if self.measure in MORE_IS_BETTER else 1
        return sorted(range(len(self.names)), key=lambda i: (i != self.found.lowest, sign * self.values[i]))

    @property
    def runner_up(self) -> str | None:
        """Who comes second."""
        return self.names[self.order[1]] if len(self.names) > 1 else None

    @property
    def ties(self) -> tuple[str, ...]:
        """Those that cannot be told from the best."""
        return tuple(self.names[i] for i in self.order if i in self.found.ties)

    @property
    def holds(self) -> bool:
        """Whether the best is better than all others with the level asked for, all comparisons together."""
        return self.replications > 1 and self.spread and not self.found.ties


def rank(values: Mapping[str, Sequence[float]], measure: str, level: float = LEVEL) -> Ranking:
    """Rank policies by a measure of their replications, the r-th of each with the same seed.

    Where some have made more replications than others, those that all have count. Raises ``ValueError`` for no
    policies, or one without replications.
    """
    if not values:
        raise ValueError("no policies to rank")
    common = min(len(each) for each in values.values())
    samples = np.array([list(each)[:common] for each in values.values()], dtype=np.float64)
    found = best_of(-samples if measure in MORE_IS_BETTER else samples, level)
    means = tuple(float(mean) for mean in samples.mean(axis=1))
    return Ranking(measure, tuple(values), means, found, common, bool((samples != samples[:, :1]).any()))


def column(runs: Sequence[Measures], measure: str) -> list[float] | None:
    """A measure of all replications; None where one of them cannot say."""
    found = [run[measure] for run in runs]
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) and known else None


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Those that no other beats in one coordinate without losing in the other, in order; less is better."""
    front: list[str] = []
    lowest = math.inf
    for name, (_, other) in sorted(points.items(), key=lambda item: item[1]):
        if other < lowest:
            front.append(name)
            lowest = other
    return front


@dataclass(frozen=True)
class Verdict:
    """What a comparison of policies supports."""

    line: str
    """The conclusion, one line."""
    ranking: Ranking | None
    """By mean end-to-end latency, among those that failed nothing and are stable; the bound is not among them."""
    intervals: dict[str, dict[str, Interval]]
    """Of each policy, of each latency and the memory, over the replications."""
    from_best: dict[str, Interval]
    """Of each policy's mean end-to-end latency, less the best's, in pairs; together they hold with the level."""
    from_bound: dict[str, Interval]
    """Of each policy's mean end-to-end latency, over the oracle's, in pairs; each by itself holds with the level."""
    front: tuple[str, ...]
    """The policies that no other beats in both mean end-to-end latency and memory."""
    replications: int
    failing: tuple[str, ...] = ()
    """Policies that failed requests: they are not on the front."""

    def trade(self) -> dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]]:
        """Of each policy mean end-to-end latency (seconds) and memory (bytes), each as (value, low, high)."""
        found = {}
        for policy, each in self.intervals.items():
            if set(PARETO) <= each.keys():
                latency, memory = (each[measure] for measure in PARETO)
                ends = (latency.value, latency.low, latency.high), (memory.value, memory.low, memory.high)
                found[policy] = ends
        return found

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` gains by it; of one replication there are no intervals."""
        told: dict[str, Any] = {
            "replications": self.replications,
            "conclusion": self.line,
            "pareto": list(self.front),
        }
        if self.replications > 1:
            told |= {
                "intervals": {p: {m: _ends(i) for m, i in each.items()} for p, each in self.intervals.items()},
                "best": None if self.ranking is None else self.ranking.best,
                "e2e_mean_less_best": {p: _ends(i) for p, i in self.from_best.items()},
                "e2e_mean_over_oracle_interval": {p: _ends(i) for p, i in self.from_bound.items()},
            }
        return told


def _ends(interval: Interval) -> dict[str, float | None]:
    """As JSON has it: None for an end that is infinite."""
    ends = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {key: value if math.isfinite(value) else None for key, value in ends.items()}


_SHOWN = (
    *(f"{key}_{name}" for key in ("ttft", "tpot", "e2e") for name in ("mean", "p50", "p95", "p99")),
    "memory_bytes",
)


def judge(runs: Mapping[str, Sequence[Measures]], forgetful: Sequence[str] = (), level: float = LEVEL) -> Verdict:
    """Judge policies by their runs, the r-th of each on the same requests. ``forgetful`` ones drop tokens."""
    replications = min((len(each) for each in runs.values()), default=0)
    intervals = {
        policy: {m: over_runs(m, values, level) for m in _SHOWN if (values := column(each, m)) is not None}
        for policy, each in runs.items()
    }
    means = {policy: values for policy, each in runs.items() if (values := column(each, "e2e_mean")) is not None}
    unstable = [policy for policy, each in runs.items() if any(run["unstable"] for run in each)]
    failing = [policy for policy, each in runs.items() if any(run["failed_share"] for run in each)]
    fair = {p: v for p, v in means.items() if p not in unstable and p not in failing and p != BOUND}
    ranking = rank(fair, "e2e_mean", level) if fair else None
    bound = means.get(BOUND)
    over = {p: ratio(v, bound, level) for p, v in means.items()} if bound and min(bound) > 0 else {}
    kept = {p: (i[PARETO[0]].value, i[PARETO[1]].value) for p, i in intervals.items() if set(PARETO) <= i.keys()}
    front = pareto({p: at for p, at in kept.items() if p not in failing and p != BOUND})
    line = _conclude(runs, ranking, over, unstable, failing, forgetful)
    away = {} if ranking is None else dict(zip(ranking.names, ranking.found.differences, strict=True))
    if ranking is not None:
        # Those that take no part in the ranking are set beside it, each by itself.
        best = means[ranking.best]
        away |= {p: paired(v, best, level) for p, v in means.items() if p not in away and len(v) == len(best)}
    return Verdict(line, ranking, intervals, away, over, tuple(front), replications, tuple(failing))


def _conclude(
    runs: Mapping[str, Sequence[Measures]],
    ranking: Ranking | None,
    over: Mapping[str, Interval],
    unstable: Sequence[str],
    failing: Sequence[str],
    forgetful: Sequence[str],
) -> str:
    if ranking is None:
        if unstable and set(unstable) | set(failing) | {BOUND} >= set(runs):
            return (
                "unstable: arrivals outpace service under every policy that failed nothing, so that latencies tell how "
                "long the run was; lower the rate"
            )
        return "no conclusion: every policy failed requests, or completed none"
    aside = [f"{len(unstable)} unstable left out"] if unstable else []
    aside += [f"{len(failing)} that failed requests left out"] if failing else []
    among = "among policies that failed nothing" if failing else "of all"
    best = ranking.best
    few = [p for p in ranking.names if min(run["requests"] or 0 for run in runs[p]) < FEW]
    if few:
        least = min(int(run["requests"] or 0) for p in few for run in runs[p])
        return _with(f"too short: {least} requests say little of a latency; ask for at least {FEW}", aside)
    short = [p for p in ranking.names if 2 * sum(bool(run["too_short"]) for run in runs[p]) > len(runs[p])]
    if best in short:
        return _with(
            f"too short: under {best} latencies do not settle within the first half of the run; ask for more requests",
            aside,
        )
    if len(ranking.names) == 1:
        return _with(f"{best} is alone: nothing to compare it with", aside)
    tokens = " (which forgets tokens)" if best in forgetful else ""
    said = f"{best}{tokens} has the lowest mean end-to-end latency {among}"
    second = str(ranking.runner_up)
    lead = ranking.found.ratios[ranking.names.index(second)]
    if ranking.replications == 1:
        aside.append("differences are of one run: ask for --replications 5 to know whether they hold")
        return _with(f"{said}: {_below(lead)} below {second}{_of_bound(over, best)}", aside)
    if not ranking.spread:
        aside.append("all replications are the same: seeds make no difference to this workload")
        return _with(f"{said}: {_below(lead)} below {second}{_of_bound(over, best)}", aside)
    if ranking.holds:
        return _with(f"{said}: {_below(lead)} below {second}{_of_bound(over, best)}", aside)
    ties = ranking.ties
    behind = [name for name in ranking.names if name != best and name not in ties]
    also = "; all others are behind" if behind else ""
    tied = ", ".join(ties)
    return _with(
        f"no single best: {best}{tokens} has the lowest mean end-to-end latency {among}, but {ranking.replications} "
        f"replications cannot tell it from {tied}{also}{_of_bound(over, best)}",
        aside,
    )


def _with(line: str, aside: Sequence[str]) -> str:
    return "; ".join([line, *aside])


def _below(lead: Interval) -> str:
    """By how much the best is below another, ``lead`` being the other's mean over the best's."""
    value = 1 - 1 / lead.value
    if lead.low == lead.high or not math.isfinite(lead.low) or lead.low <= 0:
        return _percent(value)
    return f"{_percent(value)} ({_percent(1 - 1 / lead.low)[:-2]} to {_percent(1 - 1 / lead.high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _of_bound(over: Mapping[str, Interval], best: str) -> str:
    return f"; {over[best].value:.2f} x {BOUND}" if best in over else ""
