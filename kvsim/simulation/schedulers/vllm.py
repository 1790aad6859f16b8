"""vLLM's scheduler: a token budget, running requests first, preemption when the cache is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from kvsim.errors import Livelock
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import ENDLESS, DecodingJobs, SchedulerBase, no_progress
from kvsim.simulation.schedulers.queues import Queue, queue_for, urgency
from policies import Chunk, OutOfCells, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule

_LOOK_EVERY: Final = 1000
"""Steps without progress after which it is checked whether any can still come."""


class ProgressWatch:
    """Counts the steps since a request last had more tokens computed than ever before."""

    def __init__(self) -> None:
        self._steps = 0

    def is_stuck(self, progressed: bool, running: Iterable[Job], waiting: Iterable[Job]) -> bool:
        """Count a step, in which a request got further than ever before or not; return whether none ever will again.

        That is certain once all tokens that are known could have been computed anew since the last progress.
        """
        self._steps = 0 if progressed else self._steps + 1
        if self._steps == 0 or self._steps % _LOOK_EVERY:
            return False
        return self._steps > sum([job.tokens for job in chain(running, waiting)])


_admission = attrgetter("admission")


class RunningJobs:
    """Slots and their jobs. Without a placement rule, ``others`` stays empty and ``decoding`` is None."""

    def __init__(self, slots: int, policy: Policy):
        self._policy = policy
        self.jobs: list[Job] = []
        """All of them, in order of admission."""
        self.by_slot: dict[int, Job] = {}
        self.free_slots = list(range(slots - 1, -1, -1))
        """The next one to be given out is the last."""
        self.decoding: DecodingJobs | None = None
        self.others: list[Job] = []
        """The jobs that are no rows, where there are rows; in order of admission."""
        self._admissions = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def use_rule(self, rule: PlacementRule) -> None:
        """Let jobs that only decode be rows of a placement rule from now on."""
        self.decoding = DecodingJobs(rule)
        self.others = list(self.jobs)

    def admit(self, job: Job) -> int:
        """Give a job the next free slot, and return its number."""
        self._admissions += 1
        job.admission = self._admissions
        self.jobs.append(job)
        if self.decoding is not None:
            self.others.append(job)
        slot = self.free_slots.pop()
        self.by_slot[slot] = job
        return slot

    def remove(self, job: Job) -> None:
        """Let a job go, and take back its slot and its cells."""
        self.stop(job)
        self.jobs.remove(job)
        del self.by_slot[job.slot]
        self.free_slots.append(job.slot)
        self._policy.free(job.slot)

    def stop(self, job: Job) -> None:
        """Compose no more chunks of a job, which keeps its slot."""
        if job in self.others:
            self.others.remove(job)

    def join_ready(self, steps_left: Callable[[Job], int], last_tokens: Mapping[Job, int] | None) -> None:
        """Let jobs become rows that only decode, in order of admission, up to the first that cannot.

        ``steps_left``: steps that a job goes on for without ending. ``last_tokens``: tokens of jobs in the last step,
        where only those with one may join, as rows have in every step.
        """
        decoding, others = self.decoding, self.others
        if decoding is None or not others:
            return
        for at, job in enumerate(others):
            ready = job.generated and job.computed == job.tokens - 1 and job.computed >= job.furthest
            if ready and last_tokens is not None:
                ready = last_tokens.get(job) == 1
            if not ready or not decoding.join(job, steps_left(job)):
                del others[:at]
                return
        others.clear()

    def leave_rows(self, slots: list[int]) -> None:
        """Take the jobs of some slots out of the rows."""
        assert self.decoding is not None
        self.others += map(self.decoding.leave, slots)
        self.others.sort(key=_admission)

    def leave_all_rows(self) -> None:
        """Take all jobs out of the rows."""
        if self.decoding is not None and len(self.decoding):
            self.decoding.leave_all()
            self.others = [job for job in self.jobs if not job.ended]


_UNLIMITED: Final = 1 << 62


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm(SchedulerBase):
    """``Scheduler.schedule`` of vLLM 0.33.0, for any policy.

    A step has at most ``n_batch`` tokens. Running requests come first, each with all that it still has to compute; if
    one finds no room, the last of the running (or the least urgent) is preempted. Then, if none was preempted, waiting
    requests are admitted in order, as long as there are slots, tokens and room. Policies that cannot reserve room chunk
    by chunk are asked to place the whole step; if they refuse, the last running request is preempted and the step is
    composed anew.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        server = scenario.server
        self._running = RunningJobs(server.slots, policy)
        self.running = self._running.jobs
        """The jobs that have a slot, in order of admission."""
        self.waiting: Queue = queue_for(server, policy)
        self._budget = scenario.n_batch
        self._threshold = server.long_prefill_threshold
        self._chunked = server.chunked_prefill
        self._reserve_full = server.reserve_full
        if not self._chunked:
            self._most_prompt_tokens = self._budget
        self._last_to_stay: Callable[[Job], Any]
        """Sort key of the running requests: the last in this order is preempted first."""
        if server.victim == "fewest-generated":
            self._last_to_stay = _urgency_and_progress if server.order == "priority" else _progress
        else:
            self._last_to_stay = urgency if server.order == "priority" else _admission
        self._requeue: Callable[[Job], None] = self.waiting.add if server.requeue == "back" else self.waiting.put_back
        self._swaps = server.preemption == "swap"
        self._limit = _UNLIMITED if policy.unbounded else self._context - 1
        """Tokens of a sequence that are ever computed."""
        self._cache_full = False
        """Whether a step found no room and no request has ended since: then none is admitted."""
        self._progress = ProgressWatch()
        self._most_of_one = _UNLIMITED
        """Tokens that one prompt may have of a step: a long one gives way to others, if there are any."""
        self._last_tokens: dict[Job, int] | None = None
        """Tokens of each job in the step that was completed last, where these decide whether it may be a row."""
        self._left = 0
        """Tokens of the budget that the step composed last has left."""
        self._admission_blocked = False
        """Whether no request can be admitted until one ends, or a row gives room back."""
        self._shortest_wait = _UNLIMITED
        """At most the steps that any of the waiting requests still takes."""
        self._draft_slots = self._lookahead = 0
        """As ``slots`` and ``lookahead`` of ``Drafts``."""
        self._padded: set[Job] = set()
        """Requests that are admitted with drafts which say nothing, so that all sequences have as many tokens."""

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let requests that only decode be rows from now on."""
        if rule is not None and self._drafts is None:
            self._running.use_rule(rule)

    def use_drafts(self, drafts: Drafts) -> None:
        """Check drafts from now on, each in one chunk with the token before it; no request is a row any more."""
        super().use_drafts(drafts)
        self._draft_slots, self._lookahead = drafts.slots, drafts.lookahead
        self._drafts_beyond = drafts.tokens + drafts.lookahead

    def drafting_s(self, step: Sequence[Chunk]) -> float:
        """The drafter runs over the step, and then for each further token over all sequences that are in it."""
        drafts = self._drafts
        if drafts is None or not drafts.costs or not step:
            return 0.0
        ends = [chunk.start + chunk.n for chunk in step]
        further = [[(1, end + at) for end in ends] for at in range(1, drafts.tokens)]
        return drafts.seconds([(chunk.n, chunk.start + chunk.n) for chunk in step], further)

    def submit(self, job: Job, now: float) -> None:
        """Fail what could never be served; queue all other requests."""
        if not self._refuses(job, now):
            self.waiting.add(job)
            self._note_waiting(job)

    def _note_waiting(self, job: Job) -> None:
        """Note how many steps a request that waits from now on takes at least."""
        self._shortest_wait = min(self._shortest_wait, self._steps_left(job, self._context - 1) + 1)

    def steps_to_next_end(self) -> int:
        """By the output tokens that requests lack: vLLM ends none before, unless drafts are accepted."""
        if self._drafts is not None:
            return 0
        running, found = self._running, _UNLIMITED
        others = running.jobs
        if running.decoding is not None:
            others = running.others
            for row in running.decoding.rule.rows:
                found = min(found, int(row.left))
        for job in others:
            if not job.ended:
                found = min(found, self._steps_left(job, self._context - 1) + 1)
        if not self.waiting:
            self._shortest_wait = _UNLIMITED
        return min(found, self._shortest_wait)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone."""
        self._leave_all_rows()
        if job.status == "running":
            self._running.remove(job)
        else:
            self.waiting.remove(job)
            if job.exported is not None:
                self._policy.drop_export(job.exported)
                job.exported = None
        self._fail(job, now, FailureKind.CANCELLED, "cancelled")

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the next step. Raises ``Livelock``."""
        return self.schedule(now)

    def schedule(self, now: float) -> Sequence[Chunk]:
        """Compose chunks for running requests, then for waiting ones: vLLM's ``schedule``. Raises ``Livelock``."""
        self.rule, self._admission_blocked = None, False
        self._recorder.held_back(self._cache_full)
        running = self._running
        in_all = len(running.jobs) + len(self.waiting)
        if not in_all:
            return ()
        self._most_of_one = self._threshold if self._threshold and in_all > 1 else _UNLIMITED
        if running.decoding is not None:
            step = self._compose_beside_rows(running.decoding, now)
            if step is not None:
                self.rule = running.decoding.rule
                return step
            self._leave_all_rows()
        chunks: dict[int, Chunk] = {}
        if self._serve_running(chunks) and not (self._cache_full and running.jobs):
            self._admit_waiting(chunks, now)
        return list(chunks.values()) if chunks else self._nothing_composed(now)

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        """No request could be given a token. Raises ``Livelock``."""
        raise self._livelock(now)

    def decode_only_steps(self) -> int:
        """One where a request may be admitted after it, or one that runs gets no token in it."""
        running = self._running
        self.waits_for_room = False
        if running.others:
            return 1
        if self.waiting and running.free_slots and self._left > 0 and not self._cache_full:
            self.waits_for_room = self._admission_blocked
            return ENDLESS if self._admission_blocked else 1
        return ENDLESS

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """Preempt the last of the running; if it is alone and holds nothing, it can never be served."""
        self._recorder.out_of_cells()
        self._leave_all_rows()
        if reason.done:
            self._complete([chunk for batch in reason.done for chunk in batch.chunks], now)
            self._leave_all_rows()
        if len(self.running) == 1 and self.running[0].computed == 0:
            raise self._livelock(now, str(reason))
        self._preempt(max(self.running, key=self._last_to_stay))
        self._cache_full = True
        self._count_step(False, now)

    def _compose_beside_rows(self, decoding: DecodingJobs, now: float) -> list[Chunk] | None:
        """Compose a step in which rows get their tokens; None if one is in the way or must be preempted.

        Rows come first in the order of admission, so that what they take is taken in that order.
        """
        rule, others = decoding.rule, self._running.others
        blocked = rule.blocked()
        if blocked:
            self._leave_rows(blocked)
        rows = len(decoding)
        left = self._budget - rows
        if left < 0:
            return None
        if others and others[0].admission < decoding.newest and rule.takes_from_pool:
            return None
        may_admit = bool(self.waiting and self._running.free_slots and left > 0 and not self._cache_full)
        if rows and not rule.reserve():  # It may evict what has run, which waits for a step that asks for room.
            return None
        step: dict[int, Chunk] = {}
        if others:
            unserved = self._serve_others(step, left)
            if unserved is None:
                return None
            left = unserved
        self._left = left
        if may_admit:
            waiting = len(self.waiting)
            self._admit_waiting(step, now)
            may_change = self._policy.can_free_while_decoding or self._policy.admits_while_decoding
            self._admission_blocked = len(self.waiting) == waiting and not may_change
        return list(step.values()) if step or rows else None

    def _serve_others(self, step: dict[int, Chunk], left: int) -> int | None:
        """Add chunks for the jobs beside the rows; the tokens left, or None if one finds no room."""
        for job in self._running.others:
            n = min(self._outstanding(job), self._most_of_one, left, self._room(job))
            if n > 0:
                chunk = Chunk(job.slot, job.computed, n)
                if not self._reserve(job, chunk):
                    return None
                step[job.slot] = chunk
                left -= n
        return left

    def _serve_running(self, step: dict[int, Chunk]) -> bool:
        """Add a chunk for each running request; False if one had to be preempted."""
        budget, at, preempted, slots = self._budget, 0, False, self._draft_slots
        running = self._running.jobs
        while at < len(running) and budget > slots:
            job = running[at]
            n = min(self._outstanding(job), self._most_of_one, budget - slots, self._room(job))
            if self._policy.cuts_chunks and n > 0:
                n = self._cut(job, job.slot, job.computed, n)
            if n <= 0:
                at += 1
                continue
            chunk = Chunk(job.slot, job.computed, n)
            while not self._reserve(job, chunk):
                victim = max(running, key=self._last_to_stay)
                if victim.slot in step:
                    budget += step.pop(victim.slot).n + slots
                    at -= 1
                preempted = True
                self._recorder.held_back(True)
                self._preempt(victim)
                if victim is job:
                    break
            else:
                step[job.slot] = chunk
                budget -= n + slots
                at += 1
        self._left = budget
        return not preempted

    def _admit_waiting(self, step: dict[int, Chunk], now: float) -> None:
        """Add chunks for waiting requests, in order, until one finds no room."""
        budget, policy, running, slots = self._left, self._policy, self._running, self._draft_slots
        if budget > slots and running.free_slots:
            self.waiting.arrange()
        pads = self._drafts is not None and not any(map(self._is_prefilling, map(running.by_slot.__getitem__, step)))
        served = bool(step)
        while budget > slots and running.free_slots and (job := self._next_waiting()) is not None:
            slot, others_run = running.free_slots[-1], bool(running.jobs)
            plan, swapped, tokens = self._plan(job), job.exported is not None, job.tokens
            if job.generated:
                plan = plan._replace(generated=job.generated)
            if not policy.admits(plan):
                self._recorder.held_back(True)
                return
            if job.exported is not None:
                try:
                    policy.import_(slot, job.exported, upto=tokens, waits=others_run)
                except OutOfCells:
                    self._recorder.held_back(True)
                    return
                held, job.exported = job.exported.tokens, None
            else:
                held = policy.match(slot, job.content, tokens)
            n, padded = tokens - held, False
            if pads and n == 1 and (served or held) and self._drafts is not None:
                padded = held + 1 + self._drafts.tokens <= self._limit
                n += self._drafts.tokens if padded else 0
                if padded and n > budget - slots:
                    return
            n = min(n, self._most_of_one)
            if n > budget - slots:
                if not self._chunked and not swapped:
                    return
                n = budget - slots
            if policy.cuts_chunks:
                n = self._cut(job, slot, held, n)
                if not n:
                    return
            chunk = Chunk(slot, held, n)
            policy.open(slot, plan)
            whole = tokens if self._reserve_full else 0
            if policy.can_reserve and not self._reserve_first(chunk, tokens, whole, others_run):
                policy.free(slot)
                self._recorder.held_back(True)
                return
            self.waiting.remove(job)
            running.admit(job)
            self._start(slot, job, held, now)
            if padded:
                self._padded.add(job)
            step[slot] = chunk
            budget -= n + slots

    def _is_prefilling(self, job: Job) -> bool:
        """Whether a running job has more to compute than its newest token."""
        return not job.generated or job.computed < job.tokens - 1

    def _cut(self, job: Job, slot: int, start: int, n: int) -> int:
        """How many of these tokens the policy lets a job have in a step."""
        most = min(self._budget, self._threshold or self._budget)
        prompt, tokens = job.request.prompt_tokens, self._tokens_known(job)
        return self._policy.cut_chunk(slot, start, n, prompt=prompt, tokens=tokens, most=most)

    def _tokens_known(self, job: Job) -> int:
        """Tokens of a job of which it is known what they say."""
        return job.tokens

    def _outstanding(self, job: Job) -> int:
        """Tokens of a running job that are still to be composed, those drafted among them."""
        return job.tokens - job.computed + job.drafted

    def _room(self, job: Job) -> int:
        """Tokens that a running job's sequence has room for beyond those that are computed."""
        return self._limit - job.computed

    def _reserve(self, job: Job, chunk: Chunk) -> bool:
        """Set room aside for a chunk of a running job."""
        if self._drafts is None:
            return self._policy.reserve(chunk)
        return self._policy.reserve_with_drafts(chunk, self._lookahead, known=job.tokens)

    def _reserve_first(self, chunk: Chunk, known: int, whole: int, waits: bool) -> bool:
        """Set room aside for the first chunk of a job, of which so many tokens are known; the others as in
        ``Policy.reserve``."""
        if self._drafts is None:
            return self._policy.reserve(chunk, whole=whole, waits=waits)
        return self._policy.reserve_with_drafts(chunk, self._lookahead, whole=whole, waits=waits, known=known)

    def _next_waiting(self) -> Job | None:
        """The waiting request to be admitted next."""
        return self.waiting.first() if self.waiting else None

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens, emit output tokens, and let requests become rows that now only decode."""
        running, progressed = self._running, False
        if self.rule is not None and running.decoding is not None:
            progressed = len(running.decoding) > 0
            for job in running.decoding.leave_ended():
                self._finish(job, now)
        for chunk in step:
            job = running.by_slot[chunk.seq]
            job.computed += chunk.n
            accepted = 0 if self._drafts is None or job.ended else self._checked(job)
            if job.computed > job.furthest:
                job.furthest, progressed = job.computed, True
            if job.computed == job.tokens + accepted and not job.ended:
                self._emit(job, 1 + accepted, now)
        self._count_step(progressed, now)
        if running.others:
            running.join_ready(lambda job: self._steps_left(job, self._context - 1), self._last_tokens)

    def _checked(self, job: Job) -> int:
        """Drafted tokens that a job's last chunk has checked and that are accepted; the next ones are drafted."""
        padded = job in self._padded
        self._padded.discard(job)
        accepted = self._accepted(job, hopeless=padded)
        self._note_checked(job)
        return accepted

    def _note_checked(self, job: Job) -> None:
        """Let be found what a step has computed that checks drafts."""
        if self._drafts is not None and self._drafts.are_noted and job.computed >= job.tokens:
            # What is accepted beyond the end of the answer is dropped; of the last token nothing is computed.
            last = min(job.request.prompt_tokens + job.request.output_tokens, self._context) - 1
            self._policy.note_known(job.slot, min(job.computed, last))

    def _emit(self, job: Job, outputs: int, now: float) -> None:
        """Emit output tokens of a job, until it ends; what is drafted behind its end is dropped."""
        for _ in range(outputs):
            full = self._emit_token(job, now)
            # Unlike llama-server, vLLM also counts the token that was only just generated.
            full = full or (job.tokens == self._context and not self._policy.unbounded)
            if job.generated == job.request.output_tokens or full:
                self._finish(job, now)
                return
        if self._drafts is not None:
            job.drafted = self._drafts.propose(job, self._drafts.tokens)

    def _finish(self, job: Job, now: float) -> None:
        """End a request that has all its output, or all that its sequence has room for."""
        self._release(job)
        self._end(job, now)
        self._cache_full = False

    def _leave_rows(self, slots: list[int]) -> None:
        """Take the jobs of some slots out of the rows."""
        self._running.leave_rows(slots)

    def _leave_all_rows(self) -> None:
        self._running.leave_all_rows()
        self.rule = None

    def _preempt(self, job: Job) -> None:
        """Take the job's cells, and let it wait until there is room again."""
        job.exported = self._policy.export(job.slot) if self._swaps and job.computed else None
        if job.exported is None:
            self._policy.will_return(job.slot)
        self._running.remove(job)
        job.drafted = 0
        self._padded.discard(job)
        self._policy.note_preemption()
        self._put_off(job)
        self._requeue(job)
        self._note_waiting(job)

    def _release(self, job: Job) -> None:
        """A job has ended: see to it that its slot and its cells are taken back."""
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """Take back the slot and the cells of a job that has ended."""
        self._running.remove(job)

    def _count_step(self, progressed: bool, now: float) -> None:
        """Raise ``Livelock`` if no request will ever get further; ``progressed``: whether one has in this step."""
        if self._progress.is_stuck(progressed, self.running, self.waiting):
            raise self._livelock(now)

    def _livelock(self, now: float, reason: str = "") -> Livelock:
        self._leave_all_rows()
        return no_progress(now, [*self.running, *self.waiting], self._policy, reason)


def _progress(job: Job) -> tuple[int, int, int]:
    """Sort key: the larger, the fewer output tokens, then the longer the prompt, then the later it started.

    SGLang's order of retraction (``ScheduleBatch.retract_decode``).
    """
    return -job.generated, job.request.prompt_tokens, job.admission


def _urgency_and_progress(job: Job) -> tuple[int, int, int, int]:
    """Sort key: the larger, the less urgent, and among equals as ``_progress``."""
    return (job.request.priority, *_progress(job))
