"""Schedulers: which tokens run in the next step, and what happens when they find no room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsim.backend import Backend
from kvsim.job import Job
from kvsim.metrics import Recorder
from kvsim.scenario import Scenario
from policies import Chunk, NoSlot, Policy, SequencePlan


class Scheduler(Protocol):
    """Composes steps. Knows jobs and the policy; of time only what it is told, for the record."""

    def submit(self, job: Job, now: float) -> None:
        """A request has arrived."""
        ...

    def compose(self, now: float) -> Sequence[Chunk]:
        """The chunks to run next; empty when there is nothing to do."""
        ...

    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """These chunks have run."""
        ...

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """The policy had no room for what was composed last."""
        ...


@dataclass(slots=True)
class Slot:
    """One of the server's seats: the sequence id is the slot's number."""

    id: int
    job: Job | None = None
    kept: bool = False
    """Idle, but its cells still hold the last request's tokens."""
    last_used: int = 0
    """Turn of a counter, not time: the smallest was used longest ago."""


class LlamaServer:
    """llama-server's ``update_slots`` (llama.cpp, ``tools/server``).

    A batch is one token for each generating slot, then prompt tokens, slot by slot, up to ``n_batch``. It is run
    in pieces of at most ``n_batch`` tokens. When a piece finds no room, half of it is tried; a single token that
    finds none purges an idle slot; if none is left, every request in a slot fails. The original halves
    ``n_batch`` itself and so may try the same small piece several times; we halve the piece.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        self.slots = [Slot(i) for i in range(scenario.server.slots)]
        self.waiting: deque[Job] = deque()
        self._scenario = scenario
        self._context = min(scenario.slot_context, policy.longest)
        """The most tokens in a slot."""
        self._policy = policy
        self._backend = backend
        self._recorder = recorder
        self._pending: deque[Chunk] = deque()
        """What is left of the batch."""
        self._limit = scenario.server.n_batch
        self._tried = 0
        self._turn = 0

    def submit(self, job: Job, now: float) -> None:
        """Refuse a prompt that no slot can hold; queue all others."""
        if job.request.prompt_tokens >= self._context:
            reason = (
                f"the request exceeds the available context size: {job.request.prompt_tokens} prompt tokens, "
                f"{self._context} in a slot"
            )
            self._end(job, now, reason)
        else:
            self.waiting.append(job)

    def compose(self, now: float) -> Sequence[Chunk]:
        """The next piece of the batch, or of a new one."""
        if not self._pending:
            self._launch(now)
            self._pending.extend(self._new_batch())
        piece: list[Chunk] = []
        room = self._limit
        for chunk in self._pending:
            if room == 0:
                break
            piece.append(chunk._replace(n=min(chunk.n, room)))
            room -= piece[-1].n
        self._tried = self._limit - room
        return piece

    def commit(self, chunks: Sequence[Chunk], now: float) -> None:
        """Count the tokens, emit one where a prompt is done, finish what has said enough."""
        self._limit = self._scenario.server.n_batch
        for chunk in chunks:
            self._advance(chunk.n)
            slot = self.slots[chunk.seq]
            job = slot.job
            assert job is not None, "a chunk ran for an empty slot"
            job.computed += chunk.n
            if job.computed == job.tokens:
                self._emit(slot, job, now)

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Halve; at one token purge an idle slot; with none left, fail every request in a slot."""
        self._recorder.failed_allocations += 1
        done = [chunk for batch in reason.done for chunk in batch.chunks]
        if done:
            self.commit(done, now)
        if self._tried > 1:
            self._limit = self._tried // 2
            self._recorder.batch_splits += 1
        elif not self._purge_one():
            self._pending.clear()
            self._limit = self._scenario.server.n_batch
            for slot in self.slots:
                if slot.job is not None:
                    self._end(slot.job, now, "Context size has been exceeded.")
                    self._leave(slot, keep=False)

    def _launch(self, now: float) -> None:
        """Seat waiting requests in idle slots, the one used longest ago first."""
        while self.waiting:
            slot = min((s for s in self.slots if s.job is None), key=lambda s: s.last_used, default=None)
            if slot is None:
                return
            job = self.waiting[0]
            plan = self._plan(job)
            self._clear(slot)
            while not self._policy.admits(plan):
                if self._purge_one():
                    continue
                if any(s.job is not None for s in self.slots):
                    return
                self.waiting.popleft()
                sizes = f"{plan.prompt_tokens} prompt tokens, up to {plan.max_tokens} in all"
                held = f"an empty cache of {self._policy.capacity} cells"
                self._end(job, now, f"{self._policy.name} can never place the request ({sizes}) in {held}")
                break
            else:
                self.waiting.popleft()
                slot.job = job
                job.status, job.started_s = "running", now
                self._policy.open(slot.id, plan)
                self._backend.begin(slot.id, job.request)

    def _plan(self, job: Job) -> SequencePlan:
        """What is known of a job's sequence. The last token generated is never run, so it takes no cell."""
        final = min(job.request.prompt_tokens + job.request.output_tokens - 1, self._context)
        return SequencePlan(job.request.prompt_tokens, self._context, final)

    def _new_batch(self) -> list[Chunk]:
        jobs = [(slot.id, slot.job) for slot in self.slots if slot.job is not None]
        batch = [Chunk(seq, job.computed, 1) for seq, job in jobs if job.prefilled]
        room = self._scenario.server.n_batch - len(batch)
        for seq, job in jobs:
            if not job.prefilled and room > 0:
                batch.append(Chunk(seq, job.computed, min(job.tokens - job.computed, room)))
                room -= batch[-1].n
        return batch

    def _advance(self, n: int) -> None:
        """Take ``n`` tokens off the first pending chunk."""
        first = self._pending.popleft()
        if n < first.n:
            self._pending.appendleft(Chunk(first.seq, first.start + n, first.n - n))

    def _emit(self, slot: Slot, job: Job, now: float) -> None:
        job.generated += 1
        if job.generated == 1:
            job.first_token_s = now
        full = job.tokens > self._context and not self._policy.endless
        if full and job.generated < job.request.output_tokens and self._scenario.server.context_shift:
            full = not self._shift_context(slot, job)
        if job.generated == job.request.output_tokens or full:
            job.truncated = job.generated < job.request.output_tokens
            self._end(job, now)
            self._leave(slot, keep=self._scenario.server.keep_idle_slots)

    def _shift_context(self, slot: Slot, job: Job) -> bool:
        """Forget half of what follows the first ``n_keep`` tokens; False where that would forget nothing."""
        keep = min(self._scenario.server.n_keep, job.computed - 1)
        discard = (job.computed - keep) // 2
        if discard == 0:
            return False
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        self._recorder.context_shifts += 1
        return True

    def _end(self, job: Job, now: float, error: str = "") -> None:
        job.status, job.error, job.finished_s = ("failed" if error else "completed"), error, now
        self._recorder.finish(job)
        if job.done is not None:
            job.done.succeed()

    def _leave(self, slot: Slot, keep: bool) -> None:
        self._turn += 1
        slot.job, slot.kept, slot.last_used = None, True, self._turn
        if not keep:
            self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        if slot.kept:
            self._policy.free(slot.id)
            slot.kept = False

    def _purge_one(self) -> bool:
        """Empty the first idle slot that keeps cells; False if there is none."""
        for slot in self.slots:
            if slot.kept:
                self._clear(slot)
                return True
        return False
