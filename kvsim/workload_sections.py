"""The ``[workload]`` section of a scenario: one class for each kind, which knows how to build its request stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PositiveInt, Tag, field_validator

import workloads
from kvsim.length_sections import AnyLengths, FixedLengths, LognormalLengths
from kvsim.section import Section
from kvsim.trace_sections import (
    TRACES,
    AzureWorkload,
    BurstGptWorkload,
    MooncakeWorkload,
    RagPulseWorkload,
    TableWorkload,
    WekaWorkload,
)

_CHAT_PROMPT = LognormalLengths(kind="lognormal", mu=4.2, sigma=0.9, min=4, max=400)
_CHAT_OUTPUT = LognormalLengths(kind="lognormal", mu=4.0, sigma=0.8, min=1, max=300)


class Generated(Section):
    """What all generated workloads of single requests have."""

    count_key: ClassVar[str] = "requests"
    """The key that says how many."""
    requests: PositiveInt = 400
    """How many."""
    prompt_tokens: AnyLengths = _CHAT_PROMPT
    output_tokens: AnyLengths = _CHAT_OUTPUT

    def _synthetic(self, seed: int, gaps: workloads.Gaps, users: int | None = None) -> workloads.Workload:
        return workloads.Synthetic(
            seed, self.requests, gaps, self.prompt_tokens.build(), self.output_tokens.build(), users
        )


class PoissonWorkload(Generated):
    """Independent arrivals, ``rate`` requests/s."""

    kind: Literal["poisson"]
    rate: Annotated[float, Field(ge=1e-6, le=1e9)] = 20.0

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream."""
        return self._synthetic(seed, workloads.poisson_gaps(self.rate))


class GammaWorkload(Generated):
    """Bursty arrivals: gamma gaps with coefficient of variation ``cv``."""

    kind: Literal["gamma"]
    rate: Annotated[float, Field(ge=1e-6, le=1e9)] = 20.0
    cv: Annotated[float, Field(ge=0.01, le=100)] = 3.0

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream."""
        return self._synthetic(seed, workloads.gamma_gaps(self.rate, self.cv))


class BatchWorkload(Generated):
    """Everything arrives at time 0."""

    kind: Literal["batch"]

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream."""
        return self._synthetic(seed, workloads.no_gaps)


class ClosedLoopWorkload(Generated):
    """``users`` users; each sends, waits for the answer, thinks (exponential, mean ``think_s``), sends again."""

    kind: Literal["closed-loop"]
    users: PositiveInt = 8
    think_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream."""
        gaps = workloads.poisson_gaps(1 / self.think_s) if self.think_s else workloads.no_gaps
        return self._synthetic(seed, gaps, self.users)


class SessionsWorkload(Section):
    """Conversations of several turns under shared system prompts; see ``workloads.Sessions``."""

    count_key: ClassVar[str] = "sessions"
    """The key that says how many conversations, each of at least one request."""
    kind: Literal["sessions"]
    rate: Annotated[float, Field(ge=1e-6, le=1e9)] = 1.0
    """New sessions/s."""
    cv: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Of the gamma gaps between them: 1 is Poisson, above is bursty."""
    sessions: Annotated[int, Field(ge=1, le=10**7)] = 100
    turns: AnyLengths = LognormalLengths(kind="lognormal", mu=1.2, sigma=0.6, min=1, max=20)
    """Requests in a session, 1000 at most: a longer draw is cut."""
    system_prompts: Annotated[int, Field(ge=0, le=10**6)] = 4
    """How many there are to share; 0: none."""
    system_tokens: AnyLengths = FixedLengths(kind="fixed", value=200)
    popularity: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Zipf's exponent: the k-th system prompt is chosen in proportion to ``k ** -popularity``."""
    user_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=3.2, sigma=0.6, min=1, max=200)
    output_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=3.7, sigma=0.6, min=1, max=300)
    think_s: Annotated[float, Field(ge=0, le=1e9)] = 2.0
    """Mean seconds between an answer and the next message, exponential."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """A session ends before the first further turn whose prompt and output would exceed this many tokens."""

    @field_validator("turns")
    @classmethod
    def _bounded(cls, turns: FixedLengths | LognormalLengths) -> FixedLengths | LognormalLengths:
        most = turns.value if isinstance(turns, FixedLengths) else max(turns.min, turns.max or 1)
        if most > workloads.MAX_TURNS:
            raise ValueError(f"{most} turns; at most {workloads.MAX_TURNS} are accepted")
        return turns

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """The request stream."""
        return workloads.Sessions(
            seed,
            self.sessions,
            workloads.gamma_gaps(self.rate, self.cv),
            self.turns.build(),
            self.system_prompts,
            self.system_tokens.build(),
            self.popularity,
            self.user_tokens.build(),
            self.output_tokens.build(),
            self.think_s,
            self.max_context,
        )


def _workload_kind(value: Any) -> str:
    kind = value.get("kind", "poisson") if isinstance(value, dict) else getattr(value, "kind", "poisson")
    return kind if isinstance(kind, str) else repr(kind)


AnyWorkload = Annotated[
    Annotated[PoissonWorkload, Tag("poisson")]
    | Annotated[GammaWorkload, Tag("gamma")]
    | Annotated[BatchWorkload, Tag("batch")]
    | Annotated[ClosedLoopWorkload, Tag("closed-loop")]
    | Annotated[AzureWorkload, Tag("azure")]
    | Annotated[BurstGptWorkload, Tag("burstgpt")]
    | Annotated[MooncakeWorkload, Tag("mooncake")]
    | Annotated[RagPulseWorkload, Tag("ragpulse")]
    | Annotated[WekaWorkload, Tag("weka")]
    | Annotated[TableWorkload, Tag("table")]
    | Annotated[SessionsWorkload, Tag("sessions")],
    Discriminator(_workload_kind),
]

WORKLOADS: dict[str, type[Section]] = {
    "poisson": PoissonWorkload,
    "gamma": GammaWorkload,
    "batch": BatchWorkload,
    "closed-loop": ClosedLoopWorkload,
    **TRACES,
    "sessions": SessionsWorkload,
}
"""By ``kind``."""
