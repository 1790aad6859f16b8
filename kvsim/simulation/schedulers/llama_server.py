"""llama-server's scheduler: slots that keep what they held, and a batch that is halved when it finds no room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import SchedulerBase
from policies import NOTHING, Chunk, Content, NoSlot, Policy


@dataclass(slots=True)
class Slot:
    """One of the server's slots; its number is the sequence id."""

    id: int
    job: Job | None = None
    kept: bool = False
    """Whether it is idle and its cells still hold the last request's tokens."""
    content: Content = NOTHING
    """Content of those tokens."""
    last_used: int = 0
    """Value of a counter when it was last used: the smallest was used longest ago."""


class LlamaServer(SchedulerBase):
    """llama-server's ``update_slots`` (llama.cpp, ``tools/server``).

    A batch is one token for each generating slot, then prompt tokens, slot by slot, up to ``n_batch``. It is run
    in pieces of at most ``n_batch`` tokens. When a piece finds no room, half of it is tried; a single token that
    finds none purges an idle slot; if none is left, every request in a slot fails. The original halves
    ``n_batch`` itself and so may try the same small piece several times; we halve the piece.

    A request gets the idle slot whose kept tokens share the longest prefix with its prompt, if that is more than
    ``slot_prompt_similarity`` of it, and computes only the rest (``get_available_slot``, ``cache_prompt``); else the
    slot used longest ago, of whose tokens it keeps what its prompt begins with, too.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        # It refuses no request for the output that it may ask for: a full slot ends its request, or shifts its context.
        self._context = min(scenario.slot_context, policy.max_sequence_tokens)
        self.slots = [Slot(i) for i in range(scenario.server.slots)]
        self.waiting: deque[Job] = deque()
        self._pending: deque[Chunk] = deque()
        """The part of the batch that has not been run yet."""
        self._n_batch = scenario.n_batch
        self._limit = self._n_batch
        self._tried = 0
        self._turn = 0

    def submit(self, job: Job, now: float) -> None:
        """Fail a prompt that no slot can hold; queue all other requests."""
        if job.request.prompt_tokens >= self._context:
            reason = (
                f"the request exceeds the available context size: {job.request.prompt_tokens} prompt tokens, "
                f"{self._context} in a slot"
            )
            self._fail(job, now, FailureKind.CONTEXT, reason, exceeded=self._context)
        else:
            self.waiting.append(job)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next piece of the batch, or of a new batch."""
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

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens, emit one where a prompt is done, end requests that have all their output."""
        self._limit = self._n_batch
        for chunk in step:
            self._advance(chunk.n)
            slot = self.slots[chunk.seq]
            job = slot.job
            assert job is not None, "a chunk ran for an empty slot"
            job.computed += chunk.n
            if job.computed == job.tokens:
                self._emit(slot, job, now)

    def decode_only_steps(self, step: Sequence[Chunk]) -> int:
        """While every job in a slot decodes, and no request waits or all slots are taken."""
        jobs = [slot.job for slot in self.slots if slot.job is not None]
        if len(step) != len(jobs) or len(self._pending) != len(step) or self._limit != self._n_batch:
            return 0
        if not all(job.prefilled for job in jobs) or (self.waiting and len(jobs) < len(self.slots)):
            return 0
        return 1 + min(self._steps_left(job, self._context) for job in jobs)

    def _skip(self, step: Sequence[Chunk], steps: int) -> None:
        """Count the tokens."""
        self._pending = deque(chunk._replace(start=chunk.start + steps) for chunk in step)
        for chunk in step:
            job = self.slots[chunk.seq].job
            assert job is not None, "a chunk ran for an empty slot"
            job.computed += steps
            job.generated += steps

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Halve; at one token purge an idle slot; with none left, fail every request in a slot."""
        self._recorder.failed_allocations += 1
        done = [chunk for batch in reason.done for chunk in batch.chunks]
        if done:
            self._complete(done, now)
        if self._tried > 1:
            self._limit = self._tried // 2
            self._recorder.split(self._tried - sum(chunk.n for chunk in done))
        elif not self._purge_one():
            self._pending.clear()
            self._limit = self._n_batch
            for slot in self.slots:
                if slot.job is not None:
                    error = "Context size has been exceeded."
                    self._fail(slot.job, now, FailureKind.NO_SLOT, error, refusal=str(reason))
                    self._leave(slot, keep=False)

    def _launch(self, now: float) -> None:
        """Give waiting requests idle slots."""
        while self.waiting:
            job = self.waiting[0]
            slot, held = self._choose(job)
            if slot is None:
                return
            plan = self._plan(job)
            held = self._trim(slot, held)
            while not self._policy.admits(plan):
                if self._purge_one():
                    continue
                if any(s.job is not None for s in self.slots):
                    return
                self.waiting.popleft()
                sizes = f"{plan.prompt_tokens} prompt tokens, up to {plan.max_tokens} in all"
                empty = f"an empty cache of {self._policy.capacity} cells"
                why = f"{self._policy.name} can never place the request ({sizes}) in {empty}"
                self._fail(job, now, FailureKind.CACHE, why, refusal=why)
                break
            else:
                self.waiting.popleft()
                held, slot.kept = held if slot.kept else 0, False
                if not held:
                    held = self._policy.match(slot.id, job.content, job.tokens)
                self._policy.open(slot.id, plan)
                if held and not self._policy.reserve(Chunk(slot.id, held, 0)):
                    held = 0
                slot.job = job
                self._start(slot.id, job, held, now)

    def _choose(self, job: Job) -> tuple[Slot | None, int]:
        """The idle slot for a job, and how many tokens of its prompt the slot still holds."""
        idle = [slot for slot in self.slots if slot.job is None]
        if not idle:
            return None, 0
        prompt = job.request.prompt_tokens
        prefixes = [slot.content.common_prefix(job.content) if slot.kept else 0 for slot in idle]
        best = max(range(len(idle)), key=prefixes.__getitem__)
        if prefixes[best] <= self._scenario.server.slot_similarity * prompt:
            best = min(range(len(idle)), key=lambda i: idle[i].last_used)
        return idle[best], min(prefixes[best], prompt - 1)

    def _trim(self, slot: Slot, held: int) -> int:
        """Free what an idle slot holds beyond its first ``held`` tokens; return how many tokens are left."""
        held = self._policy.can_truncate(slot.id, held) if held else 0
        if held:
            self._policy.free(slot.id, held)
            slot.content = slot.content.head(held)
        else:
            self._clear(slot)
        return held

    def _new_batch(self) -> list[Chunk]:
        jobs = [(slot.id, slot.job) for slot in self.slots if slot.job is not None]
        batch = [Chunk(seq, job.computed, 1) for seq, job in jobs if job.prefilled]
        room = self._n_batch - len(batch)
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
        full = self._emit_token(job, now)
        if full and job.generated < job.request.output_tokens and self._scenario.server.context_shift:
            full = not self._shift_context(slot, job)
        if job.generated == job.request.output_tokens or full:
            job.truncated = job.generated < job.request.output_tokens
            self._end(job, now)
            self._leave(slot, keep=self._scenario.server.keep_idle_slots)

    def _shift_context(self, slot: Slot, job: Job) -> bool:
        """Drop half of what follows the first ``n_keep`` tokens; return False if that would drop nothing."""
        keep = min(self._scenario.server.n_keep, job.computed - 1)
        discard = (job.computed - keep) // 2
        if discard == 0:
            return False
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.content = job.content.without(keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        self._recorder.context_shifts += 1
        return True

    def _leave(self, slot: Slot, keep: bool) -> None:
        self._turn += 1
        assert slot.job is not None, "an empty slot is left"
        slot.content = slot.job.content.head(slot.job.computed)
        slot.job, slot.kept, slot.last_used = None, True, self._turn
        if not keep:
            self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        if slot.kept:
            self._policy.free(slot.id)
            slot.kept, slot.content = False, NOTHING

    def _purge_one(self) -> bool:
        """Empty the first idle slot that keeps cells; False if there is none."""
        for slot in self.slots:
            if slot.kept:
                self._clear(slot)
                return True
        return False
