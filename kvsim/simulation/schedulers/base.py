"""What schedulers share: the protocol that the server speaks with them, and a request's way in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from policies import Chunk, NoSlot, Policy, SequencePlan
from policies.fast_forward.lockstep import LockstepBatch


class Scheduler(Protocol):
    """Composes steps. Knows jobs and the policy; of time only what it is told, for the record."""

    started: list[Job]
    """Who was admitted since the server last emptied this list."""
    ended: list[Job]
    """Who has ended since the server last emptied this list."""

    @property
    def waiting(self) -> Iterable[Job]:
        """Who waits, the next first."""
        ...

    def submit(self, job: Job, now: float) -> None:
        """A request has arrived."""
        ...

    def compose(self, now: float) -> Sequence[Chunk]:
        """The chunks to run next; empty when there is nothing to do. Raises ``Livelock``."""
        ...

    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """These chunks have run."""
        ...

    @property
    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Who decodes besides the chunks composed last: nobody, if this is None."""
        ...

    def keep_step(self, lockstep_batch: LockstepBatch[Any] | None) -> None:
        """From now on whole groups may decode in lockstep: those of the policy's ``lockstep batch``, where it has
        one."""
        ...

    def steady(self, step: Sequence[Chunk]) -> int:
        """How many steps in a row, this one the first, are of one token for each of the same sequences, while whatever
        arrives is not looked at, and nobody ends but in the last; 0 where that cannot be told."""
        ...

    def ran(self, step: Sequence[Chunk], n: int, now: float) -> None:
        """So many of those steps have run, the first of them ``step``."""
        ...

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """The policy had no room for what was composed last. Raises ``Livelock``."""
        ...


class SchedulerBase(ABC):
    """Where requests are let in and seen off; schedulers build on it."""

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        self._scenario = scenario
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._context = scenario.slot_context
        """The most tokens in a sequence."""
        self.started: list[Job] = []
        self.ended: list[Job] = []

    @property
    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Nobody: all are in the chunks."""
        return None

    def keep_step(self, lockstep_batch: LockstepBatch[Any] | None) -> None:  # noqa: B027  (most schedulers keep none)
        """Nobody is."""

    @abstractmethod
    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """These chunks have run."""

    @abstractmethod
    def skip(self, step: Sequence[Chunk], n: int) -> None:
        """So many of steady steps have run, in which nobody ended."""

    def ran(self, step: Sequence[Chunk], n: int, now: float) -> None:
        """So many steady steps have run; in the last, somebody may have ended."""
        if n > 1:
            self.skip(step, n - 1)
            step = [chunk._replace(start=chunk.start + n - 1) for chunk in step]
        self.commit(step, now)

    def _plan(self, job: Job) -> SequencePlan:
        """What is known of a job's sequence. The last token generated is never run, so it takes no cell."""
        plan = job.plan
        if plan is None or plan.content is not job.content:
            request, context = job.request, self._context
            prompt = request.prompt_tokens
            final = min(prompt + request.output_tokens - 1, context)
            plan = job.plan = SequencePlan(prompt, context, final, job.content, request.id)
        return plan

    def _start(self, seq: int, job: Job, held: int, now: float) -> None:
        """The job takes a sequence that has been opened, and of which ``held`` tokens are in the cache already."""
        again = job.status == "preempted"
        job.status, job.slot, job.computed = "running", seq, held
        if not again:
            job.started_s = now
        self.started.append(job)
        self._recorder.begun(job, held)
        self._backend.begin(seq, job.request, again=again)

    def _say(self, job: Job, now: float) -> bool:
        """The job has computed all it had, and says one more token; whether its sequence is now full."""
        job.generated += 1
        if job.generated == 1:
            job.first_token_s = now
        return job.tokens > self._context and not self._policy.unbounded

    def _lasts(self, job: Job, context: int) -> int:
        """Steps that a job which generates goes on for, if each gives it a token and ``context`` is the most tokens
        that it may have."""
        left = job.request.output_tokens - job.generated - 1
        return left if self._policy.unbounded else min(left, context - job.tokens)

    def _end(self, job: Job, now: float, error: str = "") -> None:
        job.status, job.error, job.finished_s = ("failed" if error else "completed"), error, now
        self.ended.append(job)
        self._recorder.finish(job)
        if job.done is not None:
            job.done.succeed()
