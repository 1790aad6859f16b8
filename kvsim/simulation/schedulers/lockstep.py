"""Running jobs that all get one token in every step: one count of steps tells how far each has come."""

from __future__ import annotations

import heapq
from typing import Any

from kvsim.simulation.job import Job
from policies import Chunk
from policies.fast_forward.lockstep import LockstepBatch


class LockstepJobs:
    """Jobs by slot. While a job is in here, its ``computed`` and ``generated`` lack the steps taken since it joined."""

    def __init__(self, batch: LockstepBatch[Any] | None = None):
        """``batch``: the policy's, where it has one; it has the same sequences."""
        self.batch = batch
        self.steps = 0
        """Steps taken so far."""
        self.newest = 0
        """Latest admission index of any job that joined."""
        self._jobs: dict[int, Job] = {}
        self._joins = 0
        self._joined: dict[int, int] = {}
        """By slot, how many jobs had joined when its job did."""
        self._ends: list[tuple[int, int, int, int]] = []
        """A heap with, for each job at least: the step after which it ends, its admission index, how many had joined
        when it did, its slot."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.slot) is job

    def jobs(self) -> list[Job]:
        """The jobs, in the order in which they joined."""
        return list(self._jobs.values())

    def join(self, job: Job, steps_left: int, place: int = 0) -> bool:
        """Add a decoding job that will not end for ``steps_left`` steps; return False if its sequence cannot join.

        ``place``: as in ``LockstepBatch.join``.
        """
        if self.batch is not None and not self.batch.join(job.slot, place):
            return False
        job.computed -= self.steps
        job.generated -= self.steps
        self._joins += 1
        self._jobs[job.slot], self._joined[job.slot] = job, self._joins
        if job.admission > self.newest:
            self.newest = job.admission
        heapq.heappush(self._ends, (self.steps + steps_left + 1, job.admission, self._joins, job.slot))
        return True

    def leave(self, slot: int) -> Job:
        """Remove the job of a slot, and bring its counts up to date."""
        job = self._jobs.pop(slot)
        del self._joined[slot]
        if self.batch is not None:
            self.batch.leave(slot)
        job.computed += self.steps
        job.generated += self.steps
        job.furthest = job.computed
        return job

    def leave_all(self) -> None:
        """Remove all jobs."""
        for slot in list(self._jobs):
            self.leave(slot)
        self._ends.clear()
        self.newest = 0

    def chunks(self) -> list[Chunk]:
        """The next step, one chunk for each job."""
        steps = self.steps
        return [Chunk(slot, job.computed + steps, 1) for slot, job in self._jobs.items()]

    @property
    def steps_to_next_end(self) -> int:
        """Steps up to the first after which a job ends, that one included."""
        return self._ends[0][0] - self.steps

    def take_steps(self, steps: int) -> list[Job]:
        """Count steps that have been run; remove the jobs that end now, and return them in order of admission."""
        self.steps += steps
        found = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, joined, slot = heapq.heappop(self._ends)
            if self._joined.get(slot) == joined:
                found.append(self.leave(slot))
        return found
