"""The ``[workload]`` section of a scenario: one class for each kind, which can build the workload."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

import workloads
from kvsim.errors import no_such
from kvsim.scenario import trace_sections as traces
from kvsim.scenario.length_sections import (
    AnyLengths,
    AnyOutputs,
    FixedLengths,
    LognormalLengths,
    MeanLengths,
    refuse_decreasing,
)
from kvsim.scenario.named_workloads import NAMED, named_section
from kvsim.scenario.section import MAX_ENTRIES, PositiveInt, Several, WorkloadSection, entries

Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]

_CHAT_PROMPT = LognormalLengths(kind="lognormal", mu=4.2, sigma=0.9, min=4, max=400)
_CHAT_OUTPUT = LognormalLengths(kind="lognormal", mu=4.0, sigma=0.8, min=1, max=300)


Count = Annotated[int, Field(ge=1, le=10**9)]
"""A number of requests."""


class GeneratedWorkload(WorkloadSection):
    """The keys of all generated workloads of single requests."""

    count_key: ClassVar[str] = "requests"
    """The key with the number of requests."""
    requests: Count = 400
    """Number of requests."""
    prompt_tokens: AnyLengths = _CHAT_PROMPT
    output_tokens: AnyOutputs = _CHAT_OUTPUT
    correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Spearman's rank correlation of prompt and output lengths."""
    shared_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Tokens with which every prompt begins, the same in all; of shorter prompts all but the last."""

    @model_validator(mode="after")
    def _one_dependence(self) -> GeneratedWorkload:
        if self.correlation and self.output_tokens.kind == "given-prompt":
            raise ValueError(
                'output_tokens of kind "given-prompt" say how they depend on prompts; correlation must be 0'
            )
        return self

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """Build the workload."""
        lengths = self.prompt_tokens.build(), self.output_tokens.build()
        process = seed, self.requests, self._gaps()
        return workloads.Synthetic(*process, *lengths, self._users(), self.correlation, self.shared_tokens)

    if TYPE_CHECKING:

        def _gaps(self) -> workloads.Gaps: ...

    def _users(self) -> int | None:
        """The number of users of a closed loop."""
        return None


class PoissonWorkload(GeneratedWorkload):
    """Poisson arrivals, ``rate`` requests/s."""

    kind: Literal["poisson"]
    rate: Rate = 20.0

    def _gaps(self) -> workloads.Gaps:
        return workloads.poisson_gaps(self.rate)


class GammaWorkload(GeneratedWorkload):
    """Bursty arrivals: gamma gaps with coefficient of variation ``cv``."""

    kind: Literal["gamma"]
    rate: Rate = 20.0
    cv: Annotated[float, Field(ge=0.01, le=100)] = 3.0

    def _gaps(self) -> workloads.Gaps:
        return workloads.gamma_gaps(self.rate, self.cv)


class WeibullWorkload(GeneratedWorkload):
    """Weibull gaps: a ``shape`` below 1 is bursty, 1 is Poisson, above 1 is regular."""

    kind: Literal["weibull"]
    rate: Rate = 20.0
    shape: Annotated[float, Field(ge=0.1, le=100)] = 0.5

    def _gaps(self) -> workloads.Gaps:
        return workloads.weibull_gaps(self.rate, self.shape)


class ModulatedWorkload(GeneratedWorkload):
    """Poisson arrivals whose rate switches between states; see ``workloads.modulated_gaps``."""

    kind: Literal["mmpp"]
    rates: Annotated[tuple[Annotated[float, Field(ge=0, le=1e9)], ...], FailFast(), entries(2, 1000)] = (5.0, 80.0)
    """Requests/s in each state."""
    dwell_s: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=1e9)], ...], FailFast(), entries(2, 1000)] = (8.0, 2.0)
    """Mean seconds in each state; exponential."""

    @model_validator(mode="after")
    def _consistent(self) -> ModulatedWorkload:
        if len(self.rates) != len(self.dwell_s):
            raise ValueError(
                f"{len(self.rates)} rates, {len(self.dwell_s)} dwell_s; one of each is expected for each state"
            )
        requests = sum(rate * seconds for rate, seconds in zip(self.rates, self.dwell_s, strict=True))
        if requests * 100 < len(self.rates):
            raise ValueError("more than 100 changes of state for each request; raise rates or dwell_s")
        if requests / sum(self.dwell_s) < 1e-6:
            raise ValueError("less than 0.000001 requests/s on average; higher rates are expected")
        return self

    def _gaps(self) -> workloads.Gaps:
        return workloads.modulated_gaps(self.rates, self.dwell_s)


# fmt: off
_DAY = (0.4, 0.3, 0.25, 0.2, 0.2, 0.25, 0.4, 0.7, 1.1, 1.5, 1.7, 1.7, 1.5, 1.6, 1.7, 1.7, 1.6, 1.4, 1.2, 1.1, 1.0, 0.9,
        0.7, 0.5)
# fmt: on


class DiurnalWorkload(GeneratedWorkload):
    """Poisson arrivals whose rate follows a repeating profile; see ``workloads.diurnal_gaps``.

    The default is a working day, hour by hour, compressed to 20 seconds: the time that the default number of requests
    takes.
    """

    kind: Literal["diurnal"]
    rate: Rate = 20.0
    """Mean requests/s over a period."""
    profile: Annotated[tuple[Seconds, ...], FailFast(), entries(1, MAX_ENTRIES)] = _DAY
    """Relative rates of equal parts of the period."""
    period_s: Annotated[float, Field(ge=1e-6, le=1e9)] = 20.0
    phase_s: Seconds = 0.0
    """Time within the period at which the run begins."""

    @field_validator("profile")
    @classmethod
    def _not_empty(cls, profile: tuple[float, ...]) -> tuple[float, ...]:
        if max(profile) < 1e-9:
            raise ValueError("nothing ever arrives; a relative rate above 0 is expected")
        return profile

    @model_validator(mode="after")
    def _countable(self) -> DiurnalWorkload:
        # Beyond this, single requests would be lost in rounding.
        if self.rate * self.period_s > 1e12:
            raise ValueError("more than 1e12 requests in a period; a lower rate or a shorter period_s is expected")
        return self

    def _gaps(self) -> workloads.Gaps:
        return workloads.diurnal_gaps(self.rate, self.profile, self.period_s, self.phase_s)


class RenewalWorkload(GeneratedWorkload):
    """Independent gaps with given quantiles, for example of a trace; see ``workloads.empirical_gaps``."""

    kind: Literal["renewal"]
    quantiles: Annotated[tuple[Seconds, ...], FailFast(), entries(2, MAX_ENTRIES)]
    """Seconds, from 0 to 100 % in even steps."""
    rate: Rate | None = None
    """Requests/s to which the gaps are scaled; not scaled by default."""

    _ordered = field_validator("quantiles")(refuse_decreasing)

    @model_validator(mode="after")
    def _stretched(self) -> RenewalWorkload:
        if self.rate is not None and self.quantiles[-1] < 1e-9:
            raise ValueError("gaps of 0 seconds cannot be stretched to a rate")
        return self

    def _gaps(self) -> workloads.Gaps:
        return workloads.empirical_gaps(self.quantiles, self.rate)


class BatchWorkload(GeneratedWorkload):
    """Everything arrives at time 0."""

    kind: Literal["batch"]

    def _gaps(self) -> workloads.Gaps:
        return workloads.no_gaps


class ClosedLoopWorkload(GeneratedWorkload):
    """``users`` users; each sends, waits for the answer, thinks (exponential, mean ``think_s``), sends again."""

    kind: Literal["closed-loop"]
    users: PositiveInt = 8
    think_s: Seconds = 0.0

    def _gaps(self) -> workloads.Gaps:
        return workloads.poisson_gaps(1 / self.think_s) if self.think_s else workloads.no_gaps

    def _users(self) -> int | None:
        return min(self.users, self.requests)  # Others would never ask.


class ConversationsWorkload(WorkloadSection):
    """The keys of all conversations; see ``workloads.Sessions``."""

    count_key: ClassVar[str] = "sessions"
    """The key with the number of conversations, each of one request or more."""
    sessions: Annotated[int, Field(ge=1, le=10**7)] = 100
    turns: AnyLengths = LognormalLengths(kind="lognormal", mu=1.2, sigma=0.6, min=1, max=20)
    """Requests in a session; draws above 1000 are cut to 1000."""
    system_prompts: Annotated[int, Field(ge=0, le=10**6)] = 4
    """Number of different system prompts that sessions share; 0: none."""
    system_tokens: AnyLengths = FixedLengths(kind="fixed", value=200)
    popularity: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Zipf's exponent: the k-th system prompt is chosen in proportion to ``k ** -popularity``."""
    user_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=3.2, sigma=0.6, min=1, max=200)
    output_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=3.7, sigma=0.6, min=1, max=300)
    think_s: Seconds = 2.0
    """Mean seconds between an answer and the next message; exponential."""
    max_context: Several | None = None
    """A session ends before the first further turn whose prompt and output would exceed this many tokens."""

    @field_validator("turns")
    @classmethod
    def _bounded(cls, turns: AnyLengths) -> AnyLengths:
        if turns.longest > workloads.MAX_TURNS:
            raise ValueError(f"{turns.longest} turns; at most {workloads.MAX_TURNS} are accepted")
        return turns

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """Build the workload."""
        outputs, limit = self.output_tokens.build(), self.max_output_tokens
        return workloads.Sessions(
            seed,
            self.sessions,
            self._gaps(),
            self.turns.build(),
            self.system_prompts,
            self.system_tokens.build(),
            self.popularity,
            self.user_tokens.build(),
            outputs if limit is None else workloads.Capped(outputs, limit),
            self.think_s,
            self.max_context,
            self._tools(),
            **self._of_users(),
        )

    def _tools(self) -> workloads.Tools | None:
        """How often agents call tools."""
        return None

    def _gaps(self) -> workloads.Gaps:
        """The gaps between the starts of sessions; none where users begin them."""
        return workloads.no_gaps

    def _of_users(self) -> dict[str, Any]:
        """What users add to the workload."""
        return {}


