"""Watching whether requests still get anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvsim.simulation.job import Job

_LOOK_EVERY: Final = 1000
"""Steps without progress after which it is checked whether any can still come."""


class ProgressWatch:
    """Counts the steps since a request last had more tokens computed than ever before."""

    def __init__(self) -> None:
        self._steps = 0

    def count_step(self, progressed: bool) -> bool:
        """Count a step, in which a request got further than ever before or not; return whether to ask ``is_stuck``."""
        self._steps = 0 if progressed else self._steps + 1
        return self._steps != 0 and self._steps % _LOOK_EVERY == 0

    def is_stuck(self, jobs: Iterable[Job]) -> bool:
        """Whether none of the jobs, which are all that run or wait, will ever get further.

        That is certain once all tokens that are known could have been computed anew since the last progress.
        """
        return self._steps > sum(job.tokens for job in jobs)
