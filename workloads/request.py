"""A request, and what hands requests out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One call to the server."""

    id: int
    """Its number in the stream, from 0."""
    arrival_s: float
    """Seconds from the start of the run. In a closed loop, 0: it is sent when a user is ready."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will generate, the first of them at the end of prefill; at least 1."""
    think_s: float = 0.0
    """Closed loop only: seconds that the user waits before sending it."""


class Workload(Protocol):
    """A stream of requests, the same at every iteration."""

    @property
    def n_requests(self) -> int:
        """How many requests the stream holds."""
        ...

    @property
    def users(self) -> int | None:
        """Closed loop: how many users send them by turns. None: each comes at its own arrival time."""
        ...

    def __iter__(self) -> Iterator[Request]: ...


class WorkloadError(ValueError):
    """What the user gave cannot be read. The message is one line: file, row or key, what, what is accepted."""
