"""The protocol that the server speaks with schedulers, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job, Status
from kvsim.simulation.recorder import Recorder
from policies import Chunk, HostCopy, NoSlot, Policy, SequencePlan
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule

ENDLESS: Final = 1 << 62
"""More steps than any run takes."""


class Scheduler(Protocol):
    """Composes steps from the requests that run and wait; the server tells it the time, for the record only."""

    started: list[Job]
    """Jobs that were given a slot since the server last cleared this list."""
    ended: list[Job]
    """Jobs that have ended since the server last cleared this list."""
    rule: PlacementRule | None
    """The placement rule whose rows get their tokens besides the chunks composed last; None if the chunks are all."""
    waits_for_room: bool
    """Whether a request could be admitted as soon as a row gives room back."""

    @property
    def waiting(self) -> Iterable[Job]:
        """Jobs without a slot, the next to be admitted first."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether ``settle_copies`` has any seconds to give."""
        ...

    def submit(self, job: Job, now: float) -> None:
        """Queue a request that has arrived, or fail it if it can never be served."""
        ...

    def compose(self, now: float) -> Sequence[Chunk]:
        """The chunks to run next; empty when there is nothing to do. Raises ``Livelock``."""
        ...

    def decode_only_steps(self) -> int:
        """The most steps of rows alone that may follow each other before the scheduler must be asked; at least 1.

        Asked where the step composed last has no chunks. A row that ends stops them in any case.
        """
        ...

    def commit(self, step: Sequence[Chunk], steps: int, now: float) -> None:
        """The composed step has run, and with rows alone so many steps; no row had its last token before the last."""
        ...

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """The policy had no room for the composed step: make room. Raises ``Livelock`` if that is impossible."""
        ...

    def settle_copies(self) -> float:
        """Seconds of copies to and from the host that composing took, before its step; asked for once."""
        ...

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let sequences that only decode be rows of the policy's placement rule from now on, where it has one."""
        ...


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulerBase(ABC):
    """A request's way in and out, which all schedulers share."""

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        self._scenario = scenario
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._context = scenario.slot_context
        """The most tokens in a sequence."""
        self.started: list[Job] = []
        self.ended: list[Job] = []
        self.rule: PlacementRule | None = None
        self.waits_for_room = False
        self._copies_s = 0.0

    @property
    def has_copies(self) -> bool:
        """Whether the backend has made copies whose seconds are still to pass."""
        return self._copies_s > 0

    def settle_copies(self) -> float:
        """Seconds of the copies that the backend has made since this was last asked."""
        seconds, self._copies_s = self._copies_s, 0.0
        return seconds

    def _copied(self, copies: Sequence[HostCopy]) -> None:
        """Have the backend copy a sequence to or from the host."""
        self._copies_s += self._backend.copy(copies)
        self._recorder.copied(copies, [group.share for group in self._policy.groups])

    def use_rule(self, rule: PlacementRule | None) -> None:  # noqa: B027  (a scheduler may decline)
        """Decline: every sequence stays in the chunks."""

    def decode_only_steps(self) -> int:
        """As many as there may be."""
        return ENDLESS

    def commit(self, step: Sequence[Chunk], steps: int, now: float) -> None:
        """Count the tokens of the chunks, and end the requests that had their last token in the last step."""
        if steps > 1:
            self._note_steps()
        self._complete(step, now)

    def _note_steps(self) -> None:  # noqa: B027  (most schedulers need not know)
        """Several steps of rows alone have run; ``_complete`` follows for the last."""

    @abstractmethod
    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """These chunks have run: count tokens, emit output tokens, end requests."""

    def _plan(self, job: Job) -> SequencePlan:
        """What is known of a job's sequence. The last token generated is never run, so it takes no cell."""
        plan = job.plan
        if plan is None or plan.content is not job.content:
            request, context = job.request, self._context
            prompt = request.prompt_tokens - job.discarded
            final = min(prompt + request.output_tokens - 1, context)
            limit = request.max_output_tokens
            most = context if limit is None else min(prompt + limit - 1, context)
            plan = job.plan = SequencePlan(prompt, most, final, job.content, request.id, kind=request.kind)
        return plan

    def _start(self, seq: int, job: Job, held: int, now: float) -> None:
        """Give the job a sequence that has been opened, with ``held`` of its tokens in the cache already."""
        again = job.status == "preempted"
        job.status, job.slot, job.computed = "running", seq, held
        if not again:
            job.started_s = now
        self.started.append(job)
        self._recorder.begun(job, held)
        self._backend.begin(seq, job.request, again=again)

    def _emit_token(self, job: Job, now: float) -> bool:
        """Count one output token of a job that has computed all it had; return whether its sequence is now full."""
        job.generated += 1
        if job.generated == 1:
            job.first_token_s = now
        return job.tokens > self._context and not self._policy.unbounded

    def _steps_left(self, job: Job, context: int) -> int:
        """Decode steps before the one that ends the job, if its sequence may have ``context`` tokens."""
        left = job.request.output_tokens - job.generated - 1
        return left if self._policy.unbounded else min(left, context - job.tokens)

    def _end(self, job: Job, now: float) -> None:
        """The job has all its output."""
        self._finish_as("completed", job, now)

    def _fail(self, job: Job, now: float, kind: FailureKind, error: str, exceeded: int = 0, refusal: str = "") -> None:
        """The job ends without all its output; ``error`` is what its client is told, the others are as in ``Job``."""
        job.failure, job.error, job.exceeded, job.refusal = kind, error, exceeded, refusal
        self._finish_as("failed", job, now)

    def _finish_as(self, status: Status, job: Job, now: float) -> None:
        job.status, job.finished_s = status, now
        self.ended.append(job)
        self._recorder.finish(job)
