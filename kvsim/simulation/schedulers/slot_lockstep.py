"""Slots of llama-server that only generate: one count of steps tells how far each has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.lockstep import LockstepJobs
from kvsim.simulation.schedulers.slots import Slot, Slots
from policies import Chunk
from policies.fast_forward.lockstep import LockstepBatch


class SlotLockstep:
    """The slots that get a token in every step, in the order of their numbers, as long as nothing is to be decided."""

    def __init__(self, slots: Slots, batch: LockstepBatch[Any] | None, steps_left: Callable[[Job], int]):
        """``batch``: the policy's, where it has one. ``steps_left``: steps that a job goes on for without ending."""
        self._slots = slots
        self._jobs = LockstepJobs(batch)
        self._steps_left = steps_left
        self.batch = batch
        if batch is not None:
            batch.places_whole_steps = True
        self._most = len(slots) if batch is None else batch.max_pass_tokens - 1
        """How many can go in lockstep, so that the first pass has room for a token of each and of one more."""
        self.in_batch = False
        """Whether the batch that is being run has a token for each of these slots."""

    def __len__(self) -> int:
        return len(self._jobs)

    def join_ready(self, beside: Sequence[Slot]) -> None:
        """Let slots join that now only generate, and those leave whose next token needs a decision.

        ``beside``: the busy slots that are not in lockstep, by number. Where all take from one pool, they must take in
        the order of slots: then either all go in lockstep, or none.
        """
        batch, jobs, slots = self.batch, self._jobs, self._slots
        self.in_batch = batch is not None
        if self._most < len(slots):
            generating = sum([slot.job is not None and slot.job.generated > 0 for slot in beside])
            if len(jobs) + generating > self._most:
                self.end()
                return
        blocked: list[int] = batch.blocked() if batch is not None and len(jobs) else []
        for slot in beside:
            job = slot.job
            if job is None or job.generated == 0:
                continue
            left = self._steps_left(job)
            if left >= 0 and jobs.join(job, left, slot.id):
                slots.join_lockstep(slot)
            elif batch is not None and batch.takes_from_pool:
                self.end()
                return
        for number in blocked:
            jobs.leave(number)
            slots.leave_lockstep(slots[number])
        if len(jobs):
            self.in_batch = True

    def merged(self, pending: Iterable[Chunk]) -> list[Chunk]:
        """All chunks of a batch: one token for each generating slot, in their order, then prompts."""
        singles, prompts = self._jobs.chunks(), list[Chunk]()
        for chunk in pending:
            job = self._slots[chunk.seq].job
            (singles if job is not None and job.generated else prompts).append(chunk)
        return sorted(singles) + prompts

    @property
    def steps_to_next_end(self) -> int:
        """Steps up to the first after which a job ends or its slot is full, that one included."""
        return self._jobs.steps_to_next_end

    def steps_until_room(self) -> int:
        """Steps up to the first after which there may be room for a request that waits for some."""
        ends = self._jobs.steps_to_next_end
        return ends if self.batch is None else min(ends, self.batch.steps_until_release())

    def skip(self, steps: int) -> None:
        """Count steps in which no job ended."""
        self._jobs.steps += steps

    def take_step(self) -> list[Slot]:
        """Count a step; take out the slots whose job ends, or that are full, and return them."""
        self.in_batch = False
        found = [self._slots[job.slot] for job in self._jobs.take_steps(1)]
        for slot in found:
            self._slots.leave_lockstep(slot)
        return found

    def end(self) -> None:
        """Take all slots out."""
        for job in self._jobs.jobs():
            self._slots.leave_lockstep(self._slots[job.slot])
        self._jobs.leave_all()
        self.in_batch = False
