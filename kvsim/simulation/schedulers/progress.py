"""Watching whether requests still get anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvsim.simulation.job import Job

_LOOK_EVERY = 1000
"""Steps without progress after which it is checked whether any can still come."""


class ProgressWatch:
    """Counts the steps since a request last had more tokens computed than ever before."""

    def __init__(self) -> None:
        self._steps = 0

    def progressed(self) -> None:
        """A request had more tokens computed than ever before in the step that is about to be counted."""
        self._steps = -1

    def is_stuck(self, jobs: Callable[[], Iterable[Job]]) -> bool:
        """Count one step; return whether no request will ever get further.

        That is certain once all tokens that are known could have been computed anew since the last progress. ``jobs``:
        all that run or wait.
        """
        self._steps += 1
        if self._steps == 0 or self._steps % _LOOK_EVERY:
            return False
        return self._steps > sum(job.tokens for job in jobs())
