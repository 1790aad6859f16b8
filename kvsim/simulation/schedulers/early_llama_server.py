"""The scheduler of llama-server as it was in early 2025: slots that are never purged, and prompts that are truncated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

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
    begun: bool = False
    """Whether its job has begun with its prompt."""
    content: Content = NOTHING
    """What it says of its tokens; a prompt that begins alike continues there."""
    stored: int = 0
    """Tokens that it has computed, and still holds."""
    kept: bool = False
    """Whether cells are left to it by a job that has ended."""
    last_used: int = 0
    """Value of a counter when it was released last; 0 if it was never used."""


class EarlyLlamaServer(SchedulerBase):
    """llama-server's ``update_slots`` in build b4875 (``examples/server/server.cpp``), of March 2025.

    A batch is one token for each generating slot, then prompt tokens, slot by slot, up to ``n_batch``. It is run in
    pieces. When one finds no room, ``n_batch`` is halved until the end of the batch; idle slots keep their cells. What
    earlier micro-batches of the piece took is not given back, and all of its tokens are placed again. Where a single
    token finds no room, every request in a slot fails, and the slots keep what they hold.

    A request gets the idle slot of whose tokens it repeats the longest run, wherever that is in its prompt, if it is
    more than ``slot_prompt_similarity`` of what the slot holds (``common_lcs``); else the slot released longest ago.
    It goes on behind the common prefix. A slot that is released puts the first deferred request at the end of the
    queue, behind those that came during the step.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self._context = min(scenario.slot_context, policy.max_sequence_tokens)
        self._shifts = scenario.server.context_shift and (policy.can_shift or policy.unbounded)
        self.slots = [Slot(i) for i in range(scenario.server.slots)]
        self._queue: deque[Job] = deque()
        self._deferred: deque[Job] = deque()
        """Jobs that found no idle slot."""
        self._released: deque[Job] = deque()
        """Jobs that were deferred, and have been called by slots that were released at ``_released_s``."""
        self._released_s = 0.0
        self._pending: deque[Chunk] = deque()
        """The part of the batch that has not been run yet."""
        self._n_batch = scenario.n_batch
        self._limit = self._n_batch
        """The most tokens in a piece of this batch."""
        self._tried = 0
        self._turn = 0

    @property
    def waiting(self) -> Iterable[Job]:
        """Jobs without a slot, the next to be asked first."""
        return chain(self._queue, self._released, self._deferred)

    def submit(self, job: Job, now: float) -> None:
        """Queue a request; whether it can be served shows when it begins with its prompt."""
        if job.arrival_s >= self._released_s:
            self._call_released()
        self._queue.append(job)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next piece of the batch, or of a new batch."""
        self._call_released()
        if not self._pending:
            self._limit = self._n_batch
            self._pending.extend(self._new_batch(now))
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
        """Count the tokens; slots whose last token was in the step sample, in order of their numbers."""
        sampling: list[Slot] = []
        for chunk in step:
            self._advance(chunk.n)
            slot = self.slots[chunk.seq]
            job = self._job_of(slot)
            job.computed += chunk.n
            if job.computed == job.tokens:
                sampling.append(slot)
        for slot in sorted(sampling, key=lambda slot: slot.id):
            self._emit(slot, self._job_of(slot), now)

    def decode_only_steps(self, step: Sequence[Chunk]) -> int:
        """While every job in a slot decodes, and none is about to fill it."""
        jobs = [slot.job for slot in self.slots if slot.job is not None]
        if len(step) != len(jobs) or len(self._pending) != len(step) or self._limit != self._n_batch:
            return 0
        if not all(job.prefilled for job in jobs):
            return 0
        return 1 + min(self._steps_left(job, self._context - 1) for job in jobs)

    def _skip(self, step: Sequence[Chunk], steps: int) -> None:
        """Count the tokens."""
        self._pending = deque(chunk._replace(start=chunk.start + steps) for chunk in step)
        for chunk in step:
            job = self._job_of(self.slots[chunk.seq])
            job.computed += steps
            job.generated += steps

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Halve ``n_batch``; at one token fail every request in a slot."""
        self._recorder.failed_allocations += 1
        if self._limit > 1:
            self._limit //= 2
            self._recorder.split(self._tried)
            return
        # The slots were told of all tokens of the batch when it was composed.
        composed = {chunk.seq: chunk.start + chunk.n for chunk in self._pending}
        self._pending.clear()
        for slot in self.slots:
            if slot.job is not None:
                error = "Input prompt is too big compared to KV size. Please try increasing KV size."
                self._fail(slot.job, now, FailureKind.NO_SLOT, error, refusal=str(reason))
                self._release(slot, now, composed.get(slot.id, slot.job.computed))

    # A batch

    def _new_batch(self, now: float) -> list[Chunk]:
        """Chunks of the next batch; none if there is nothing to do."""
        while True:
            self._launch_queued()
            if all(slot.job is None for slot in self.slots):
                return []
            self._shift_contexts(now)
            batch = self._fill(now)
            if batch:
                return batch
            self._call_released()

    def _fill(self, now: float) -> list[Chunk]:
        """Tokens for each slot, up to ``n_batch`` if so many do not generate."""
        jobs = [(slot.id, slot.job) for slot in self.slots if slot.job is not None]
        batch = [Chunk(seq, job.computed, 1) for seq, job in jobs if job.prefilled]
        room = self._n_batch - len(batch)
        for slot in self.slots:
            job = slot.job
            if job is not None and not job.prefilled:
                if not slot.begun and not self._begin(slot, job, now):
                    continue
                n = min(job.tokens - job.computed, room)
                if n > 0:
                    batch.append(Chunk(slot.id, job.computed, n))
                    room -= n
            if room <= 0:
                break
        return batch

    def _advance(self, n: int) -> None:
        """Take ``n`` tokens off the first pending chunk."""
        first = self._pending.popleft()
        if n < first.n:
            self._pending.appendleft(Chunk(first.seq, first.start + n, first.n - n))

    # Giving out slots

    def _call_released(self) -> None:
        """Put the jobs that released slots have called at the end of the queue."""
        self._queue.extend(self._released)
        self._released.clear()

    def _launch_queued(self) -> None:
        """Give each queued job an idle slot, or defer it."""
        while self._queue:
            job = self._queue.popleft()
            slot = self._choose(job)
            if slot is None:
                self._deferred.append(job)
            else:
                slot.job, slot.begun = job, False

    def _choose(self, job: Job) -> Slot | None:
        """The idle slot for a job (``get_available_slot``); None if all are taken."""
        idle = [slot for slot in self.slots if slot.job is None]
        threshold, longest, chosen = self._scenario.server.slot_similarity, 0, None
        for slot in idle if threshold else ():
            run = slot.content.longest_common_run(job.content)
            if run > longest and run > threshold * slot.content.n:
                longest, chosen = run, slot
        return chosen or min(idle, key=lambda slot: slot.last_used, default=None)

    # The beginning of a prompt

    def _begin(self, slot: Slot, job: Job, now: float) -> bool:
        """Begin with a prompt; False if it is empty, was refused, or must wait."""
        if job.tokens == 0:
            self._end(job, now)
            self._release(slot, now)
            return False
        if job.tokens >= self._context and not self._shifts:
            error = (
                "the request exceeds the available context size. try increasing the context size or enable context "
                f"shift: {job.tokens} prompt tokens, {self._context} in a slot"
            )
            self._fail(job, now, FailureKind.CONTEXT, error, exceeded=self._context)
            self._release(slot, now)
            return False
        cut = self._cut_of(job)
        if cut is not None:
            job.content = job.content.without(*cut)
            job.discarded += cut[1] - cut[0]
            job.truncated = True
        plan = self._plan(job)
        held = self._trim(slot, min(slot.content.common_prefix(job.content), job.tokens - 1))
        if not self._admit(slot, job, now):
            return False
        held = held or self._policy.match(slot.id, job.content, job.tokens)
        self._policy.open(slot.id, plan)
        if held and not self._policy.reserve(Chunk(slot.id, held, 0)):
            held = 0
        slot.begun, slot.kept = True, False
        self._start(slot.id, job, held, now)
        if cut is not None:
            self._backend.discard(slot.id, *cut)
        return True

    def _cut_of(self, job: Job) -> tuple[int, int] | None:
        """The tokens of a prompt that are left out because no slot can hold all; None if one can.

        As many halves of what is behind the first ``n_keep`` as are needed for it to fit.
        """
        if job.tokens < self._context:
            return None
        keep = self._n_keep(job)
        block = (self._context - keep) // 2
        return keep, keep + (job.tokens - keep - block) // block * block

    def _n_keep(self, job: Job) -> int:
        """Tokens at the beginning of a slot that a prompt that is cut and context shifts keep."""
        return max(min(self._scenario.server.n_keep, self._context - 4), 0)

    def _trim(self, slot: Slot, held: int) -> int:
        """Free what a slot holds beyond its first ``held`` tokens; return how many tokens are left."""
        if not self._policy.can_skip_positions:
            held = min(held, slot.stored)
        held = self._policy.can_truncate(slot.id, held) if held else 0
        if held:
            self._policy.free(slot.id, held)
            slot.content, slot.stored = slot.content.head(held), min(slot.stored, held)
        else:
            self._clear(slot)
        return held

    def _admit(self, slot: Slot, job: Job, now: float) -> bool:
        """Whether the policy lets the job begin.

        llama.cpp's always do. For others idle slots are emptied; then the job waits while others run, or fails.
        """
        plan = self._plan(job)
        while not self._policy.admits(plan):
            idle = next((other for other in self.slots if other.job is None and other.kept), None)
            if idle is not None:
                self._clear(idle)
            elif any(other.begun for other in self.slots):
                return False
            else:
                sizes = f"{plan.prompt_tokens} prompt tokens, up to {plan.max_tokens} in all"
                empty = f"an empty cache of {self._policy.capacity} cells"
                why = f"{self._policy.name} can never place the request ({sizes}) in {empty}"
                self._fail(job, now, FailureKind.CACHE, why, refusal=why)
                self._release(slot, now)
                return False
        return True

    # The end of an answer

    def _emit(self, slot: Slot, job: Job, now: float) -> None:
        full = self._emit_token(job, now)
        if job.generated == job.request.output_tokens or full:
            job.truncated |= job.generated < job.request.output_tokens
            self._end(job, now)
            self._release(slot, now, job.computed)

    def _shift_contexts(self, now: float) -> None:
        """Make room in slots that are about to be full, or fail their requests."""
        for slot in self.slots:
            job = slot.job
            if job is None or not slot.begun or self._policy.unbounded or job.computed + 1 < self._context:
                continue
            if self._shifts:
                self._shift_context(slot, job)
            else:
                error = f"context shift is disabled: all {self._context} tokens of the slot are used"
                self._fail(job, now, FailureKind.FULL, error, exceeded=self._context)
                self._release(slot, now, job.computed)

    def _shift_context(self, slot: Slot, job: Job) -> None:
        """Drop half of what follows the first tokens that are kept."""
        keep = self._n_keep(job)
        discard = (job.computed - keep) // 2
        if discard == 0:
            return
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.content = job.content.without(keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        job.truncated = True
        self._recorder.context_shifts += 1

    def _release(self, slot: Slot, now: float, listed: int | None = None) -> None:
        """Take a slot from its job, which has ended, and call the first of the jobs that were deferred.

        ``listed``: tokens of the job that the slot lists; None if the job has not begun.
        """
        job = self._job_of(slot)
        if slot.begun and listed is not None:
            slot.content, slot.stored, slot.kept = job.content.head(listed), job.computed, True
            if not self._scenario.server.keep_idle_slots:
                self._clear(slot)
        self._turn += 1
        slot.job, slot.begun, slot.last_used = None, False, self._turn
        if self._deferred:
            self._released.append(self._deferred.popleft())
            self._released_s = now

    def _clear(self, slot: Slot) -> None:
        if slot.kept:
            self._policy.free(slot.id)
        slot.content, slot.stored, slot.kept = NOTHING, 0, False

    @staticmethod
    def _job_of(slot: Slot) -> Job:
        assert slot.job is not None, "the slot is idle"
        return slot.job
