"""What the schedulers of llama-server have in common: tasks, slots, and a batch that is run in pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar

import numpy as np

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import ENDLESS, SchedulerBase
from kvsim.simulation.schedulers.decision_log import DecisionLog, no_log
from kvsim.simulation.schedulers.decoding_slots import DecodingSlots
from kvsim.simulation.schedulers.slots import Slot, Slots, reused_runs
from policies import NOTHING, Chunk, Content, NoSlot, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule


@mypyc_attr(allow_interpreted_subclasses=True)
class SlotServer(SchedulerBase):
    """llama-server's loop: take all tasks, compose a batch of the slots, run it piece by piece.

    A version of the server says which slot a request gets, when a deferred one is called, what becomes of prompts that
    are too long and of slots that are full, and what is done when a piece finds no room.
    """

    _last_first: ClassVar[bool] = True
    """Whether of the slots that were never used the last is the one to be used first."""

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder)
        # It refuses no request for the output that it may ask for: what happens when a slot is full, is seen then.
        self._context = min(scenario.slot_context, policy.max_sequence_tokens)
        self.slots = Slots(scenario.server.slots, last_first=self._last_first)
        self.queue: deque[Job] = deque()
        """Requests that have come, or whose turn has come, since tasks were last taken."""
        self.deferred: deque[Job] = deque()
        """Requests that found no idle slot, in the order in which they asked."""
        self._opens_early = not policy.can_copy_out
        """Whether a sequence is opened when its request gets a slot, as layouts with admission need it, rather than
        when the server begins with its prompt, as in llama.cpp."""
        self._log = log
        self._threshold = np.float32(scenario.server.slot_prompt_similarity)
        self._pending: deque[Chunk] = deque()
        """The part of the batch that has not been run yet."""
        self._n_batch = scenario.n_batch
        self._limit = self._n_batch
        """The most tokens of the next piece."""
        self._decoding: DecodingSlots | None = None
        """The slots that only generate; None where the policy has no rule for them."""
        self._admission_blocked = False
        """Whether the first request in the queue waits for a sequence to give up its room."""
        self._some_full = False
        """Whether some generating slot may have as many tokens as it can hold."""

    @property
    def context(self) -> int:
        """The most tokens in a slot."""
        return self._context

    @property
    def has_batch(self) -> bool:
        """Whether a part of the batch is still to be run."""
        return bool(self._pending)

    @property
    def waiting(self) -> Iterable[Job]:
        """Requests without a slot."""
        return chain(self.queue, self.deferred)

    def submit(self, job: Job, now: float) -> None:
        """Queue a request. Even one that no slot can hold gets a slot first."""
        self.queue.append(job)

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let slots that only generate be rows, if a batch always has room for all of them."""
        if rule is not None and len(self.slots) < self._n_batch:
            self._decoding = DecodingSlots(self.slots, rule, self._steps_to_end)

    def _steps_to_end(self, job: Job) -> int:
        return self._steps_left(job, self._context - 1)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next piece of the batch, or of a new batch."""
        self.rule, decoding = None, self._decoding
        if not self._pending and not (decoding is not None and decoding.in_batch) and not self._compose_batch(now):
            return ()
        if decoding is not None and decoding.in_batch:
            piece = list(self._pending)
            if decoding.rule.reserve_with(piece):
                self.rule = decoding.rule
                return piece
            self._leave_all_rows()
        piece, room = [], self._limit
        for chunk in self._pending:
            if room == 0:
                break
            piece.append(chunk if chunk.n <= room else chunk._replace(n=room))
            room -= piece[-1].n
        return piece

    def _compose_batch(self, now: float) -> bool:
        """Compose a new batch; False if there is nothing to run."""
        decoding = self._decoding
        while True:
            self._limit = self._n_batch
            self._take_tasks(now)
            if self._some_full:
                self._shift_contexts(now)
            self._pending.extend(self._new_batch(now))
            if self._pending or (decoding is not None and len(decoding)):
                if self._log is not no_log:
                    self._log("batch", chunks=tuple(self._pending))
                return True
            if not self.queue:
                if decoding is not None:
                    decoding.in_batch = False
                return False

    def decode_only_steps(self) -> int:
        """One where the policy may admit a request after any step that it does not admit now."""
        policy = self._policy
        self.waits_for_room = self._admission_blocked
        if not self.queue or (self._admission_blocked and not policy.admits_while_decoding):
            return ENDLESS
        return 1

    def _leave_all_rows(self) -> None:
        """Take all slots out of the rows; what is left of a batch then has a chunk for each of them."""
        decoding = self._decoding
        if decoding is not None:
            if decoding.in_batch and len(decoding):
                self._pending = deque(decoding.merged(self._pending))
            decoding.end()
            self.rule = None

    # Taking tasks

    def _take_tasks(self, now: float) -> None:
        """Give requests idle slots, until none is in the queue."""
        self._admission_blocked = False
        while self.queue:
            job = self.queue.popleft()
            oldest = self.slots.oldest
            if oldest is None:
                self._log("defer", job=job)
                self.deferred.append(job)
                continue
            prompt = job.content.head(job.request.prompt_tokens)
            slot = self._choose(prompt, oldest)
            if not self._admits(slot, job, now):
                if not job.ended:
                    self.queue.appendleft(job)
                    self._admission_blocked = True
                    return
                continue
            self.slots.take(slot, job, prompt)
            if self._opens_early and prompt.n and (prompt.n < self._context or self._shorten(slot, job)):
                slot.held = self._open(slot, job)
            self._log("launch", slot=slot.id, job=job)
            self._launched()

    @abstractmethod
    def _choose(self, prompt: Content, oldest: Slot) -> Slot:
        """Which of the idle slots a prompt gets, of which ``oldest`` was released longest ago."""

    def _launched(self) -> None:
        """A request was given a slot; nothing follows from that by itself."""

    def _admits(self, slot: Slot, job: Job, now: float) -> bool:
        """Whether the policy lets the request start in this slot; if it never will, the request fails.

        Only layouts that reserve room for whole sequences say no, of which llama.cpp has none: what idle slots keep
        gives way, and then the request waits for others to end.
        """
        plan = self._plan(job)
        if self._policy.admits(plan):
            return True
        self._clear(slot)
        while not self._policy.admits(plan):
            kept = next((other for other in self.slots.all if other.job is None and other.kept), None)
            if kept is not None:
                self._clear(kept)
                continue
            if not self.slots.busy:
                sizes = f"{plan.prompt_tokens} prompt tokens, up to {plan.max_tokens} in all"
                empty = f"an empty cache of {self._policy.capacity} cells"
                why = f"{self._policy.name} can never place the request ({sizes}) in {empty}"
                self._fail(job, now, FailureKind.CACHE, why, refusal=why)
            return False
        return True

    @abstractmethod
    def _call_deferred(self, now: float) -> None:
        """A slot was released: move the first deferred request to the queue, if there is one."""

    # The batch

    def _shift_contexts(self, now: float) -> None:
        """Make room in each generating slot that is full; a row is none any more before it is."""
        self._some_full = False
        for slot in self.slots.beside:
            job = slot.job
            if job is not None and job.prefilled and job.tokens >= self._context and not self._policy.unbounded:
                self._make_room(slot, job, now)
                if slot.job is not None and job.tokens >= self._context:
                    self._some_full = True

    def _make_room(self, slot: Slot, job: Job, now: float) -> None:
        """Discard ``n_discard`` tokens, or half of them, behind the first ``n_keep`` (``--context-shift``)."""
        request = job.request
        keep = self._shift_keeps(job)
        left = job.computed - keep
        asked = self._scenario.server.n_discard if request.n_discard is None else request.n_discard
        discard = self._shift_discards(asked or left // 2, left)
        self._log("shift", slot=slot.id, job=job, n_keep=keep, n_left=left, n_discard=discard)
        slot.truncated = True
        if discard == 0:
            return
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.content = job.content.without(keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        self._recorder.context_shifts += 1

    def _n_keep(self, job: Job) -> int:
        """Tokens at the beginning of its slot that a request wants to be kept."""
        own = job.request.n_keep
        keep = self._scenario.server.n_keep if own is None else own
        return job.request.prompt_tokens if keep < 0 else keep

    @abstractmethod
    def _shift_keeps(self, job: Job) -> int:
        """Tokens at the beginning of a slot that a context shift keeps."""

    @abstractmethod
    def _shift_discards(self, discard: int, left: int) -> int:
        """How many of the ``left`` tokens behind those a context shift discards where ``discard`` are asked for."""

    def _new_batch(self, now: float) -> list[Chunk]:
        """One token for each generating slot that is no row, then prompts in order of slots."""
        room, decoding = self._n_batch, self._decoding
        beside = self.slots.beside
        if decoding is not None:
            decoding.join_ready(beside)
            room -= len(decoding)
            beside = self.slots.beside
        batch = [Chunk(slot.id, slot.job.computed, 1) for slot in beside if slot.job is not None and slot.job.prefilled]
        room -= len(batch)
        for slot in self._prompts_in_order(beside):
            job = slot.job
            if room <= 0:
                break
            if job is None or job.prefilled or not (slot.begun or self._begin(slot, job, now)):
                continue
            batch.append(Chunk(slot.id, job.computed, min(job.tokens - job.computed, room)))
            room -= batch[-1].n
        return batch

    def _prompts_in_order(self, busy: Sequence[Slot]) -> Sequence[Slot]:
        """Slots in the order in which their prompts are computed, from busy ones by number."""
        return busy

    # The beginning of a prompt

    def _begin(self, slot: Slot, job: Job, now: float) -> bool:
        """Begin with a prompt in its slot; False if it is refused, or is empty."""
        n = job.request.prompt_tokens
        self._log("prompt", slot=slot.id, job=job, context=self._context, tokens=n)
        if n == 0:
            self._log("empty", slot=slot.id, job=job)
            self._log("answered", slot=slot.id, job=job)
            self._end(job, now)
            self._release(slot, now)
            return False
        if n >= self._context and not self._shorten(slot, job):
            sizes = f"{n} prompt tokens, {self._context} in a slot"
            reason = f"the request exceeds the available context size: {sizes}"
            self._fail(job, now, FailureKind.CONTEXT, reason, exceeded=self._context)
            self._log("error", job=job)
            self._release(slot, now)
            return False
        held = slot.held if self._opens_early else self._open(slot, job)
        slot.begun = True
        self._start(slot.id, job, held, now)
        return True

    def _open(self, slot: Slot, job: Job) -> int:
        """Open the job's sequence on what its slot holds of the prompt; return how many tokens that are."""
        held = self._held(slot, job)
        if not held:
            held = self._policy.match(slot.id, job.content, job.tokens)
        self._policy.open(slot.id, self._plan(job))
        slot.kept = True
        if held and not self._policy.reserve(Chunk(slot.id, held, 0)):
            held = 0
        return held

    def _shorten(self, slot: Slot, job: Job) -> bool:
        """Make a prompt fit into a slot; False if it is to be refused."""
        return False

    def _held(self, slot: Slot, job: Job) -> int:
        """How much of its prompt the slot holds; all that it holds behind that is freed."""
        held = 0
        if not self._policy.can_skip_positions and slot.uncomputed:
            slot.content, slot.uncomputed = slot.content.head(slot.content.n - slot.uncomputed), 0
        if self._caches(job):
            held = slot.content.common_prefix(slot.prompt)
            if self._scenario.server.cache_reuse and self._policy.can_shift and slot.content.n:
                held = self._reuse(slot, held)
        if held == slot.prompt.n:
            self._log("one_at_least", slot=slot.id, job=job)
            held -= 1
        held = self._policy.can_truncate(slot.id, held) if held else 0
        if slot.kept:
            self._policy.free(slot.id, held)
        slot.content, slot.kept = slot.prompt.head(held), held > 0
        return held

    def _caches(self, job: Job) -> bool:
        """Whether a request uses what its slot holds."""
        own = job.request.cache_prompt
        return self._scenario.server.cache_prompt if own is None else own

    def _reuse(self, slot: Slot, held: int) -> int:
        """Move runs of tokens that the prompt has elsewhere to their places in it; return what is held then."""
        for source, n in reused_runs(slot.content, slot.prompt, held, self._scenario.server.cache_reuse):
            self._log("reuse", slot=slot.id, job=slot.job, tokens=n, source=source, to=held)
            self._policy.free(slot.id, held, source)
            self._policy.shift(slot.id, source, source + n, held - source)
            held += n
        return held

    # After a step

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens, and one more where a prompt or the last answer's token is done; end requests by slot."""
        decoding, ready = self._decoding, list[Slot]()
        if decoding is not None and decoding.in_batch:
            ready = decoding.leave_ended()
            step = list(self._pending)
        for chunk in step:
            self._advance(chunk.n)
            slot = self.slots[chunk.seq]
            job = slot.job
            assert job is not None, "a chunk ran for an empty slot"
            job.computed += chunk.n
            if job.computed == job.tokens:
                self._emit_token(job, now)
                ready.append(slot)
        ready.sort(key=_number)
        for slot in ready:
            if slot.job is not None:
                self._end_if_done(slot, slot.job, now)

    def _advance(self, n: int) -> None:
        """Take ``n`` tokens off the first pending chunk."""
        first = self._pending.popleft()
        if n < first.n:
            self._pending.appendleft(Chunk(first.seq, first.start + n, first.n - n))

    def _end_if_done(self, slot: Slot, job: Job, now: float) -> None:
        """End a request that has got a token if its slot is full, or if it has all that it asked for."""
        full = self._ends_as_full(job)
        if full:
            slot.truncated = True
            self._log("full", slot=slot.id, job=job, tokens=job.computed)
        if full or job.generated >= job.request.output_tokens:
            job.truncated = job.generated < job.request.output_tokens
            self._log("answered", slot=slot.id, job=job)
            self._end(job, now)
            self._release(slot, now, keep=self._scenario.server.keep_idle_slots)
        elif job.tokens >= self._context:
            self._some_full = True

    @abstractmethod
    def _ends_as_full(self, job: Job) -> bool:
        """Whether an answer ends with its latest token because its slot is full."""

    def _release(self, slot: Slot, now: float, *, in_batch: int = 0, keep: bool = True) -> None:
        """Let a request go from its slot, which keeps what it holds; the first deferred request is next.

        ``in_batch``: tokens of it that were to be run when it failed.
        """
        job = slot.job
        assert job is not None, "an empty slot is released"
        self._admission_blocked = False
        if slot.begun:
            slot.content, slot.kept, slot.uncomputed = job.content.head(job.computed + in_batch), True, in_batch
        self._log("stop", slot=slot.id, job=job, tokens=slot.content.n, truncated=slot.truncated)
        self.slots.vacate(slot)
        if self.deferred:
            self._log("pop", job=self.deferred[0])
            self._call_deferred(now)
        if not keep:
            self._clear(slot)

    def _halve(self, tried: int, run: int = 0) -> None:
        """Halve ``n_batch``: a piece of ``tried`` tokens found no room, though ``run`` of them were run."""
        self._limit //= 2
        if self._limit < tried:
            self._recorder.split(tried - run)

    def _fail_all(self, reason: NoSlot, now: float, error: str, *, empties: bool) -> None:
        """Fail every request in a slot; ``empties``: and empty the slots."""
        in_batch = {chunk.seq: chunk.n for chunk in self._pending}
        self._pending.clear()
        self._log("failed", n_batch=1)
        for slot in self.slots.busy:
            if slot.job is not None:
                self._log("error", job=slot.job)
                self._fail(slot.job, now, FailureKind.NO_SLOT, error, refusal=str(reason))
                self._release(slot, now, in_batch=in_batch.get(slot.id, 0))
                if empties:
                    self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._admission_blocked = False
        self._log("clear", slot=slot.id, tokens=slot.content.n)
        if slot.kept:
            self._policy.free(slot.id)
        slot.content, slot.kept, slot.uncomputed = NOTHING, False, 0


def _number(slot: Slot) -> int:
    return slot.id
