"""Running requests that all get one token in every step: how far each has come follows from one count of steps."""

from __future__ import annotations

import heapq
from typing import Any

from kvsim.simulation.job import Job
from policies import Chunk
from policies.fast_forward.lockstep import LockstepBatch


class Lockstep:
    """Jobs by their slot. While one is in it, its ``computed`` and ``generated`` lack the steps taken since."""

    def __init__(self, lockstep_batch: LockstepBatch[Any] | None = None):
        """``lockstep batch``: the policy's, where it has one; its members are the same."""
        self.lockstep_batch = lockstep_batch
        self.steps = 0
        self.newest = 0
        """The latest turn of any that joined."""
        self._jobs: dict[int, Job] = {}
        self._ends: list[tuple[int, int, int]] = []
        """A heap of, for each job at least: the step after which it ends, its turn, and its slot."""

    def __len__(self) -> int:
        return len(self._jobs)

    def join(self, job: Job, lasts: int) -> bool:
        """A job that generates, and will do so for ``lasts`` steps without ending; False where it cannot."""
        if self.lockstep_batch is not None and not self.lockstep_batch.join(job.slot):
            return False
        job.computed -= self.steps
        job.generated -= self.steps
        self._jobs[job.slot] = job
        self.newest = max(self.newest, job.admission)
        heapq.heappush(self._ends, (self.steps + lasts + 1, job.admission, job.slot))
        return True

    def leave(self, slot: int) -> Job:
        """All is told of the job again."""
        job = self._jobs.pop(slot)
        if self.lockstep_batch is not None:
            self.lockstep_batch.leave(slot)
        job.computed += self.steps
        job.generated += self.steps
        job.furthest = job.computed
        return job

    def leave_all(self) -> None:
        """Nobody is in it."""
        for slot in list(self._jobs):
            self.leave(slot)
        self._ends.clear()
        self.newest = 0

    def chunks(self) -> list[Chunk]:
        """The next step's, one by one."""
        steps = self.steps
        return [Chunk(slot, job.computed + steps, 1) for slot, job in self._jobs.items()]

    @property
    def lasts(self) -> int:
        """Steps up to the first after which somebody ends, that one included."""
        return self._ends[0][0] - self.steps

    def went(self, steps: int) -> list[Job]:
        """So many steps have been taken; who must end now, in order, and is in it no longer."""
        self.steps += steps
        found = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, admission, slot = heapq.heappop(self._ends)
            job = self._jobs.get(slot)
            if job is not None and job.admission == admission:
                found.append(self.leave(slot))
        return found
