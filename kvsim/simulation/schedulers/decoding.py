"""The jobs that only decode: each has a row of the policy's placement rule, which counts its tokens."""

from __future__ import annotations

from operator import attrgetter

from kvsim.simulation.job import Job
from policies.placement.rule import PlacementRule

_by_admission = attrgetter("admission")


class DecodingJobs:
    """Jobs by slot. While a job is in here, ``computed`` and ``generated`` lack the tokens given since it joined."""

    def __init__(self, rule: PlacementRule):
        self.rule = rule
        """Has the same sequences as rows."""
        self.newest = 0
        """Latest admission index of any job that joined."""
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.slot) is job

    def jobs(self) -> list[Job]:
        """The jobs, in the order in which they joined."""
        return list(self._jobs.values())

    def join(self, job: Job, steps_left: int, place: int = 0) -> bool:
        """Add a decoding job that will not end for ``steps_left`` steps; return False if its sequence cannot join.

        ``place``: as in ``PlacementRule.join``.
        """
        if not self.rule.join(job.slot, steps_left + 1, place):
            return False
        self._jobs[job.slot] = job
        if job.admission > self.newest:
            self.newest = job.admission
        return True

    def leave(self, slot: int) -> Job:
        """Remove the job of a slot, and bring its counts up to date."""
        job, row = self._jobs.pop(slot), self.rule.leave(slot)
        given = row.given - row.left
        job.computed += given
        job.generated += given
        job.furthest = job.computed
        return job

    def leave_all(self) -> None:
        """Remove all jobs."""
        for slot in list(self._jobs):
            self.leave(slot)
        self.newest = 0

    def leave_ended(self) -> list[Job]:
        """Remove the jobs that had their last token in the step taken last, and return them in order of admission."""
        if not self.rule.ended:
            return []
        found = [self.leave(row.seq) for row in self.rule.ended_rows()]
        if len(found) > 1:
            found.sort(key=_by_admission)
        return found
