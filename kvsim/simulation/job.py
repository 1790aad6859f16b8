"""A request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import simpy

from kvsim.scenario.content import content_of
from policies import NOTHING, Content, Exported, SequencePlan
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
    FULL = "full"
    """Its answer filled its slot, and the server neither shifts the context nor ends the answer."""
    OUT_OF_CELLS = "no slot"  # llama.cpp's words, which ``--json`` keeps.
    """A step found no free cells for it, and there was nothing left to give up."""
    CANCELLED = "cancelled"
    """Its client has gone."""


@dataclass(slots=True, eq=False)
class Job:
    """A request, how far it has come, and when (seconds of simulated time, NaN until it happens)."""

    request: Request
    arrival_s: float
    done: simpy.Event | None = None
    """Triggered when the request ends, if its client waits for that."""
    status: Status = "waiting"
    error: str = ""
    """Why it failed, in words, with the numbers."""
    failure: FailureKind = FailureKind.NONE
    exceeded: int = 0
    """Limit that its prompt exceeded when it failed, in tokens; 0 if there was none."""
    refusal: str = ""
    """What the policy said when it failed for want of cells, with the sizes."""
    computed: int = 0
    """Number of tokens whose K and V are in the cache."""
    generated: int = 0
    """Number of output tokens so far."""
    discarded: int = 0
    """Number of tokens dropped by context shifts."""
    slot: int = -1
    """Its slot while it runs, which is also the number of its sequence."""
    admission: int = 0
    """Admission index: 1 for the first request that was given a slot, then 2, and so on; 0 before."""
    preemptions: int = 0
    """Number of times that it was preempted."""
    furthest: int = 0
    """Largest value that ``computed`` has had."""
    cached: int = 0
    """Number of tokens found in the prefix cache or in a kept slot when it first started."""
    exported: Exported | None = None
    """Its cells in host memory, while it waits to be continued."""
    content: Content = NOTHING
    """Content of its prompt and its whole output."""

    prefill_only: bool = False
    """Whether it ends with its prompt, and its cells are held until another server has read them."""
    source: Job | None = None
    """The job whose cells, on another server, hold its prompt and are to be read; None where there are none."""

    plan: SequencePlan | None = None
    """Plan of its sequence, once it has been asked for."""
    drafted: int = 0
    """Number of tokens that have been drafted for it, to be checked in its next pass."""

    def __post_init__(self) -> None:
        self.content = content_of(self.request)

    truncated: bool = False
    """Whether it ended early because its sequence was full."""
    started_s: float = float("nan")
    first_token_s: float = float("nan")
    finished_s: float = float("nan")

    @property
    def tokens(self) -> int:
        """Number of prompt and output tokens that have not been dropped."""
        return self.request.prompt_tokens + self.generated - self.discarded

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status in ("completed", "failed")

    @property
    def prefilled(self) -> bool:
        """Whether its first output token is out."""
        return self.generated > 0
