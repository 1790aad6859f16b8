"""Slots of llama-server that only generate: each has a row of the policy's placement rule, which counts its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvsim.simulation.job import Job
from kvsim.simulation.schedulers.decoding import DecodingJobs
from kvsim.simulation.schedulers.slots import Slot, Slots
from policies import Chunk
from policies.placement.rule import PlacementRule


class DecodingSlots:
    """The slots that get a token in every step, in the order of their numbers, as long as nothing is to be decided."""

    def __init__(self, slots: Slots, rule: PlacementRule, steps_left: Callable[[Job], int]):
        """``steps_left``: steps that a job goes on for without ending."""
        self._slots = slots
        self._jobs = DecodingJobs(rule)
        self._steps_left = steps_left
        self.rule = rule
        rule.places_whole_steps = True
        self.in_batch = False
        """Whether the batch that is being run has a token for each of these slots."""

    def __len__(self) -> int:
        return len(self._jobs)

    def join_ready(self, beside: Sequence[Slot]) -> None:
        """Let slots join that now only generate, and those leave whose next token needs a decision.

        ``beside``: the busy slots that are no rows, by number. Where all take from one pool, they must take in the
        order of slots: then either all that generate are rows, or none.
        """
        rule, jobs, slots = self.rule, self._jobs, self._slots
        blocked: list[int] = rule.blocked() if len(jobs) else []
        for slot in beside:
            job = slot.job
            if job is None or job.generated == 0:
                continue
            left = self._steps_left(job)
            if left >= 0 and jobs.join(job, left, slot.id):
                slots.become_row(slot)
            elif rule.takes_from_pool:
                self.end()
                return
        for number in blocked:
            jobs.leave(number)
            slots.be_no_row(slots[number])
        self.in_batch = True

    def merged(self, pending: Iterable[Chunk]) -> list[Chunk]:
        """All chunks of a batch: one token for each generating slot, in their order, then prompts."""
        singles, prompts = [Chunk(job.slot, _computed(job, self.rule), 1) for job in self._jobs.jobs()], list[Chunk]()
        for chunk in pending:
            job = self._slots[chunk.seq].job
            (singles if job is not None and job.generated else prompts).append(chunk)
        return sorted(singles) + prompts

    def leave_ended(self) -> list[Slot]:
        """Take out the slots that had their last token, or are full, in the step taken last, and return them."""
        self.in_batch = False
        found = [self._slots[job.slot] for job in self._jobs.leave_ended()]
        for slot in found:
            self._slots.be_no_row(slot)
        return found

    def end(self) -> None:
        """Take all slots out."""
        for job in self._jobs.jobs():
            self._slots.be_no_row(self._slots[job.slot])
        self._jobs.leave_all()
        self.in_batch = False


def _computed(job: Job, rule: PlacementRule) -> int:
    """How many tokens of a job with a row have been computed."""
    row = rule.by_seq[job.slot]
    return job.computed + int(row.given - row.left)
