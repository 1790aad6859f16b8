"""vLLM's asynchronous scheduling: the next step is composed while one runs."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import Backend
from kvsim.simulation.job import FailureKind, Job
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers.vllm import Vllm
from policies import Chunk, NoSlot, Policy


class AsyncVllm(Vllm):
    """``AsyncScheduler`` of vLLM 0.19.0 under ``EngineCore.step_with_batch_queue``: one step is composed ahead.

    When a step ends, the next one starts at once, and the one after it is composed, with all requests that have arrived
    and all cells that are free by then. So a request that arrives during a step has its first chunk in the second step
    after it, and what an ended request held is given out in the second step after its last one. That a request will
    end, by its number of tokens, is known ahead. Where nothing could be composed ahead, the next step is composed when
    the one that runs has ended.

    Here a step is composed when it starts, with what was known one step earlier; that the tokens of the step between
    are not known yet is of no consequence, but for a block that could have been found one step earlier.
    """

    def __init__(self, scenario: Scenario, policy: Policy, backend: Backend, recorder: Recorder):
        super().__init__(scenario, policy, backend, recorder)
        self._arrived: list[Job] = []
        """Jobs that have arrived since the last step was composed."""
        self._unseen: list[Job] = []
        """Jobs that had not arrived when the present step was composed, ahead."""
        self._ended: list[Job] = []
        """Jobs that have ended since the last step was composed."""
        self._unfreed: list[Job] = []
        """Jobs that had not ended when the present step was composed."""

    def submit(self, job: Job, now: float) -> None:
        """Fail what could never be served; queue all other requests, to be seen a step later."""
        refused = self._refusal(job)
        if refused is not None:
            self._fail(job, now, *refused)
        else:
            self._arrived.append(job)

    def cancel(self, job: Job, now: float) -> None:
        """End a request whose client has gone."""
        for unseen in (self._arrived, self._unseen):
            if job in unseen:
                unseen.remove(job)
                self._fail(job, now, FailureKind.CANCELLED, "cancelled")
                return
        super().cancel(job, now)

    def compose(self, now: float) -> Sequence[Chunk]:
        """Compose the step as it would have been composed a step earlier, or with all that is known if that is none."""
        self._catch_up()
        step = super().compose(now)
        if step or self.lockstep_batch is not None or not self._behind:
            return step
        self._catch_up()
        return super().compose(now)

    def decode_only_steps(self, step: Sequence[Chunk]) -> int:
        """At most one while there is something that the next step will see."""
        steps = super().decode_only_steps(step)
        return min(steps, 1) if self._behind else steps

    def no_slot(self, reason: NoSlot, now: float) -> None:
        """Wait for what ended requests hold; else preempt."""
        if self._unfreed and not reason.done:
            self._recorder.failed_allocations += 1
            self._end_lockstep()
            self._catch_up()
        else:
            super().no_slot(reason, now)

    @property
    def _behind(self) -> bool:
        """Whether there is something that the present step does not see."""
        return bool(self._unseen or self._unfreed)

    def _catch_up(self) -> None:
        """See what has happened up to one step later."""
        for job in self._unfreed:
            self._running.take_back(job)
            self._policy.free(job.slot)
        if self._unfreed:
            self._cache_full = False
        for job in self._unseen:
            self.waiting.add(job)
        self._unfreed, self._ended = self._ended, []
        self._unseen, self._arrived = self._arrived, []

    def _nothing_composed(self, now: float) -> Sequence[Chunk]:
        """Compose with all that is known. Raises ``Livelock`` if that is no more."""
        return () if self._behind else super()._nothing_composed(now)

    def _release(self, job: Job) -> None:
        """Let the job go, which holds its slot and its cells for a step longer."""
        self._running.stop(job)
        self._ended.append(job)
