"""The requests that hold a slot: in which order they were admitted, and which of them only decode."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.decoding import DecodingJobs
from policies.placement.rule import PlacementRule

_by_admission = attrgetter("admission")


class RunningJobs:
    """Slots and their jobs. Without a placement rule, ``others`` stays empty and ``decoding`` is None."""

    def __init__(self, slots: int):
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
        """Let jobs become rows that only decode, in order of admission, up to the first that cannot.

        ``steps_left``: steps that a job goes on for without ending. ``may_join``: what else decides it.
        """
        decoding, others = self.decoding, self.others
        if decoding is None or not others:
            return
        for at, job in enumerate(others):
            ready = job.generated and job.computed == job.tokens - 1 and job.computed >= job.furthest
            if ready and may_join is not None:
                ready = may_join(job)
            if not ready or not decoding.join(job, steps_left(job)):
                del others[:at]
                return
        others.clear()

    def leave_rows(self, slots: list[int]) -> None:
        """Take the jobs of some slots out of the rows."""
        assert self.decoding is not None
        self.others += map(self.decoding.leave, slots)
        self.others.sort(key=_by_admission)

    def leave_all_rows(self) -> None:
        """Take all jobs out of the rows."""
        if self.decoding is not None and len(self.decoding):
            self.decoding.leave_all()
            self.others = [job for job in self.jobs if not job.ended]
