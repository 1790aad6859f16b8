"""llama-server's slots, what of their tokens a prompt can use again, and how requests come to them."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import DecodingJobs, SchedulerBase
from policies import NOTHING, Chunk, Content, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule

if TYPE_CHECKING:
    from kvsim.simulation.schedulers.context_checkpoints import ContextCheckpoint


class DecisionLog(Protocol):
    """Hears of every decision, by the kind and the fields that recordings of llama-server give it."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """A decision was made."""
        ...


def no_log(kind: str, **fields: Any) -> None:
    """Hear nothing."""


@dataclass(slots=True, eq=False)
class Slot:
    """One of the server's slots; its number is the sequence id."""

    id: int
    job: Job | None = None
    begun: bool = False
    """Whether the server has begun with the job's prompt."""
    prompt: Content = NOTHING
    """The job's prompt, without its answer."""
    held: int = 0
    """Tokens of the prompt that were there when the sequence was opened ahead of its prompt."""
    truncated: bool = False
    """Whether the job's context was shifted, or its slot was full."""
    content: Content = NOTHING
    """What the slot holds: while it is idle, or its job has not begun, what was left there."""
    kept: bool = False
    """Whether it may have cells, which it may without any content."""
    uncomputed: int = 0
    """Tokens at the end of the content that were to be run when their request failed, and have no cells."""
    last_used: int = -1
    """Value of a counter when the slot was last released; -1 before."""
    checkpoints: list[ContextCheckpoint] = field(default_factory=list)
    """What was saved of what it holds, under policies of which a part cannot be rolled back; the oldest first."""

    def take(self, job: Job, prompt: Content) -> None:
        """Hold a job, whose prompt the server has not begun with."""
        self.job, self.prompt, self.begun, self.held = job, prompt, False, 0
        job.slot = self.id

    def vacate(self, turn: int) -> None:
        """Let the job go."""
        self.job, self.begun, self.prompt, self.truncated, self.last_used = None, False, NOTHING, False, turn


