"""The protocol that the server speaks with schedulers, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, Protocol

from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.job import FailureKind, Job, Status
from kvsim.simulation.recorder import Recorder
from policies import Chunk, HostCopy, OutOfCells, Policy, SequencePlan
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule

ENDLESS: Final = 1 << 62
"""More steps than any run takes."""
_NAMED: Final = 4
"""Requests that a message describes; the others are only counted."""


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

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """The policy had no room for the composed step: make room. Raises ``Livelock`` if that is impossible."""
        ...

    def settle_copies(self) -> float:
        """Seconds of copies to and from the host that composing took, before its step; asked for once."""
        ...

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let sequences that only decode be rows of the policy's placement rule from now on, where it has one."""
        ...

    def steps_to_next_end(self) -> int:
        """At least so many steps pass, beside the one that has been taken, before any request ends; 0: unknown."""
        ...

    def use_drafts(self, drafts: Drafts) -> None:
        """Have tokens drafted from now on, and check them."""
        ...

    def drafting_s(self, step: Sequence[Chunk]) -> float:
        """Seconds that the drafter takes beside the composed step, which has been placed and not committed."""
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
        self._most_prompt_tokens = ENDLESS
        """The most tokens of a prompt, where steps cannot share it."""
        self.started: list[Job] = []
        self.ended: list[Job] = []
        self.rule: PlacementRule | None = None
        self.waits_for_room = False
        self._drafts: Drafts | None = None
        self._drafts_beyond = 0
        """Drafted tokens for which a sequence may have cells beyond the end of its answer."""
        self._copies_s = 0.0

    @property
    def has_copies(self) -> bool:
        """Whether the backend has made copies whose seconds are still to pass."""
        return self._copies_s > 0

    def settle_copies(self) -> float:
        """Seconds of the copies that the backend has made since this was last asked."""
        seconds, self._copies_s = self._copies_s, 0.0
        return seconds

    def _copied(self, copies: Sequence[HostCopy], *, whole: bool = True) -> None:
        """Have the backend copy a sequence to or from the host; not ``whole``: a checkpoint of it, if of any cells."""
        if whole or any(copy.cells or copy.moves.n_runs or len(copy.shift.cells) for copy in copies):
            self._copies_s += self._backend.copy(copies)
            self._recorder.copied(copies, [group.share for group in self._policy.groups], whole=whole)

    def use_rule(self, rule: PlacementRule | None) -> None:  # noqa: B027  (a scheduler may decline)
        """Decline: every sequence stays in the chunks."""

    def use_drafts(self, drafts: Drafts) -> None:
        """Have tokens drafted."""
        self._drafts = drafts

    def drafting_s(self, step: Sequence[Chunk]) -> float:
        """None: nothing is drafted."""
        return 0.0

    def _accepted(self, job: Job, *, hopeless: bool = False) -> int:
        """Drafted tokens of a job that its last chunk has checked, and that are accepted; the others are taken back.

        ``hopeless``: as in ``Drafts.verify``.
        """
        drafted, drafts = job.computed - job.tokens, self._drafts
        if drafted <= 0 or drafts is None:
            return 0
        accepted = drafts.verify(job, drafted, hopeless=hopeless)
        if accepted < drafted:
            job.computed -= drafted - accepted
            self._policy.take_back(job.slot, job.computed)
        return accepted

    def decode_only_steps(self) -> int:
        """The most steps that rows may take before the scheduler must be asked; by default without a limit."""
        return ENDLESS

    def steps_to_next_end(self) -> int:
        """0: a request may fail in the next step."""
        return 0

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

    def _refuses(self, job: Job, now: float) -> bool:
        """Fail a request that could never be served; return whether it was."""
        prompt = job.request.prompt_tokens
        if prompt >= self._context:
            sizes = f"{prompt} prompt tokens, {self._context} in a sequence"
            error = f"the request exceeds the longest sequence: {sizes}"
            self._fail(job, now, FailureKind.CONTEXT, error, exceeded=self._context)
        elif prompt > self._most_prompt_tokens:
            most = self._most_prompt_tokens
            error = f"{prompt} prompt tokens exceed n_batch ({most}), and prefill is not chunked"
            self._fail(job, now, FailureKind.BATCH, error, exceeded=most)
        elif (why := self._policy.refusal(self._plan(job))) is not None:
            self._fail(job, now, FailureKind.CACHE, why, refusal=why)
        return job.ended

    def _plan(self, job: Job) -> SequencePlan:
        """What is known of a job's sequence. The last token generated is never run, so it takes no cell."""
        plan = job.plan
        if plan is None or plan.content is not job.content:
            request, context = job.request, self._context
            prompt = request.prompt_tokens - job.discarded
            beyond = self._drafts_beyond
            final = min(prompt + request.output_tokens - 1 + beyond, context)
            limit = request.max_output_tokens
            most = context if limit is None else min(prompt + limit - 1 + beyond, context)
            plan = job.plan = SequencePlan(prompt, most, final, job.content, request.id, kind=request.kind)
        return plan

    def _admit(self, seq: int, job: Job, now: float) -> bool:
        """Give the job a sequence, with what the cache holds of its text; False if the policy does not admit it yet."""
        policy, plan = self._policy, self._plan(job)
        if not policy.admits(plan):
            return False
        held = policy.match(seq, job.content, job.tokens)
        policy.open(seq, plan)
        if held and not policy.reserve(Chunk(seq, held, 0)):
            held = 0
        self._start(seq, job, held, now)
        return True

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

    def _put_off(self, job: Job) -> None:
        """Note that a job has lost its slot and its cells, and waits again."""
        self._recorder.preempted(job)
        job.status, job.computed = "preempted", 0
        job.preemptions += 1

    def _end(self, job: Job, now: float) -> None:
        """The job has all its output, or all that its sequence has room for."""
        job.truncated = job.generated < job.request.output_tokens
        self._finish_as("completed", job, now)

    def _fail(self, job: Job, now: float, kind: FailureKind, error: str, exceeded: int = 0, refusal: str = "") -> None:
        """The job ends without all its output; ``error`` is what its client is told, the others are as in ``Job``."""
        job.failure, job.error, job.exceeded, job.refusal = kind, error, exceeded, refusal
        self._finish_as("failed", job, now)

    def _finish_as(self, status: Status, job: Job, now: float) -> None:
        job.status, job.finished_s = status, now
        self.ended.append(job)
        self._recorder.finish(job)
        if self._drafts is not None:
            self._drafts.forget(job)


