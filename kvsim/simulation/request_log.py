"""What is known of the requests of a run, whichever server served them: how they fared, and their table."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.simulation.job import Job
from kvsim.simulation.latency_stats import LatencyStats

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
