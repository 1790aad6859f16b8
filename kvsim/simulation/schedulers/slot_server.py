"""What the schedulers of llama-server have in common: a batch of all slots that is run in pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.schedulers.slots import DecisionLog, DecodingSlots, Slot, SlotTasks, no_log
from policies import Chunk, OutOfCells, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule


@mypyc_attr(allow_interpreted_subclasses=True)
class SlotServer(SlotTasks):
    """llama-server's loop: take all tasks, compose a batch of the slots, run it piece by piece.

    A version of the server also says what becomes of slots that are full, and what is done when a piece finds no room.
    """

    def __init__(
        self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder, log: DecisionLog = no_log
    ):
        super().__init__(scenario, policy, backend, recorder, log)
        self._pending: deque[Chunk] = deque()
        """The part of the batch that has not been run yet."""
        self._n_batch = scenario.n_batch
        self._limit = self._n_batch
        """The most tokens of the next piece."""
        self._decoding: DecodingSlots | None = None
        """The slots that only generate; None where the policy has no rule for them."""
        self._some_full = False
        """Whether some generating slot may have as many tokens as it can hold."""

    @property
    def has_batch(self) -> bool:
        """Whether a part of the batch is still to be run."""
        return bool(self._pending)

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let slots that only generate be rows, if a batch always has room for all of them."""
        if rule is not None and len(self.slots) < self._n_batch and self._drafts is None:
            self._decoding = DecodingSlots(self.slots, rule, self._steps_to_end)

    def drafting_s(self, step: Sequence[Chunk]) -> float:
        """The drafter runs for each further token over the slots that get it, and over the step itself."""
        drafts = self._drafts
        if drafts is None or not drafts.costs or not step:
            return 0.0
        jobs = [self.slots[chunk.seq].job for chunk in step]
        checking = [chunk for chunk, job in zip(step, jobs, strict=True) if job is not None and job.prefilled]
        longest = max([chunk.n for chunk in checking], default=1)
        further = [[(1, chunk.start + at) for chunk in checking if chunk.n > at] for at in range(1, longest)]
        return drafts.seconds([(chunk.n, chunk.start + chunk.n) for chunk in step], further)

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

    def _new_batch(self, now: float) -> list[Chunk]:
        """One token, and what is drafted behind it, for each generating slot that is no row, then prompts in order of
        slots."""
        room, decoding = self._n_batch, self._decoding
        beside = self.slots.beside
        if decoding is not None:
            decoding.join_ready(beside)
            room -= len(decoding)
            beside = self.slots.beside
        generating = [(slot.id, slot.job) for slot in beside if slot.job is not None and slot.job.prefilled]
        batch = [Chunk(number, job.computed, 1 + self._draft(job)) for number, job in generating]
        room -= sum([chunk.n for chunk in batch])
        for slot in self._prompts_in_order(beside):
            job = slot.job
            if room <= 0:
                break
            if job is None or job.prefilled or not (slot.begun or self._begin(slot, job, now)):
                continue
            batch.append(Chunk(slot.id, job.computed, self._piece(slot, job, room)))
            room -= batch[-1].n
        return batch

    def _draft(self, job: Job) -> int:
        """Tokens that are drafted for a generating job: no more than it lacks beside its next one, and its slot holds
        with two to spare."""
        if self._drafts is None:
            return 0
        lacking = job.request.output_tokens - job.generated
        return self._drafts.propose(job, min(lacking - 1, self._context - job.computed - 2))

    def _piece(self, slot: Slot, job: Job, room: int) -> int:
        """How many tokens of its prompt a slot puts into a batch that has room for so many."""
        return min(job.tokens - job.computed, room)

    def _prompts_in_order(self, busy: Sequence[Slot]) -> Sequence[Slot]:
        """Slots in the order in which their prompts are computed, from busy ones by number."""
        return busy

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
        slot.checkpoints.clear()
        if discard == 0:
            return
        self._policy.free(slot.id, keep, keep + discard)
        self._policy.shift(slot.id, keep + discard, None, -discard)
        self._backend.discard(slot.id, keep, keep + discard)
        job.content = job.content.without(keep, keep + discard)
        job.computed -= discard
        job.discarded += discard
        self._recorder.counts.context_shifts += 1

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
            accepted = 0 if self._drafts is None or not job.prefilled else self._accepted(job)
            if job.computed == job.tokens + accepted:
                for _ in range(1 + accepted):
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
            self._log("answered", slot=slot.id, job=job)
            self._end(job, now)
            self._release(slot, now, keep=self._scenario.server.keep_idle_slots)
        elif job.tokens >= self._context:
            self._some_full = True

    @abstractmethod
    def _ends_as_full(self, job: Job) -> bool:
        """Whether an answer ends with its latest token because its slot is full."""

    def _halve(self, tried: int, run: int = 0) -> None:
        """Halve ``n_batch``: a piece of ``tried`` tokens found no room, though ``run`` of them were run."""
        self._limit //= 2
        if self._limit < tried:
            self._recorder.split(tried - run)
        if self._drafts is not None:  # A draft in two pieces could not be checked: here it is dropped.
            jobs = self.slots.all
            self._pending = deque(
                chunk._replace(n=1) if (job := jobs[chunk.seq].job) is not None and job.prefilled else chunk
                for chunk in self._pending
            )

    def _fail_all(self, reason: OutOfCells, now: float, error: str, *, empties: bool) -> None:
        """Fail every request in a slot; ``empties``: and empty the slots."""
        in_batch = {chunk.seq: chunk.n for chunk in self._pending}
        self._pending.clear()
        self._log("failed", n_batch=1)
        for slot in self.slots.busy:
            if slot.job is not None:
                self._log("error", job=slot.job)
                self._fail(slot.job, now, FailureKind.OUT_OF_CELLS, error, refusal=str(reason))
                self._release(slot, now, in_batch=in_batch.get(slot.id, 0))
                if empties:
                    self._clear(slot)


def _number(slot: Slot) -> int:
    return slot.id
