"""llama-server's slots, and what of a slot's tokens a prompt can use again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsim.simulation.job import Job
from policies import NOTHING, Content


@dataclass(slots=True, eq=False)
class Slot:
    """One of the server's slots; its number is the sequence id."""

    id: int
    job: Job | None = None
    begun: bool = False
    """Whether the server has begun with the job's prompt."""
    prompt: Content = NOTHING
    """The job's prompt, without its answer."""
    held: int = 0
    """Tokens of the prompt that were there when the sequence was opened ahead of its prompt."""
    truncated: bool = False
    """Whether the job's context was shifted, or its slot was full."""
    content: Content = NOTHING
    """What the slot holds: while it is idle, or its job has not begun, what was left there."""
    kept: bool = False
    """Whether it may have cells, which it may without any content."""
    uncomputed: int = 0
    """Tokens at the end of the content that were to be run when their request failed, and have no cells."""
    last_used: int = -1
    """Value of a counter when the slot was last released; -1 before."""

    def take(self, job: Job, prompt: Content) -> None:
        """Hold a job, whose prompt the server has not begun with."""
        self.job, self.prompt, self.begun, self.held = job, prompt, False, 0
        job.slot = self.id

    def vacate(self, turn: int) -> None:
        """Let the job go."""
        self.job, self.begun, self.prompt, self.truncated, self.last_used = None, False, NOTHING, False, turn


class Slots:
    """All slots of a server, by number: idle ones, those that are rows of a placement rule, and the other busy ones."""

    def __init__(self, n: int, *, last_first: bool):
        """``last_first``: of the slots that were never used the last is the one to be used first."""
        self.all = [Slot(number) for number in range(n)]
        order = reversed(self.all) if last_first else self.all
        self._idle: dict[int, Slot] = {slot.id: slot for slot in order}
        self._beside: dict[int, Slot] = {}
        self._turn = 0

    def __getitem__(self, number: int) -> Slot:
        return self.all[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def oldest(self) -> Slot | None:
        """The idle slot that was released longest ago, or was never used; None if all are busy."""
        return next(iter(self._idle.values()), None)

    @property
    def idle(self) -> list[Slot]:
        """The idle slots, by number."""
        return [slot for _, slot in sorted(self._idle.items())]

    @property
    def beside(self) -> list[Slot]:
        """The busy slots that are no rows, by number."""
        beside = self._beside
        return list(beside.values()) if len(beside) < 2 else [slot for _, slot in sorted(beside.items())]

    @property
    def busy(self) -> list[Slot]:
        """The busy slots, by number."""
        return [slot for slot in self.all if slot.job is not None]

    def take(self, slot: Slot, job: Job, prompt: Content) -> None:
        """Give an idle slot to a job, whose prompt the server has not begun with."""
        del self._idle[slot.id]
        self._beside[slot.id] = slot
        slot.take(job, prompt)

    def vacate(self, slot: Slot) -> None:
        """Let a job go from its slot, which is no row."""
        self._turn += 1
        slot.vacate(self._turn)
        del self._beside[slot.id]
        self._idle[slot.id] = slot

    def become_row(self, slot: Slot) -> None:
        """Note that a busy slot is a row of a placement rule from now on."""
        del self._beside[slot.id]

    def be_no_row(self, slot: Slot) -> None:
        """Note that a slot is no row any more."""
        self._beside[slot.id] = slot


def reused_runs(held: Content, prompt: Content, prefix: int, shortest: int) -> Iterator[tuple[int, int]]:
    """Runs of at least ``shortest`` tokens that a prompt has behind the first ``prefix``, which are held elsewhere.

    Each is (its first token's index in ``held``, its tokens); its place in the prompt is behind all before it
    (llama.cpp's ``--cache-reuse``). What is held is gone through once, and so is the prompt, which goes on only behind
    a run that was found.
    """
    ours, theirs = held.tokens(), prompt.tokens()
    at, place = prefix, prefix
    while at < len(ours) and len(theirs) - place >= shortest:
        starts = at + np.flatnonzero((ours[at : len(ours) - shortest + 1] == theirs[place]).all(axis=1))
        for start in starts.tolist():
            n = min(len(ours) - start, len(theirs) - place)
            same = (ours[start : start + n] == theirs[place : place + n]).all(axis=1)
            n = n if same.all() else int(same.argmin())
            if n >= shortest:
                yield start, n
                at, place = start + n, place + n
                break
        else:
            return
