"""vLLM's scheduler: a token budget, running requests first, preemption when the cache is full."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvsim.backend import Backend
from kvsim.errors import Livelock
from kvsim.job import Job
from kvsim.metrics import Recorder
from kvsim.scenario import Scenario
from kvsim.schedulers.base import Desk
from policies import Chunk, NoSlot, Policy

CANCELLED = "cancelled"
_PATIENCE = 1000
"""Steps in which no request gets further than ever before, after which it is looked whether any still can."""


class Queue(Protocol):
    """Waiting requests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Job]: ...

    def add(self, job: Job) -> None:
        """A new one."""
        ...

    def put_back(self, job: Job) -> None:
        """One that was preempted."""
        ...

    def first(self) -> Job:
        """Whose turn it is."""
        ...

    def remove(self, job: Job) -> None:
        """It waits no longer."""
        ...


class FirstCome:
    """In order of arrival; who was preempted goes first."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        """To the back."""
        self._jobs.append(job)

    def put_back(self, job: Job) -> None:
        """To the front."""
        self._jobs.appendleft(job)

    def first(self) -> Job:
        """The front."""
        return self._jobs[0]

    def remove(self, job: Job) -> None:
        """Nearly always the first."""
        if self._jobs[0] is job:
            self._jobs.popleft()
        else:
            self._jobs.remove(job)


class MostUrgent:
    """By priority, and by arrival among equals."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Job]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Job]:
        return (entry[-1] for entry in sorted(self._heap))

    def add(self, job: Job) -> None:
        """To its place."""
        heapq.heappush(self._heap, (*urgency(job), job.request.id, job))

    def put_back(self, job: Job) -> None:
        """To its place."""
        self.add(job)

    def first(self) -> Job:
        """The most urgent."""
        return self._heap[0][-1]

    def remove(self, job: Job) -> None:
        """Nearly always the first."""
        if self._heap[0][-1] is job:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[-1] is not job]
            heapq.heapify(self._heap)


def urgency(job: Job) -> tuple[int, float]:
    """The smaller, the more urgent."""
    return job.request.priority, job.arrival_s