class Slots:
    """All slots of a server, by number: idle ones, those that are rows of a placement rule, and the other busy ones."""

    def __init__(self, n: int, *, last_first: bool):
        """``last_first``: of the slots that were never used the last is the one to be used first."""
        self.all = [Slot(number) for number in range(n)]
        order = reversed(self.all) if last_first else self.all
        self._idle: dict[int, Slot] = {slot.id: slot for slot in order}
        self._beside: dict[int, Slot] = {}
        self._turn = 0

    def __getitem__(self, number: int) -> Slot:
        return self.all[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def oldest(self) -> Slot | None:
        """The idle slot that was released longest ago, or was never used; None if all are busy."""
        return next(iter(self._idle.values()), None)

    @property
    def idle(self) -> list[Slot]:
        """The idle slots, by number."""
        return [slot for _, slot in sorted(self._idle.items())]

    @property
    def beside(self) -> list[Slot]:
        """The busy slots that are no rows, by number."""
        beside = self._beside
        return list(beside.values()) if len(beside) < 2 else [slot for _, slot in sorted(beside.items())]

    @property
    def busy(self) -> list[Slot]:
        """The busy slots, by number."""
        return [slot for slot in self.all if slot.job is not None]

    def take(self, slot: Slot, job: Job, prompt: Content) -> None:
        """Give an idle slot to a job, whose prompt the server has not begun with."""
        del self._idle[slot.id]
        self._beside[slot.id] = slot
        slot.take(job, prompt)

    def vacate(self, slot: Slot) -> None:
        """Let a job go from its slot, which is no row."""
        self._turn += 1
        slot.vacate(self._turn)
        del self._beside[slot.id]
        self._idle[slot.id] = slot

    def become_row(self, slot: Slot) -> None:
        """Note that a busy slot is a row of a placement rule from now on."""
        del self._beside[slot.id]

    def be_no_row(self, slot: Slot) -> None:
        """Note that a slot is no row any more."""
        self._beside[slot.id] = slot


def reused_runs(held: Content, prompt: Content, prefix: int, shortest: int) -> Iterator[tuple[int, int]]:
    """Runs of at least ``shortest`` tokens that a prompt has behind the first ``prefix``, which are held elsewhere.

    Each is (its first token's index in ``held``, its tokens); its place in the prompt is behind all before it
    (llama.cpp's ``--cache-reuse``). What is held is gone through once, and so is the prompt, which goes on only behind
    a run that was found.
    """
    ours, theirs = held.tokens(), prompt.tokens()
    at, place = prefix, prefix
    while at < len(ours) and len(theirs) - place >= shortest:
        starts = at + np.flatnonzero((ours[at : len(ours) - shortest + 1] == theirs[place]).all(axis=1))
        for start in starts.tolist():
            n = min(len(ours) - start, len(theirs) - place)
            same = (ours[start : start + n] == theirs[place : place + n]).all(axis=1)
            n = n if same.all() else int(same.argmin())
            if n >= shortest:
                yield start, n
                at, place = start + n, place + n
                break
        else:
            return


class DecodingSlots:
    """The slots that get a token in every step, in the order of their numbers, as long as nothing is to be decided."""

    def __init__(self, slots: Slots, rule: PlacementRule, steps_left: Callable[[Job], int]):
        """``steps_left``: steps that a job goes on for without ending."""
        self._slots = slots
        self._jobs = DecodingJobs(rule)
        self._steps_left = steps_left
        self.rule = rule
        rule.places_whole_steps = True
        self.in_batch = False
        """Whether the batch that is being run has a token for each of these slots."""

    def __len__(self) -> int:
        return len(self._jobs)

    def join_ready(self, beside: Sequence[Slot]) -> None:
        """Let slots join that now only generate, and those leave whose next token needs a decision.

        ``beside``: the busy slots that are no rows, by number. Where all take from one pool, they must take in the
        order of slots: then either all that generate are rows, or none.
        """
        rule, jobs, slots = self.rule, self._jobs, self._slots
        blocked: list[int] = rule.blocked() if len(jobs) else []
        for slot in beside:
            job = slot.job
            if job is None or job.generated == 0:
                continue
            left = self._steps_left(job)
            if left >= 0 and jobs.join(job, left, slot.id):
                slots.become_row(slot)
            elif rule.takes_from_pool:
                self.end()
                return
        for number in blocked:
            jobs.leave(number)
            slots.be_no_row(slots[number])
        self.in_batch = True

    def merged(self, pending: Iterable[Chunk]) -> list[Chunk]:
        """All chunks of a batch: one token for each generating slot, in their order, then prompts."""
        singles, prompts = [Chunk(job.slot, _computed(job, self.rule), 1) for job in self._jobs.jobs()], list[Chunk]()
        for chunk in pending:
            job = self._slots[chunk.seq].job
            (singles if job is not None and job.generated else prompts).append(chunk)
        return sorted(singles) + prompts

    def leave_ended(self) -> list[Slot]:
        """Take out the slots that had their last token, or are full, in the step taken last, and return them."""
        self.in_batch = False
        found = [self._slots[job.slot] for job in self._jobs.leave_ended()]
        for slot in found:
            self._slots.be_no_row(slot)
        return found

    def end(self) -> None:
        """Take all slots out."""
        for job in self._jobs.jobs():
            self._slots.be_no_row(self._slots[job.slot])
        self._jobs.leave_all()
        self.in_batch = False


def _computed(job: Job, rule: PlacementRule) -> int:
    """How many tokens of a job with a row have been computed."""
    row = rule.by_seq[job.slot]
    return job.computed + int(row.given - row.left)


@mypyc_attr(allow_interpreted_subclasses=True)
class SlotTasks(SchedulerBase):
    """How requests come to slots, begin there on what a slot holds of their prompt, and go from them.

    A version of the server says which slot a request gets, when a deferred one is called, and what becomes of prompts
    that are too long.
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
        self._opens_early = not policy.can_export
        """Whether a sequence is opened when its request gets a slot, as layouts with admission need it, rather than
        when the server begins with its prompt, as in llama.cpp."""
        self._log = log
        self._threshold = np.float32(scenario.server.slot_prompt_similarity)
        self._admission_blocked = False
        """Whether the first request in the queue waits for a sequence to give up its room."""

    @property
    def context(self) -> int:
        """The most tokens in a slot."""
        return self._context

    @property
    def waiting(self) -> Iterable[Job]:
        """Requests without a slot."""
        return chain(self.queue, self.deferred)

    def submit(self, job: Job, now: float) -> None:
        """Queue a request. Even one that no slot can hold gets a slot first."""
        self.queue.append(job)

    def _take_tasks(self, now: float) -> None:
        """Give requests idle slots, until none is in the queue."""
        self._admission_blocked = False
        self._recorder.held_back(False)
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
                    self._recorder.held_back(True)
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

    def _begin(self, slot: Slot, job: Job, now: float) -> bool:
        """Begin with a prompt in its slot; False if it is refused, or is empty."""
        n = job.request.prompt_tokens
        self._log("prompt", slot=slot.id, job=job, context=self._context, tokens=n)
        if n == 0:
            self._log("empty", slot=slot.id, job=job)
            self._log("answered", slot=slot.id, job=job)
            self._finish_as("completed", job, now)
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
        held = self._usable(slot, job, held)
        if slot.kept:
            self._policy.free(slot.id, held)
        slot.content, slot.kept = slot.prompt.head(held), held > 0
        return held

    def _usable(self, slot: Slot, job: Job, held: int) -> int:
        """With how many of the first ``held`` tokens of its prompt, which its slot holds, a request can go on."""
        held = self._without_last(slot, job, held)
        return self._policy.can_truncate(slot.id, held) if held else 0

    def _without_last(self, slot: Slot, job: Job, held: int) -> int:
        """One token less where all of a prompt is there: it is computed for what comes after it."""
        if held < slot.prompt.n:
            return held
        self._log("one_at_least", slot=slot.id, job=job)
        return held - 1

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

    def _clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._admission_blocked = False
        self._log("clear", slot=slot.id, tokens=slot.content.n)
        if slot.kept:
            self._policy.free(slot.id)
        slot.content, slot.kept, slot.uncomputed = NOTHING, False, 0
        slot.checkpoints.clear()
