"""Errors that are not bugs in kvsim: wrong input, settings that cannot work, engines that differ from their model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.scenario.scenario import Scenario
    from kvsim.simulation.job import Job
    from policies import Policy

_NAMED = 4
"""Requests that a message describes; the others are only counted."""


class UserError(ValueError):
    """The user's input is wrong. The message has one line for each fault and says what is accepted."""


class NoTimes(UserError):
    """The machine profile was measured with another model or cache than is served, so nothing is known of times.

    The message has one line: what was measured, what is served, and how to get the times.
    """

    def __init__(self, message: str, scenario: Scenario | None = None):
        super().__init__(message)
        self.scenario = scenario
        """What was asked about, if known."""


class Divergence(Exception):
    """Two implementations that should agree do not: a bug in kvsim, or an engine that was built differently.

    The message is one line.
    """


class Livelock(UserError):
    """The server makes no progress and never will: these settings cannot serve this traffic.

    The message names the requests, how many cells or blocks they wait for, and how many are free.
    """

    def __init__(self, now: float, jobs: Sequence[Job], policy: Policy, reason: str = ""):
        self.requests = tuple(job.request.id for job in jobs)
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
        super().__init__(f"{policy.name}: no progress after {now:.3f} s{why}: {free}; {', '.join(named)}{others}")
