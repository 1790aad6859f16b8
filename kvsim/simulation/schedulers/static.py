"""Static batching: a batch is filled once, and the next one waits until all of its requests have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.base import DecodingJobs, SchedulerBase, no_progress
from policies import Chunk, OutOfCells, Policy
from policies.compiled import mypyc_attr
from policies.placement.rule import PlacementRule

_slot = attrgetter("slot")


@mypyc_attr(allow_interpreted_subclasses=True)
class Static(SchedulerBase):
    """What engines did before continuous batching (Yu et al., Orca, OSDI 2022): ``slots`` requests at a time.

    A request that has ended keeps its cells until the last of the batch has. When a step finds no room, the last
    request of the batch goes back to wait, and starts anew in the next batch.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self.batch: list[Job] = []
        """In order of their slots; requests that have ended stay in it."""
        self.waiting: deque[Job] = deque()
        self._n_batch = scenario.n_batch
        self._decoding: DecodingJobs | None = None
        """Requests that only decode, where the policy has a rule for them."""

    def use_rule(self, rule: PlacementRule | None) -> None:
        """Let all that only decode be rows, if a step has room for all."""
        if rule is not None and self._scenario.server.slots < self._n_batch:
            rule.places_whole_steps = True
            self._decoding = DecodingJobs(rule)

    def submit(self, job: Job, now: float) -> None:
        """Fail what could never be served; queue all other requests."""
        if not self._refuses(job, now):
            self.waiting.append(job)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose a token for each decoding request, then prompts, up to ``n_batch`` tokens."""
        if not any(job.status == "running" for job in self.batch):
            for job in self.batch:
                self._policy.free(job.slot)
            self.batch = []
            self._fill(now)
        decoding, self.rule = self._decoding, None
        if decoding is not None and self._join(decoding):
            prompts = self._chunks([job for job in self.batch if job not in decoding], self._n_batch - len(decoding))
            if decoding.rule.reserve_with(prompts):
                self.rule = decoding.rule
                return prompts
            decoding.leave_all()
        step = self._chunks(self.batch, self._n_batch)
        if not step and self.waiting:
            raise no_progress(now, list(self.waiting), self._policy)
        return step

    def _join(self, decoding: DecodingJobs) -> bool:
        """Let all that decode be rows, in the order of slots, or none; whether any is."""
        if len(decoding):
            for slot in decoding.rule.blocked():
                decoding.leave(slot)
        for job in self.batch:
            if job.status != "running" or job in decoding or job.computed < job.tokens - 1:
                continue
            # A prompt's last token comes in the order of slots among those of all that decode.
            if not job.prefilled or not decoding.join(job, self._steps_left(job, self._context), job.slot):
                decoding.leave_all()
                return False
        return len(decoding) > 0

    def _chunks(self, jobs: Sequence[Job], room: int) -> list[Chunk]:
        """A token for each of these requests that decodes, then prompts, up to ``room`` tokens."""
        live = [job for job in jobs if job.status == "running"]
        step = [Chunk(job.slot, job.computed, 1) for job in live if job.computed == job.tokens - 1][:room]
        room -= len(step)
        for job in live:
            if job.computed < job.tokens - 1 and room > 0:
                step.append(Chunk(job.slot, job.computed, min(job.tokens - job.computed, room)))
                room -= step[-1].n
        return step

    def _complete(self, step: Sequence[Chunk], now: float) -> None:
        """Count the tokens; emit one for each request that has computed all it had, and end those that are done."""
        done: list[Job] = []
        if self._decoding is not None and self.rule is not None:
            done = self._decoding.leave_ended()
        for chunk in step:
            job = self.batch[chunk.seq]
            job.computed += chunk.n
            job.furthest = max(job.furthest, job.computed)
            if job.computed == job.tokens:
                full = self._emit_token(job, now)
                if job.generated == job.request.output_tokens or full:
                    done.append(job)
        for job in sorted(done, key=_slot):
            self._end(job, now)

    def on_out_of_cells(self, reason: OutOfCells, now: float) -> None:
        """Put the last request that still runs back to wait; if it is alone, it can never be served."""
        self._recorder.out_of_cells()
        if self._decoding is not None:
            self._decoding.leave_all()
            self.rule = None
        if reason.done:
            self._complete([chunk for batch in reason.done for chunk in batch.chunks], now)
        if len(self.batch) < 2:
            raise no_progress(now, [*self.batch, *self.waiting], self._policy, str(reason))
        job = self.batch.pop()
        self._policy.will_return(job.slot)
        self._policy.free(job.slot)
        if job.status == "running":
            self._put_off(job)
            self.waiting.appendleft(job)

    def _fill(self, now: float) -> None:
        """Admit waiting requests, in order, as long as the policy admits them."""
        while self.waiting and len(self.batch) < self._scenario.server.slots:
            if not self._admit(len(self.batch), self.waiting[0], now):
                return
            self.batch.append(self.waiting.popleft())
