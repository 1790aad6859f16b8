"""A request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import simpy

from workloads import Request

Status = Literal["waiting", "running", "completed", "failed"]


@dataclass(slots=True, eq=False)
class Job:
    """A request, how far it has come, and when (seconds of simulated time, NaN until it happens)."""

    request: Request
    arrival_s: float
    done: simpy.Event | None = None
    """Triggered at the end, where somebody waits for it."""
    status: Status = "waiting"
    error: str = ""
    computed: int = 0
    """Tokens whose K and V are in the cache."""
    generated: int = 0
    """Output tokens so far."""
    discarded: int = 0
    """Tokens forgotten by context shifts."""
    truncated: bool = False
    """Ended early because its slot's context was full."""
    started_s: float = float("nan")
    first_token_s: float = float("nan")
    finished_s: float = float("nan")

    @property
    def tokens(self) -> int:
        """Tokens known and not forgotten: prompt and output."""
        return self.request.prompt_tokens + self.generated - self.discarded

    @property
    def prefilled(self) -> bool:
        """Whether it generates: its first token is out."""
        return self.generated > 0
