"""What can go wrong other than through a fault of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.simulation.job import Job
    from policies import Policy

_NAMED = 4
"""Requests that a message names; of the others it gives the number."""


class UserError(ValueError):
    """The user's input is wrong. The message is one line (a line for each fault) and says what is accepted."""


class Divergence(Exception):
    """Two that should do the same did not: a fault of ours, or a build of an engine that differs. One line."""


class Livelock(UserError):
    """The server makes no progress and never will: these settings cannot serve this traffic.

    The message names the requests, what they wait for, and what there is.
    """

    def __init__(self, now: float, jobs: Sequence[Job], policy: Policy, reason: str = ""):
        self.requests = tuple(job.request.id for job in jobs)
        size, usage = policy.block_size, policy.usage()
        unit = f"blocks of {size} cells" if size > 1 else "cells"
        named = []
        for job in jobs[:_NAMED]:
            need = -(-job.tokens // size) - -(-job.computed // size)
            said = f"{job.request.prompt_tokens} prompt tokens, {job.generated} generated"
            named.append(f"request {job.request.id} ({said}) waits for {need}")
        others = f", and {len(jobs) - _NAMED} more wait" if len(jobs) > _NAMED else ""
        why = f" ({reason})" if reason else ""
        free = f"{usage.free // size} of {usage.capacity // size} {unit} are free"
        super().__init__(f"{policy.name}: no progress after {now:.3f} s{why}: {free}; {', '.join(named)}{others}")
