"""Policies ranked by a measure, and why some of them are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from kvsim.experiments.estimates import LEVEL, LowestMean, lowest_mean
from kvsim.experiments.measures import MORE_IS_BETTER, Measures, failed_requests

BOUND = "oracle"
"""The policy that knows the future: a bound on the others, never a recommendation."""

_MOST_FAILED = 0.2
"""Largest share of failed requests for which ``max_failed`` is suggested."""

Key = TypeVar("Key")


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
    if fails_too_many(runs, max_failed):
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


def fails_too_many(runs: Sequence[Measures], max_failed: float) -> bool:
    """Whether more than a share of the requests failed."""
    failed, requests = failed_requests(runs)
    return failed > max_failed * requests + 1e-9


def identical_groups(times: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more policies with the same digests of times, in order; the oracle is in none."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for policy, digests in times.items():
        if policy != BOUND and all(digests):
            groups.setdefault(tuple(digests), []).append(policy)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
