"""vLLM's asynchronous scheduling: the next step is composed while one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.vllm import Vllm
from policies import Chunk, OutOfCells, Policy
from policies.compiled import mypyc_attr

BATCHES = 2
"""Steps in flight at once, the one that is being composed included (``max_concurrent_batches``)."""


class _Part(NamedTuple):
    """A job's part of a step in flight."""

    job: Job
    tokens: int
    outputs: int
    """Output tokens that come out of it: none, or one and the drafts that are accepted."""
    ends: bool
    """Whether that is the job's last one."""
    preemptions: int
    """Times that the job had been preempted when the step was composed."""


@dataclass(slots=True)
class _InFlight:
    """What is in flight of a job."""

    tokens: int = 0
    """Tokens of its chunks."""
    outputs: int = 0
    """Output tokens that come out of them (vLLM's ``num_output_placeholders``)."""
    beyond: int = 0
    """Outputs among them that come after the job's last one, and will be dropped."""
    rejected: int = 0
    """Drafts among the tokens that will be rejected."""


@mypyc_attr(allow_interpreted_subclasses=True)
class AsyncVllm(Vllm):
    """``AsyncScheduler`` of vLLM 0.33.0 under ``EngineCore.step_with_batch_queue``: one step is composed ahead.

    When a step ends, the next one starts at once, and the one after it is composed, with all requests that have arrived
    and all cells that are free by then, but without the tokens of the step that has just started:

    - a request that arrives during a step has its first chunk in the second step after it;
    - what an ended request held is given out in the second step after its last one. Until then it holds its slot, and
      may be the one that is preempted. That it will end, by its number of tokens, is known ahead;
    - a block can be found by others one step later, when it is known what its tokens say;
    - a window moves on one step later, since the step that runs still reads what is behind it;
    - a sequence takes cells as if all drafts that the running step checks were accepted;
    - where nothing could be composed ahead, the next step is composed when the one that runs has ended.

    Here a step is composed when it starts, with what was known one step earlier; all decisions are the same, in the
    same order. ``schedule`` composes a step with what is known, ``collect`` is vLLM's ``update_from_output``.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        policy.compose_ahead(BATCHES)
        self.flights: deque[list[_Part]] = deque()
        """Steps that have been composed and whose outcome the scheduler has not seen, the oldest first."""
        self._in_flight: dict[Job, _InFlight] = {}
        self._stale: dict[Job, int] = {}
        """Number of parts in flight, by job, that were composed before its last preemption."""
        self._last_tokens = {}
        self._ending: dict[Job, None] = {}
        """Jobs that have ended in a step that is in flight."""
        self._arrived: list[Job] = []
        """Jobs that have arrived since the last step was composed."""
        self._unseen: list[Job] = []
        """Jobs that had not arrived when the present step was composed, ahead."""

    def submit(self, job: Job, now: float) -> None:
        """Fail what could never be served; queue all other requests, to be seen a step later."""
        if not self._refuses(job, now):
            self._arrived.append(job)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone."""
        for unseen in (self._arrived, self._unseen):
            if job in unseen:
                unseen.remove(job)
                self._fail(job, now, FailureKind.CANCELLED, "cancelled")
                return
        self._leave_all_rows()
        self._in_flight.pop(job, None)
        self._stale.pop(job, None)
        if job in self._ending:
            del self._ending[job]
            self._let_go(job)
        else:
            super().cancel(job, now)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the step as it would have been composed a step earlier, or with all that is known if that is none."""
        self._catch_up(BATCHES - 1)
        step = self.schedule(now)
        if step or self.rule is not None or not self._behind:
            return step
        self._catch_up(0)
        return self.schedule(now)

    def collect(self) -> None:
        """See the outcome of the oldest step in flight: let ended requests go, and let new blocks be found."""
        in_flight, decoding = self._in_flight, self._running.decoding
        for job, tokens, outputs, ends, preemptions in self.flights.popleft():
            if preemptions != job.preemptions:
                self._land_stale(job, ends)
                continue
            flown = in_flight.get(job)
            if flown is None:  # The request has gone.
                continue
            flown.tokens -= tokens
            flown.outputs -= outputs
            if not flown.tokens:
                del in_flight[job]
            if outputs and (decoding is None or job not in decoding):
                self._policy.note_known(job.slot, self._known(job, flown) - 1)
            if ends:
                in_flight.pop(job, None)
                del self._ending[job]
                self._let_go(job)

    def steps_to_next_end(self) -> int:
        """By the output tokens that requests lack, those included that have just arrived."""
        unseen = [self._steps_left(job, self._context - 1) + 1 for job in (*self._arrived, *self._unseen)]
        return min([super().steps_to_next_end(), *unseen])

    def decode_only_steps(self) -> int:
        """One while there is something that the next step will see."""
        steps = super().decode_only_steps()
        return 1 if self._behind else steps

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """Wait for what ended requests hold; else preempt."""
        if self._ending and not reason.done:
            self._recorder.out_of_cells()
            self._leave_all_rows()
            self._catch_up(0)
        else:
            super().on_out_of_cells(reason, now)

    @property
    def _behind(self) -> bool:
        """Whether there is something that the present step does not see."""
        return bool(self._unseen or self._ending)

    def _catch_up(self, in_flight: int) -> None:
        """See what has happened up to one step later; afterwards, so many steps are in flight."""
        while len(self.flights) > in_flight:
            self.collect()
        for job in self._unseen:
            self.waiting.add(job)
            self._note_waiting(job)
        self._unseen, self._arrived = self._arrived, []

    def _land_stale(self, job: Job, ends: bool) -> None:
        """See the outcome of a step for a job that has been preempted since; its last token may be among it."""
        if job not in self._stale:  # The request has gone.
            return
        self._stale[job] -= 1
        if not self._stale[job]:
            del self._stale[job]
        if ends:
            self._stale.pop(job, None)
            del self._ending[job]
            self._let_go(job)

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        """Compose with all that is known. Raises ``Livelock`` if that is no more."""
        return () if self._behind else super()._nothing_composed(now)

    def _outstanding(self, job: Job) -> int:
        """Tokens still to be composed, as if each output in flight were there; none if it ends with the next output.

        With three steps in flight that is one too many: of two outputs in flight, the first may be the last.
        """
        flown = self._in_flight.get(job)
        if flown is None:
            return super()._outstanding(job)
        known, request = self._known(job, flown), job.request
        if flown.outputs and known + 1 >= request.prompt_tokens + request.output_tokens:
            return 0
        if job.ended and self._drafts is not None:  # Which is not known yet: with drafts, it may go on.
            return 1 + job.drafted
        return known + flown.outputs - job.computed + job.drafted

    def _known(self, job: Job, flown: _InFlight) -> int:
        """Tokens of a job of which it is known what they say."""
        return job.tokens + flown.beyond - flown.outputs

    def _tokens_known(self, job: Job) -> int:
        flown = self._in_flight.get(job)
        return job.tokens if flown is None else self._known(job, flown)

    def _note_checked(self, job: Job) -> None:
        """Leave it to ``collect``, since the outcome is known a step later."""

    def _reserve(self, job: Job, chunk: Chunk) -> bool:
        flown = self._in_flight.get(job)
        if flown is None:
            return super()._reserve(job, chunk)
        known = self._known(job, flown)
        if self._drafts is None:
            return self._policy.reserve(chunk, in_flight=flown.tokens, known=known)
        in_flight, lookahead = flown.tokens - flown.rejected, self._lookahead + flown.rejected
        return self._policy.reserve_with_drafts(chunk, lookahead, in_flight=in_flight, known=known)

    def _room(self, job: Job) -> int:
        flown = self._in_flight.get(job)
        return super()._room(job) - (0 if flown is None else flown.rejected)

    def _next_waiting(self) -> Job | None:
        """The first waiting request of which nothing is in flight any more."""
        if not self._stale:
            return super()._next_waiting()
        return next((job for job in self.waiting if job not in self._stale), None)

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens and emit output tokens, as is known of this step when it has ended."""
        parts = []
        for chunk in step:
            job = self._running.by_slot[chunk.seq]
            samples = job.computed + chunk.n >= job.tokens
            parts.append((job, chunk.n, samples, job.ended, job.generated, job.computed + chunk.n))
        self._last_tokens = {part[0]: part[1] for part in parts}
        ended_before = len(self._ending)
        super()._complete(step, now)
        ended, flight = list(self._ending)[ended_before:], list[_Part]()
        for job, n, samples, beyond, generated, reached in parts:
            outputs = 1 if samples and beyond else job.generated - generated
            self._launch(job, n, outputs, beyond)
            self._in_flight[job].rejected = reached - job.computed
            flight.append(_Part(job, n, outputs, job in ended and not beyond, job.preemptions))
        own = {part.job for part in flight}
        from_rows = [job for job in ended if job not in own]
        for job in from_rows:
            self._launch(job, 1, 1, False)
        self.flights.append([_Part(job, 1, 1, True, job.preemptions) for job in from_rows] + flight)

    def _launch(self, job: Job, tokens: int, outputs: int, beyond: bool) -> None:
        """Count a job's part of a step that is in flight from now on."""
        flown = self._in_flight.setdefault(job, _InFlight())
        flown.tokens += tokens
        flown.outputs += outputs
        flown.beyond += beyond

    def _note_steps(self) -> None:
        """See what was in flight before the last of several steps."""
        while self.flights:
            self.collect()

    def _leave_rows(self, slots: list[int]) -> None:
        """Take jobs out of the rows, each of which has a token in flight."""
        super()._leave_rows(slots)
        self._launch_last_tokens([self._running.by_slot[slot] for slot in slots])

    def _leave_all_rows(self) -> None:
        """Take all jobs out of the rows, each of which has a token in flight."""
        decoding = self._running.decoding
        rows = [] if decoding is None else decoding.jobs()
        super()._leave_all_rows()
        self._launch_last_tokens(rows)

    def _launch_last_tokens(self, jobs: list[Job]) -> None:
        """Count the tokens in flight that jobs had as rows in the last step, where there are any."""
        if not jobs or not self.flights:
            return
        flight = self.flights[-1]
        listed = {part.job for part in flight}
        for job in jobs:
            if job not in listed:
                self._launch(job, 1, 1, False)
                flight.append(_Part(job, 1, 1, False, job.preemptions))
        flight.sort(key=lambda part: part.job.admission)

    def _preempt(self, job: Job) -> None:
        """Take the job's cells; what is in flight of it is stale. It may even have ended by then."""
        if self._in_flight.pop(job, None) is not None:
            self._stale[job] = sum(part.job is job for flight in self.flights for part in flight)
        if not job.ended:
            super()._preempt(job)
            return
        self._running.remove(job)
        self._policy.note_preemption()
        self._recorder.counts.preemptions += 1
        job.preemptions += 1
        self._requeue(job)

    def _release(self, job: Job) -> None:
        """Let the job go on holding its slot and its cells until the step's outcome is seen."""
        self._running.stop(job)
        self._ending[job] = None

    def _let_go(self, job: Job) -> None:
        """Take back what the job holds, or take it out of the queue that it was put back into."""
        if self._running.by_slot.get(job.slot) is job:
            super()._let_go(job)
        else:
            self.waiting.remove(job)
        self._cache_full = False
