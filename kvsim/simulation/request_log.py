"""What is known of the requests of a run, whichever servers served them, and of how they queued; in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np

from kvsim.simulation.distribution import Distribution
from kvsim.simulation.job import Job
from kvsim.simulation.summary import FailureCounts

Progress = Callable[[int, float], None]
"""Called with the number of requests that have ended and the simulated time in seconds."""


class RequestLog:
    """Hears of each request as it ends; several servers of one run may share it."""

    def __init__(
        self, progress: Progress | None = None, *, keeps: bool = False, ended: Callable[[Job], None] | None = None
    ):
        """``keeps``: keep all requests, for tables; ``ended`` is called with each request that has ended."""
        self.latencies = LatencyStats()
        self.jobs: list[Job] = []
        """In the order in which they ended, where they are kept."""
        self._keeps = keeps
        self._progress = progress
        self._ended = ended

    def finish(self, job: Job) -> None:
        """A request has ended, well or not."""
        self.latencies.add(job)
        if self._keeps:
            self.jobs.append(job)
        if self._progress is not None:
            self._progress(self.latencies.ended, job.finished_s)
        if self._ended is not None:
            self._ended(job)


_QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

_ROWS: Final = 4096
"""Number of requests whose latencies are computed together."""

_LEAST: Final = 40
"""Fewest requests from which it can be told whether arrivals outpace service."""


class LatencyStats:
    """Counts and latencies of the requests that have ended; latencies are those of the completed ones, in seconds."""

    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.failures = FailureCounts()
        self.truncated = 0
        self.output_tokens = 0
        """Output tokens of the completed requests; so are the prompt tokens below."""
        self.prompt_tokens = 0
        self.first_s = math.inf
        """Arrival of the first request, seconds."""
        self.last_s = -math.inf
        """End of the last request, seconds."""
        self._latencies = {name: Distribution() for name in ("ttft_s", "tpot_s", "e2e_s")}
        self._rows: list[tuple[float, float, float, int]] = []
        """Arrival, first token, end and output tokens of completed requests that are not in the latencies yet."""

    def add(self, job: Job) -> None:
        """A request has ended, well or not."""
        self.ended += 1
        arrived, finished = job.arrival_s, job.finished_s
        if arrived < self.first_s:
            self.first_s = arrived
        if finished > self.last_s:
            self.last_s = finished
        if job.status != "completed":
            self.failed += 1
            self.failures.add(job)
            return
        tokens, first = job.generated, job.first_token_s
        self.truncated += job.truncated
        self.output_tokens += tokens
        self.prompt_tokens += job.request.prompt_tokens
        self._rows.append((arrived, first, finished, tokens))
        if len(self._rows) == _ROWS:
            self._settle()

    def _settle(self) -> None:
        if self._rows:
            arrived, first, finished, tokens = np.array(self._rows, dtype=np.float64).T
            several = tokens > 1
            self._latencies["ttft_s"].extend(first - arrived)
            self._latencies["tpot_s"].extend((finished - first)[several] / (tokens[several] - 1))
            self._latencies["e2e_s"].extend(finished - arrived)
            self._rows.clear()

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON; None where there is none."""
        self._settle()
        makespan = self.last_s - self.first_s if self.ended else 0.0
        return {
            "requests": self.ended,
            "completed": self.ended - self.failed,
            "failed": self.failed,
            "truncated": self.truncated,
            "failures": self.failures.summary(),
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "makespan_s": makespan,
            "throughput_tokens_per_s": self.output_tokens / makespan if makespan > 0 else None,
            **{name: _figures(values) for name, values in self._latencies.items()},
        }


class QueueMonitor:
    """Length of the queue, sampled four times: whenever another quarter of the requests has arrived."""

    def __init__(self, expected: int = 0):
        """``expected``: number of requests that will arrive in all."""
        self.arrived = 0
        self.admitted = 0
        """Number of requests that wait no more: they have started, or were refused."""
        self._marks = [expected * quarter // 4 for quarter in (1, 2, 3, 4)] if expected >= _LEAST else []
        self._seen: list[tuple[int, int, int]] = []
        """At each sample: requests that had arrived, that waited, and that had ended."""

    @property
    def samples_next(self) -> bool:
        """Whether it is sampled when the next request arrives."""
        return bool(self._marks) and self.arrived + 1 >= self._marks[0]

    def arrive(self, ended: int) -> None:
        """A request arrives; ``ended`` have ended by now."""
        self.arrived += 1
        if self._marks and self.arrived >= self._marks[0]:
            del self._marks[0]
            self._seen.append((self.arrived, self.waiting, ended))

    @property
    def waiting(self) -> int:
        """Number of requests that wait to be admitted."""
        return self.arrived - self.admitted

    @property
    def growth(self) -> float | None:
        """Growth of the queue per arrival over the second half of the requests; None if too few arrived or ended
        meanwhile."""
        if len(self._seen) < 4 or self._seen[3][2] - self._seen[1][2] < _LEAST // 4:
            return None
        (arrived, waiting, _), (last, left, _) = self._seen[1], self._seen[3]
        return (left - waiting) / (last - arrived)

    @property
    def unstable(self) -> bool:
        """Whether arrivals outpace service.

        The queue must grow from sample to sample, in the second half by at least a twentieth of the arrivals, and by
        more than three standard deviations of Poisson arrivals.
        """
        growth = self.growth
        if growth is None:
            return False
        queues = [waiting for _, waiting, _ in self._seen]
        rises = all(a <= b for a, b in pairwise(queues))
        several = self._seen[3][0] - self._seen[1][0]
        return rises and growth >= 0.05 and growth * several > 3 * math.sqrt(several)

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "waiting_at_last_arrival": self._seen[3][1] if len(self._seen) == 4 else None,
            "growth_per_arrival": self.growth,
            "unstable": self.unstable,
        }

    def warnings(self) -> list[str]:
        """One line if latencies grow with the length of the run, and so say little about the system."""
        if not self.unstable:
            return []
        return [
            f"unstable: arrivals outpace service; the queue grew by {self.growth:.2f} requests with each arrival, "
            f"to {self._seen[3][1]:,}, so latencies depend on how long the run was"
        ]


def _figures(values: Distribution) -> dict[str, float | None]:
    if len(values) == 0:
        return dict.fromkeys(("mean", *_QUANTILES))
    return {"mean": values.mean, **dict(zip(_QUANTILES, values.quantiles(list(_QUANTILES.values())), strict=True))}
