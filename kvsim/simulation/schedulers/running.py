"""The requests that hold a slot: in which order they were admitted, and which of them decode in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.lockstep import LockstepJobs
from policies.fast_forward.lockstep import LockstepBatch

_by_admission = attrgetter("admission")


class RunningJobs:
    """Slots and their jobs. Without lockstep, ``others`` stays empty and ``lockstep`` is None."""

    def __init__(self, slots: int):
        self.jobs: list[Job] = []
        """All of them, in order of admission."""
        self.by_slot: dict[int, Job] = {}
        self.free_slots = list(range(slots - 1, -1, -1))
        """The next one to be given out is the last."""
        self.lockstep: LockstepJobs | None = None
        self.others: list[Job] = []
        """The jobs that are not in lockstep, where there is lockstep; in order of admission."""
        self._admissions = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def allow_lockstep(self, batch: LockstepBatch[Any] | None) -> None:
        """Let jobs go in lockstep from now on."""
        self.lockstep = LockstepJobs(batch)
        self.others = list(self.jobs)

    def admit(self, job: Job) -> int:
        """Give a job the next free slot, and return its number."""
        self._admissions += 1
        job.admission = self._admissions
        self.jobs.append(job)
        if self.lockstep is not None:
            self.others.append(job)
        slot = self.free_slots.pop()
        self.by_slot[slot] = job
        return slot

    def remove(self, job: Job) -> None:
        """Let a job go, and take its slot back."""
        self.stop(job)
        self.jobs.remove(job)
        del self.by_slot[job.slot]
        self.free_slots.append(job.slot)

    def stop(self, job: Job) -> None:
        """Compose no more chunks of a job, which keeps its slot."""
        if job in self.others:
            self.others.remove(job)

    def join_ready(self, steps_left: Callable[[Job], int], may_join: Callable[[Job], bool] | None = None) -> None:
        """Let jobs join the lockstep that only decode, in order of admission, up to the first that cannot.

        ``steps_left``: steps that a job goes on for without ending. ``may_join``: what else decides it.
        """
        lockstep, others = self.lockstep, self.others
        if lockstep is None or not others:
            return
        for at, job in enumerate(others):
            ready = job.generated and job.computed == job.tokens - 1 and job.computed >= job.furthest
            if ready and may_join is not None:
                ready = may_join(job)
            if not ready or not lockstep.join(job, steps_left(job)):
                del others[:at]
                return
        others.clear()

    def leave_lockstep(self, slots: list[int]) -> None:
        """Take the jobs of some slots out of the lockstep."""
        assert self.lockstep is not None
        self.others += map(self.lockstep.leave, slots)
        self.others.sort(key=_by_admission)

    def end_lockstep(self) -> None:
        """Take all jobs out of the lockstep."""
        if self.lockstep is not None:
            self.lockstep.leave_all()
            self.others = [job for job in self.jobs if not job.ended]