class Vllm(Desk):
    """``Scheduler.schedule`` of vLLM 0.33.0, for any policy.

    A step has at most ``n_batch`` tokens. Running requests come first, each with all that it still has to compute;
    for one that finds no room the last of the running (or the least urgent) is preempted. Then, if nobody was, those
    that wait, in order, as long as there are seats, tokens and room. Policies that cannot set room aside are asked to
    place the whole step; if they refuse, the last running request is preempted and the step composed anew.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        server = scenario.server
        self.running: list[Job] = []
        self.waiting: Queue = MostUrgent() if server.order == "priority" else FirstCome()
        self._budget = server.n_batch
        self._threshold = server.long_prefill_threshold
        self._chunked = server.chunked_prefill
        self._whole = server.reserve_full
        self._by_priority = server.order == "priority"
        self._swaps = server.preemption == "swap"
        self._seats = list(range(server.slots - 1, -1, -1))
        self._at: dict[int, Job] = {}
        """Who has which seat."""
        self._limit = 1 << 62 if policy.endless else self._context - 1
        """Tokens of a sequence that are ever computed."""
        self._crowded = False
        """Whether a step found no room and nobody has ended since: then nobody is let in."""
        self._stalled = 0
        """Steps since a request last got further than ever before."""

    def submit(self, job: Job, now: float) -> None:
        """Refuse what could never be served; queue all others."""
        error = self._never(job)
        if error is not None:
            self._end(job, now, error)
        else:
            self.waiting.add(job)

    def cancel(self, job: Job, now: float) -> None:
        """The client has gone."""
        if job.status == "running":
            self._leave(job)
        else:
            self.waiting.remove(job)
            self._forget_swapped(job)
        self._end(job, now, CANCELLED)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Running requests, then waiting ones."""
        if not self.running and not self.waiting:
            return ()
        step: dict[int, Chunk] = {}
        if self._serve_running(step) and not (self._crowded and self.running):
            self._admit_waiting(step, now)
        if not step:
            raise self._livelock(now)
        return list(step.values())

    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """Count the tokens; emit one for whoever has computed all it had; finish what has said enough."""
        for chunk in chunks:
            job = self._at[chunk.seq]
            job.computed += chunk.n
            if job.computed > job.furthest:
                job.furthest, self._stalled = job.computed, -1
            if job.computed == job.tokens:
                self._emit(job, now)
        self._watch(now)

    def steady(self, step: Sequence[Chunk]) -> int:
        """While all that run generate, and nobody waits who could be let in."""
        jobs = self.running
        if len(step) != len(jobs) or any(chunk.n > 1 for chunk in step) or not all(job.prefilled for job in jobs):
            return 0
        if self.waiting and self._seats and len(jobs) < self._budget and not self._crowded:
            return 0
        if any(job.computed < job.furthest or job.computed != job.tokens - 1 for job in jobs):
            return 0  # What is computed once more is no progress, and somebody counts.
        return min(self._lasts(job, self._context - 1) for job in jobs)

    def skip(self, step: Sequence[Chunk], n: int) -> None:
        """Count the tokens; each of them is progress."""
        for chunk in step:
            job = self._at[chunk.seq]
            job.computed += n
            job.generated += n
            job.furthest = job.computed
        self._stalled = 0

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Preempt the last of the running; alone, it cannot be served."""
        self._recorder.failed_allocations += 1
        if reason.done:
            self.commit([chunk for batch in reason.done for chunk in batch.chunks], now)
        if len(self.running) == 1 and self.running[0].computed == 0:
            raise self._livelock(now, str(reason))
        self._preempt(self._victim())
        self._crowded = True
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
            chunk = Chunk(job.seat, job.computed, n)
            while not reserve(chunk):
                victim = self._victim()
                if victim.seat in step:
                    budget += step.pop(victim.seat).n
                    at -= 1
                preempted = True
                self._preempt(victim)
                if victim is job:
                    break
            else:
                step[job.seat] = chunk
                budget -= n
                at += 1
        self._left = budget
        return not preempted

    def _admit_waiting(self, step: dict[int, Chunk], now: float) -> None:
        """Chunks for waiting requests, in order, until one finds no room."""
        budget, threshold = self._left, self._most_of_one()
        while self.waiting and budget > 0 and self._seats:
            job, seat, others = self.waiting.first(), self._seats[-1], bool(self.running)
            plan, swapped = self._plan(job), job.ticket is not None
            if job.ticket is not None:
                held = self._policy.swap_in(seat, job.ticket, job.tokens, waits=others)
                if held is None:
                    return
                job.ticket = None
            else:
                if not self._policy.admits(plan):
                    return
                held = self._policy.match(seat, job.content, job.tokens)
            n = min(job.tokens - held, threshold)
            if n > budget and not self._chunked and not swapped:
                return
            chunk = Chunk(seat, held, min(n, budget))
            self._policy.open(seat, plan)
            if not self._policy.reserve(chunk, whole=job.tokens if self._whole else 0, waits=others):
                self._policy.free(seat)
                return
            self.waiting.remove(job)
            self.running.append(job)
            self._at[self._seats.pop()] = job
            self._start(seat, job, held, now)
            step[seat] = chunk
            budget -= chunk.n

    def _most_of_one(self) -> int:
        """Tokens that one prompt may have of a step: a long one gives way to others, if there are any."""
        alone = len(self.running) + len(self.waiting) == 1
        return self._threshold if self._threshold and not alone else 1 << 62

    def _victim(self) -> Job:
        return max(self.running, key=urgency) if self._by_priority else self.running[-1]

    def _preempt(self, job: Job) -> None:
        """It gives up its cells, and waits until there is room again."""
        job.ticket = self._policy.swap_out(job.seat) if self._swaps and job.computed else None
        self._leave(job)
        self._recorder.preempted(job)
        job.status, job.computed = "preempted", 0
        job.preemptions += 1
        self.waiting.put_back(job)

    def _emit(self, job: Job, now: float) -> None:
        # Unlike llama-server, vLLM also counts the token that was only just generated.
        full = self._say(job, now) or (job.tokens == self._context and not self._policy.endless)
        if job.generated == job.request.output_tokens or full:
            job.truncated = job.generated < job.request.output_tokens
            self._leave(job)
            self._end(job, now)
            self._crowded = False

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self._policy.free(job.seat)
        del self._at[job.seat]
        self._seats.append(job.seat)

    def _forget_swapped(self, job: Job) -> None:
        if job.ticket is not None:
            self._policy.forget_swapped(job.ticket)
            job.ticket = None

    def _livelock(self, now: float, reason: str = "") -> Livelock:
        return Livelock(now, [*self.running, *self.waiting], self._policy, reason)
