"""A request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import simpy

from kvsim.scenario.content import content_of
from policies import NOTHING, Content, SequencePlan
from workloads import Request

Status = Literal["waiting", "running", "preempted", "completed", "failed"]


class FailureKind(StrEnum):
    """Why a request ended without all its output."""

    NONE = ""
    """It has not failed."""
    CONTEXT = "context"
    """Its prompt is longer than a sequence may be."""
    BATCH = "batch"
    """Its prompt is longer than a step, and prefill is not chunked."""
    CACHE = "cache"
    """It would not fit even if it had the cache to itself."""
    NO_SLOT = "no slot"
    """A step found no free cells for it, and there was nothing left to give up."""
    CANCELLED = "cancelled"
    """Its client has gone."""


@dataclass(slots=True, eq=False)
class Job:
    """A request, how far it has come, and when (seconds of simulated time, NaN until it happens)."""

    request: Request
    arrival_s: float
    done: simpy.Event | None = None
    """Triggered at the end, where somebody waits for it."""
    status: Status = "waiting"
    error: str = ""
    """Why it failed, in words, with the numbers."""
    failure: FailureKind = FailureKind.NONE
    computed: int = 0
    """Tokens whose K and V are in the cache."""
    generated: int = 0
    """Output tokens so far."""
    discarded: int = 0
    """Tokens forgotten by context shifts."""
    slot: int = -1
    """The sequence that it has while it runs."""
    admission: int = 0
    """When it was admitted, counted in seatings, where the order of those that run matters."""
    preemptions: int = 0
    """How often it had to give up its cells."""
    furthest: int = 0
    """The most tokens that it ever had computed."""
    cached: int = 0
    """Tokens that it found in the prefix cache or in a kept slot, when it first started."""
    ticket: int | None = None
    """By which it can be swapped in again."""
    content: Content = NOTHING
    """What it says: the prompt and the whole answer."""

    plan: SequencePlan | None = None
    """What is known of its sequence, once that was asked for."""

    def __post_init__(self) -> None:
        self.content = content_of(self.request)

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
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status in ("completed", "failed")

    @property
    def prefilled(self) -> bool:
        """Whether it generates: its first token is out."""
        return self.generated > 0
