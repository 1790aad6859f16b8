"""Watching whether requests still get anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvsim.errors import Livelock
from kvsim.simulation.job import Job
from policies import Policy

_LOOK_EVERY: Final = 1000
"""Steps without progress after which it is checked whether any can still come."""
_NAMED: Final = 4
"""Requests that a message describes; the others are only counted."""


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


def no_progress(now: float, jobs: Sequence[Job], policy: Policy, reason: str = "") -> Livelock:
    """The error that says which requests wait, for how many cells or blocks, and how many are free."""
    size, usage = policy.block_size, policy.usage()
    unit = f"blocks of {size} cells" if size > 1 else "cells"
    named = []
    for job in jobs[:_NAMED]:
        need = -(-job.tokens // size) - -(-job.computed // size)
        progress = f"{job.request.prompt_tokens} prompt tokens, {job.generated} generated"
        named.append(f"request {job.request.id} ({progress}) waits for {need}")
    others = f", and {len(jobs) - _NAMED} more wait" if len(jobs) > _NAMED else ""
    why = f" ({reason})" if reason else ""
    free = f"{usage.free // size} of {usage.capacity // size} {unit} are free"
    message = f"{policy.name}: no progress after {now:.3f} s{why}: {free}; {', '.join(named)}{others}"
    return Livelock(message, tuple([job.request.id for job in jobs]))
