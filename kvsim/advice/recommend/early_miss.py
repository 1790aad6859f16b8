"""Whether a run that is under way has missed a service level for certain, whatever its other requests do."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvsim.advice.recommend.slo import Bound, Slo
from kvsim.errors import UserError
from kvsim.experiments.measures import STATISTICS
from kvsim.simulation.job import Job

_ROUNDING = 1e-9
"""Share by which a sum must exceed its limit, so that rounding decides nothing."""


class MissedEarly(UserError):
    """The service level is missed, which was certain before the run had ended."""


class MissWatch:
    """Hears of each request that ends, and raises ``MissedEarly`` as soon as a bound is missed for certain."""

    def __init__(self, slo: Slo, n_requests: int):
        """``n_requests``: number of requests that will end in all."""
        self._bounds = [(_VALUES[_kind(bound)], _Limit(bound, n_requests)) for bound in slo.bounds]

    def __call__(self, job: Job) -> None:
        """A request has ended, well or not."""
        for value, limit in self._bounds:
            known = value(job)
            if known is not None and limit.exceeded_with(known):
                raise MissedEarly(f"{limit.bound.text or limit.bound.measure} is missed")


class _Limit:
    """A bound, and how much of what it bounds has been seen."""

    def __init__(self, bound: Bound, n_requests: int):
        self.bound = bound
        statistic = None if bound.is_share else STATISTICS.get(bound.measure.split("_")[1])
        self._counts = statistic is not None
        """Whether values above the limit are counted, for a quantile; otherwise values are added."""
        # A quantile is no less than the value of rank floor((n - 1) q) from 0. Where so many values are above the limit
        # that it is among them with n requests, it is with fewer.
        self._most = (
            bound.limit * n_requests * (1 + _ROUNDING)
            if statistic is None
            else n_requests - math.floor((n_requests - 1) * statistic) - 1
        )
        self._seen = 0.0

    def exceeded_with(self, value: float) -> bool:
        """Whether the bound is missed for certain now that this value has been seen too; seconds, or 0 or 1."""
        self._seen += value > self.bound.limit if self._counts else value
        return self._seen > self._most


def _kind(bound: Bound) -> str:
    """What is bounded: a latency, or a share of the requests."""
    return bound.measure if bound.is_share else bound.measure.split("_")[0]


def _of_completed(seconds: Callable[[Job], float]) -> Callable[[Job], float | None]:
    return lambda job: seconds(job) if job.status == "completed" else None


def _tpot(job: Job) -> float | None:
    """Seconds for each output token after the first; None where there is only that."""
    if job.status != "completed" or job.generated < 2:
        return None
    return (job.finished_s - job.first_token_s) / (job.generated - 1)


_VALUES: dict[str, Callable[[Job], float | None]] = {
    "ttft": _of_completed(lambda job: job.first_token_s - job.arrival_s),
    "tpot": _tpot,
    "e2e": _of_completed(lambda job: job.finished_s - job.arrival_s),
    "failed_share": lambda job: float(job.status != "completed"),
    "truncated_share": lambda job: float(job.status == "completed" and job.truncated),
}
"""What each bound is about, of one request; None where that does not count."""