class ArrivingConversations(ConversationsWorkload):
    """The keys of conversations that begin by the clock."""

    rate: Rate = 1.0
    """New sessions/s."""
    cv: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Coefficient of variation of the gamma gaps between sessions: 1 is Poisson, above 1 is bursty."""

    def _gaps(self) -> workloads.Gaps:
        return workloads.gamma_gaps(self.rate, self.cv)


class SessionsWorkload(ArrivingConversations):
    """Conversations of several turns under shared system prompts; see ``workloads.Sessions``."""

    kind: Literal["sessions"]


class AgentsWorkload(ArrivingConversations):
    """Agents in a loop: a model call, the result of a tool, the next call, and sometimes a message of the user.

    The defaults follow 17 sessions of a coding agent (callanjfox/kv-cache-tester, Apache-2.0), with all lengths divided
    by 32. The originals have 15,300 tokens of system prompt and tool definitions, lognormal results (6.0, 1.7), a
    median answer of 225 tokens, and results of tools in 93 % of later turns. Calls (median 68) and waits (9 s for a
    tool, 287 s for a user) are reduced further, for runs of minutes.
    """

    kind: Literal["agents"]
    rate: Rate = 0.2
    sessions: Annotated[int, Field(ge=1, le=10**7)] = 40
    turns: AnyLengths = LognormalLengths(kind="lognormal", mu=2.5, sigma=0.8, min=1, max=60)
    """Model calls of an agent; draws above 1000 are cut to 1000."""
    system_tokens: AnyLengths = FixedLengths(kind="fixed", value=480)
    """System prompt and tool definitions."""
    user_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=1.1, sigma=1.5, min=1, max=100)
    output_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=2.0, sigma=0.8, min=1, max=75)
    think_s: Seconds = 20.0
    max_context: Several | None = 2048
    tool_share: Annotated[float, Field(ge=0, le=1)] = 0.93
    """Share of the turns after the first that bring the result of a tool."""
    result_tokens: AnyLengths = LognormalLengths(kind="lognormal", mu=2.6, sigma=1.7, min=1, max=500)
    tool_s: Seconds = 1.0
    """Mean seconds between a call and its result; exponential."""

    def _tools(self) -> workloads.Tools:
        return workloads.Tools(self.tool_share, self.result_tokens.build(), self.tool_s)


class UsersWorkload(ConversationsWorkload):
    """``users`` people or agents; each thinks, asks and waits for the answer, for ``turns`` requests, and begins anew.

    By default each request is a conversation of its own, and there is no shared system prompt.
    """

    kind: Literal["users"]
    users: Annotated[int, Field(ge=1, le=10**6)]
    sessions: Annotated[int, Field(ge=1, le=10**7)] = 400
    """Conversations of all users together."""
    turns: AnyLengths = FixedLengths(kind="fixed", value=1)
    system_prompts: Annotated[int, Field(ge=0, le=10**6)] = 0
    first_tokens: AnyLengths
    """Tokens of the first message of a conversation, without the system prompt."""
    user_tokens: AnyLengths = MeanLengths(kind="mean", mean=100)
    """Tokens of each further message."""
    output_tokens: AnyLengths
    think_s: Seconds = 0.0
    """Mean seconds between an answer and the next message, also the first of a conversation; exponential."""
    tool_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the turns after the first that bring the result of a tool, of ``user_tokens`` too."""
    tool_s: Seconds = 1.0
    """Mean seconds between a call and its result; exponential."""

    def _tools(self) -> workloads.Tools | None:
        return workloads.Tools(self.tool_share, self.user_tokens.build(), self.tool_s) if self.tool_share else None

    def _of_users(self) -> dict[str, Any]:
        return {"first_tokens": self.first_tokens.build(), "users": self.users}