_by_admission = attrgetter("admission")


class DecodingJobs:
    """Jobs by slot. While a job is in here, ``computed`` and ``generated`` lack the tokens given since it joined."""

    def __init__(self, rule: PlacementRule):
        self.rule = rule
        """Has the same sequences as rows."""
        self.newest = 0
        """Latest admission index of any job that joined."""
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.slot) is job

    def jobs(self) -> list[Job]:
        """The jobs, in the order in which they joined."""
        return list(self._jobs.values())

    def join(self, job: Job, steps_left: int, place: int = 0) -> bool:
        """Add a decoding job that will not end for ``steps_left`` steps; return False if its sequence cannot join.

        ``place``: as in ``PlacementRule.join``.
        """
        if not self.rule.join(job.slot, steps_left + 1, place):
            return False
        self._jobs[job.slot] = job
        if job.admission > self.newest:
            self.newest = job.admission
        return True

    def leave(self, slot: int) -> Job:
        """Remove the job of a slot, and bring its counts up to date."""
        job, row = self._jobs.pop(slot), self.rule.leave(slot)
        given = row.given - row.left
        job.computed += given
        job.generated += given
        job.furthest = job.computed
        return job

    def leave_all(self) -> None:
        """Remove all jobs."""
        for slot in list(self._jobs):
            self.leave(slot)
        self.newest = 0

    def leave_ended(self) -> list[Job]:
        """Remove the jobs that had their last token in the step taken last, and return them in order of admission."""
        if not self.rule.ended:
            return []
        found = [self.leave(row.seq) for row in self.rule.ended_rows()]
        if len(found) > 1:
            found.sort(key=_by_admission)
        return found


def no_progress(now: float, jobs: Sequence[Job], policy: Policy, reason: str = "") -> Livelock:
    """The error that says which requests wait, for how many cells or blocks, and how many are free."""
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
    message = f"{policy.name}: no progress after {now:.3f} s{why}: {free}; {', '.join(named)}{others}"
    return Livelock(message, tuple([job.request.id for job in jobs]))
