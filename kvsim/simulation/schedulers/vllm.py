"""vLLM's scheduler: a token budget, running requests first, preemption when the cache is full."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import SchedulerBase
from kvsim.simulation.schedulers.lockstep import Lockstep
from kvsim.simulation.schedulers.queues import FcfsQueue, PriorityQueue, Queue, urgency
from policies import Chunk, NoSlot, Policy
from policies.fast_forward.lockstep import LockstepBatch

CANCELLED = "cancelled"
_PATIENCE = 1000
"""Steps in which no request gets further than ever before, after which it is looked whether any still can."""


_admission = attrgetter("admission")


class Vllm(SchedulerBase):
    """``Scheduler.schedule`` of vLLM 0.33.0, for any policy.

    A step has at most ``n_batch`` tokens. Running requests come first, each with all that it still has to compute;
    for one that finds no room the last of the running (or the least urgent) is preempted. Then, if nobody was, those
    that wait, in order, as long as there are slots, tokens and room. Policies that cannot set room aside are asked to
    place the whole step; if they refuse, the last running request is preempted and the step composed anew.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        server = scenario.server
        self.running: list[Job] = []
        self.waiting: Queue = PriorityQueue() if server.order == "priority" else FcfsQueue()
        self._budget = server.n_batch
        self._threshold = server.long_prefill_threshold
        self._chunked = server.chunked_prefill
        self._whole = server.reserve_full
        self._by_priority = server.order == "priority"
        self._swaps = server.preemption == "swap"
        self._slots = list(range(server.slots - 1, -1, -1))
        self._at: dict[int, Job] = {}
        """Who has which slot."""
        self._limit = 1 << 62 if policy.unbounded else self._context - 1
        """Tokens of a sequence that are ever computed."""
        self._cache_full = False
        """Whether a step found no room and nobody has ended since: then nobody is let in."""
        self._stalled = 0
        """Steps since a request last got further than ever before."""
        self._admission = 0
        self._lockstep: Lockstep | None = None
        """Those of the running that generate, where they may go in lockstep."""
        self._rest: list[Job] = []
        """The others that run, then."""
        self._together = False
        """Whether the last step was composed of both."""
        self._listed = 0
        """The chunks at its beginning that are of those in lockstep."""
        self._admission_blocked = False
        """Whether nobody can be let in until somebody ends, or somebody in lockstep gives room back."""
        self._places_alone = not policy.can_reserve

    def keep_step(self, lockstep_batch: LockstepBatch[Any] | None) -> None:
        """Those that generate are kept in lockstep from now on."""
        self._lockstep = Lockstep(lockstep_batch)
        self._rest = list(self.running)

    @property
    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Who decodes besides the chunks composed last."""
        lock = self._lockstep
        return lock.lockstep_batch if lock is not None and self._together else None

    def submit(self, job: Job, now: float) -> None:
        """Refuse what could never be served; queue all others."""
        error = self._never(job)
        if error is not None:
            self._end(job, now, error)
        else:
            self.waiting.add(job)

    def cancel(self, job: Job, now: float) -> None:
        """The client has gone."""
        self._break_up()
        if job.status == "running":
            self._leave(job)
        else:
            self.waiting.remove(job)
            self._forget_swapped(job)
        self._end(job, now, CANCELLED)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Running requests, then waiting ones."""
        self._together, self._admission_blocked = False, False
        if not self.running and not self.waiting:
            return ()
        if self._lockstep is not None:
            together = self._compose_together(now)
            if together is not None:
                self._together = True
                return together
            self._break_up()
        step: dict[int, Chunk] = {}
        if self._serve_running(step) and not (self._cache_full and self.running):
            self._admit_waiting(step, now)
        if not step:
            raise self._livelock(now)
        return list(step.values())

    def _compose_together(self, now: float) -> list[Chunk] | None:
        """The same where those in lockstep get their token; None where they may not, or somebody must be preempted.

        They come first in the order of the running, so that what they take is taken in that order."""
        lock, rest = self._lockstep, self._rest
        assert lock is not None
        lockstep_batch = lock.lockstep_batch
        if lockstep_batch is not None:
            blocked = lockstep_batch.blocked()
            if blocked:
                rest += map(lock.leave, blocked)
                rest.sort(key=_admission)
        members = len(lock)
        left = self._budget - members
        if left < 0 or (members >= lockstep_batch.max_pass_tokens if lockstep_batch is not None else not members):
            return None
        if rest and rest[0].admission < lock.newest and (lockstep_batch is None or lockstep_batch.takes_from_pool):
            return None
        step: dict[int, Chunk] = {}
        if lockstep_batch is None:
            step = {chunk.seq: chunk for chunk in lock.chunks()}
            if not self._places_alone and not all(map(self._policy.reserve, step.values())):
                return None
        self._listed, self._left = len(step), left
        lets_in = bool(self.waiting and self._slots and left > 0 and not self._cache_full)
        if lockstep_batch is not None and not lockstep_batch.reserve_step():
            return None
        if rest:
            threshold = self._most_of_one()
            for job in rest:
                n = min(job.tokens - job.computed, threshold, left, self._limit - job.computed)
                if n > 0:
                    chunk = Chunk(job.slot, job.computed, n)
                    if not self._policy.reserve(chunk):
                        return None
                    step[job.slot] = chunk
                    left -= n
            self._left = left
        if lets_in:
            first = self.waiting.first()
            self._admit_waiting(step, now)
            still = bool(self.waiting) and self.waiting.first() is first
            self._admission_blocked = still and not self._policy.can_free_while_decoding
        return list(step.values()) if step or members else None

    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """Count the tokens; emit one for whoever has computed all it had; finish what has said enough."""
        if self._together:
            assert self._lockstep is not None
            if len(self._lockstep):
                self._stalled = -1
            for job in self._lockstep.went(1):
                self._finish(job, now)
            if self._listed:
                chunks = chunks[self._listed :]
        for chunk in chunks:
            job = self._at[chunk.seq]
            job.computed += chunk.n
            if job.computed > job.furthest:
                job.furthest, self._stalled = job.computed, -1
            if job.computed == job.tokens:
                self._emit(job, now)
        self._watch(now)
        self._join_ready()

    def steady(self, step: Sequence[Chunk]) -> int:
        """While all that run are in lockstep, and nobody waits who could be let in."""
        lock = self._lockstep
        if lock is None or not self._together or len(step) > self._listed:
            return 0
        if self._rest:
            return 1
        if not (self.waiting and self._slots and self._left > 0 and not self._cache_full):
            return lock.lasts
        if not self._admission_blocked:
            return 1
        return lock.lasts if lock.lockstep_batch is None else min(lock.lasts, lock.lockstep_batch.steps_until_release())

    def skip(self, step: Sequence[Chunk], n: int) -> None:
        """Those in lockstep have got so many tokens."""
        assert self._lockstep is not None
        self._lockstep.steps += n

    def _join_ready(self) -> None:
        """Let those join the lockstep that generate, in the order of the running."""
        lock, rest = self._lockstep, self._rest
        if lock is None or not rest:
            return
        for at, job in enumerate(rest):
            ready = job.generated and job.computed == job.tokens - 1 and job.computed >= job.furthest
            if not ready or not lock.join(job, self._lasts(job, self._context - 1)):
                del rest[:at]
                return
        rest.clear()

    def _break_up(self) -> None:
        """Nobody is in lockstep."""
        if self._lockstep is not None:
            self._lockstep.leave_all()
            self._rest = list(self.running)
        self._together = False

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Preempt the last of the running; alone, it cannot be served."""
        self._recorder.failed_allocations += 1
        self._break_up()
        if reason.done:
            self.commit([chunk for batch in reason.done for chunk in batch.chunks], now)
        self._break_up()
        if len(self.running) == 1 and self.running[0].computed == 0:
            raise self._livelock(now, str(reason))
        self._preempt(self._victim())
        self._cache_full = True
        self._watch(now)

    def _watch(self, now: float) -> None:
        """One step more. When all that is known could have been computed anew since a request last got further than
        ever, none ever will."""
        self._stalled += 1
        if self._stalled and self._stalled % _PATIENCE == 0:
            jobs = [*self.running, *self.waiting]
            if self._stalled > sum(job.tokens for job in jobs):
                raise self._livelock(now)

    def _never(self, job: Job) -> str | None:
        """Why the request can never be served."""
        request = job.request
        if request.prompt_tokens >= self._context:
            return (
                f"the request exceeds the longest sequence: {request.prompt_tokens} prompt tokens, "
                f"{self._context} in a sequence"
            )
        if not self._chunked and request.prompt_tokens > self._budget:
            return f"{request.prompt_tokens} prompt tokens exceed n_batch ({self._budget}), and prefill is not chunked"
        return self._policy.refusal(self._plan(job))

    def _serve_running(self, step: dict[int, Chunk]) -> bool:
        """A chunk for each running request; False where one had to be preempted."""
        budget, at, preempted, threshold = self._budget, 0, False, self._most_of_one()
        reserve, running = self._policy.reserve, self.running
        while at < len(running) and budget > 0:
            job = running[at]
            n = min(job.tokens - job.computed, threshold, budget, self._limit - job.computed)
            if n <= 0:
                at += 1
                continue
            chunk = Chunk(job.slot, job.computed, n)
            while not reserve(chunk):
                victim = self._victim()
                if victim.slot in step:
                    budget += step.pop(victim.slot).n
                    at -= 1
                preempted = True
                self._preempt(victim)
                if victim is job:
                    break
            else:
                step[job.slot] = chunk
                budget -= n
                at += 1
        self._left = budget
        return not preempted

    def _admit_waiting(self, step: dict[int, Chunk], now: float) -> None:
        """Chunks for waiting requests, in order, until one finds no room."""
        budget, threshold, policy = self._left, self._most_of_one(), self._policy
        while self.waiting and budget > 0 and self._slots:
            job, slot, others = self.waiting.first(), self._slots[-1], bool(self.running)
            plan, swapped, tokens = self._plan(job), job.ticket is not None, job.tokens
            if job.ticket is not None:
                held = policy.swap_in(slot, job.ticket, tokens, waits=others)
                if held is None:
                    return
                job.ticket = None
            else:
                if not policy.admits(plan):
                    return
                held = policy.match(slot, job.content, tokens)
            n = min(tokens - held, threshold)
            if n > budget:
                if not self._chunked and not swapped:
                    return
                n = budget
            chunk = Chunk(slot, held, n)
            policy.open(slot, plan)
            if not self._places_alone and not policy.reserve(chunk, whole=tokens if self._whole else 0, waits=others):
                policy.free(slot)
                return
            self.waiting.remove(job)
            self._admission += 1
            job.admission = self._admission
            self.running.append(job)
            if self._lockstep is not None:
                self._rest.append(job)
            self._at[self._slots.pop()] = job
            self._start(slot, job, held, now)
            step[slot] = chunk
            budget -= n

    def _most_of_one(self) -> int:
        """Tokens that one prompt may have of a step: a long one gives way to others, if there are any."""
        if not self._threshold or len(self.running) + len(self.waiting) == 1:
            return 1 << 62
        return self._threshold

    def _victim(self) -> Job:
        return max(self.running, key=urgency) if self._by_priority else self.running[-1]

    def _preempt(self, job: Job) -> None:
        """It gives up its cells, and waits until there is room again."""
        job.ticket = self._policy.swap_out(job.slot) if self._swaps and job.computed else None
        self._leave(job)
        self._recorder.preempted(job)
        job.status, job.computed = "preempted", 0
        job.preemptions += 1
        self.waiting.put_back(job)

    def _emit(self, job: Job, now: float) -> None:
        # Unlike llama-server, vLLM also counts the token that was only just generated.
        full = self._say(job, now) or (job.tokens == self._context and not self._policy.unbounded)
        if job.generated == job.request.output_tokens or full:
            self._finish(job, now)

    def _finish(self, job: Job, now: float) -> None:
        """It has said enough, or all that there was room for."""
        job.truncated = job.generated < job.request.output_tokens
        self._leave(job)
        self._end(job, now)
        self._cache_full = False

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        if job in self._rest:
            self._rest.remove(job)
        self._policy.free(job.slot)
        del self._at[job.slot]
        self._slots.append(job.slot)

    def _forget_swapped(self, job: Job) -> None:
        if job.ticket is not None:
            self._policy.forget_swapped(job.ticket)
            job.ticket = None

    def _livelock(self, now: float, reason: str = "") -> Livelock:
        self._break_up()
        return Livelock(now, [*self.running, *self.waiting], self._policy, reason)