class NamedWorkload(WorkloadSection):
    """A generator that was fitted to a public trace and ships with the package; see ``kvsim workload list``."""

    count_key: ClassVar[str] = "requests"
    """The key with the number of requests (or of conversations)."""
    kind: Literal["named"]
    name: str
    requests: Count = 400
    rate: Rate | None = None
    """Requests/s to which all times are scaled; by default the rate of the trace."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in NAMED:
            raise ValueError(no_such("workload", name, NAMED))
        return name

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """Build the workload."""
        built: workloads.Workload = self._section().build(seed, folder)
        return built

    @model_validator(mode="after")
    def _within(self) -> NamedWorkload:
        try:
            self._section()
        except ValidationError:
            raise ValueError(f"rate {self.rate:g} is too far from the trace's own") from None
        return self

    def _section(self) -> Any:
        return workload_adapter().validate_python(named_section(self.name, self.requests, self.rate))


def _workload_kind(value: Any) -> str:
    kind = value.get("kind", "poisson") if isinstance(value, dict) else getattr(value, "kind", "poisson")
    if not isinstance(kind, str):
        return repr(kind)
    return kind if kind in _KINDS or not traces.is_registered(kind) else traces.REGISTERED


def _mixable(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("kind") == "mix":
        raise ValueError("a mix cannot be part of a mix; name its parts here")
    if value.get("kind") in ("closed-loop", "users"):
        raise ValueError("a closed loop cannot be part of a mix: its requests have no arrival times")
    return {"kind": "poisson", **value}


_Open = (
    Annotated[PoissonWorkload, Tag("poisson")]
    | Annotated[GammaWorkload, Tag("gamma")]
    | Annotated[WeibullWorkload, Tag("weibull")]
    | Annotated[ModulatedWorkload, Tag("mmpp")]
    | Annotated[DiurnalWorkload, Tag("diurnal")]
    | Annotated[RenewalWorkload, Tag("renewal")]
    | Annotated[BatchWorkload, Tag("batch")]
    | Annotated[traces.AzureWorkload, Tag("azure")]
    | Annotated[traces.BurstGptWorkload, Tag("burstgpt")]
    | Annotated[traces.MooncakeWorkload, Tag("mooncake")]
    | Annotated[traces.RagPulseWorkload, Tag("ragpulse")]
    | Annotated[traces.WekaWorkload, Tag("weka")]
    | Annotated[traces.RecordedWorkload, Tag("recorded")]
    | Annotated[traces.ObservedWorkload, Tag("observed")]
    | Annotated[traces.LogWorkload, Tag("log")]
    | Annotated[traces.TableWorkload, Tag("table")]
    | Annotated[traces.RegisteredWorkload, Tag(traces.REGISTERED)]
    | Annotated[NamedWorkload, Tag("named")]
    | Annotated[SessionsWorkload, Tag("sessions")]
    | Annotated[AgentsWorkload, Tag("agents")]
)
AnyPart = Annotated[_Open, Discriminator(_workload_kind), BeforeValidator(_mixable)]
"""The parts of a mix: any workload with arrival times."""


class MixWorkload(WorkloadSection):
    """Several workloads at once; see ``workloads.Mix``. Each part has its own seed (``workloads.part_seed``)."""

    count_key: ClassVar[str] = "limit"
    """The key with the largest number of requests."""
    kind: Literal["mix"]
    parts: Annotated[tuple[AnyPart, ...], entries(2, 100)]
    """Tables like ``[workload]``; relative paths start at the scenario file's folder."""
    limit: PositiveInt | None = None
    """The most requests of all parts together; all by default."""

    def build(self, seed: int, folder: Path) -> workloads.Workload:
        """Build the workload and all its parts."""
        parts = [part.build_limited(workloads.part_seed(seed, place), folder) for place, part in enumerate(self.parts)]
        return workloads.Mix(parts, self.limit)


AnyWorkload = Annotated[
    _Open
    | Annotated[ClosedLoopWorkload, Tag("closed-loop")]
    | Annotated[UsersWorkload, Tag("users")]
    | Annotated[MixWorkload, Tag("mix")],
    Discriminator(_workload_kind),
]


@cache
def workload_adapter() -> TypeAdapter[Any]:
    """Makes a section of a table; it takes long to build."""
    return TypeAdapter(AnyWorkload)


_KINDS = {tag.tag for part in get_args(get_args(AnyWorkload)[0]) for tag in get_args(part)[1:]} - {traces.REGISTERED}
"""The kinds that have a section of their own."""
