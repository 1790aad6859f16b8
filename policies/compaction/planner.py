"""When one arena is compacted, and by which moves: its trigger and its compactor, brought together."""

from __future__ import annotations

from collections.abc import Sequence

from policies.cells.arena import Arena
from policies.compaction.compactors import Compactor
from policies.compaction.triggers import Trigger, TriggerInput
from policies.vocabulary import NO_MOVES, Moves

_IDLE_RUNS = 8
"""Runs moved in one slice of idle compaction."""


class CompactionPlanner:
    """Asks the trigger when compaction is due, and the compactor for the moves. Changes nothing in the arena."""

    def __init__(self, arena: Arena, compactor: Compactor | None, trigger: Trigger, pad: int):
        self._arena = arena
        self._compactor = compactor
        self._trigger = trigger
        self._pad = pad
        self.checks_steps = compactor is not None and trigger.checks_steps
        """Whether ``due_before_step`` and ``due_after_step`` have to be called."""
        self._idle_runs: list[tuple[int, int, int]] = []
        """Rest of the plan for idle compaction; empty when the arena has changed since."""
        self._seen_by_trigger: Moves | None = None
        """The plan that the trigger has just weighed; None when the arena has changed since."""

    def due_before_step(self, tokens: int) -> bool:
        """Whether to compact before a step of ``tokens`` tokens."""
        return self._trigger.due_before_step(TriggerInput.of(self._arena, self._pad, tokens), self._plan_for_trigger)

    def due_after_step(self, tokens: int) -> bool:
        """Whether to compact before the next step, asked when a step of ``tokens`` tokens has been placed."""
        return self._trigger.due_after_step(TriggerInput.of(self._arena, self._pad, tokens))

    def plan(self) -> Moves:
        """Moves that compact the arena as it is."""
        if self._seen_by_trigger is not None:
            return self._seen_by_trigger
        return NO_MOVES if self._compactor is None else self._compactor(self._arena)

    def next_idle_moves(self) -> Moves:
        """The next few runs of a plan, to be carried out at once; no moves where idle time is not used."""
        if self._compactor is None or not self._trigger.when_idle:
            return NO_MOVES
        if not self._idle_runs:
            plan = self._compactor(self._arena)
            self._idle_runs = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True))
        now, self._idle_runs = self._idle_runs[:_IDLE_RUNS], self._idle_runs[_IDLE_RUNS:]
        return Moves.from_runs(now) if now else NO_MOVES

    def forget_plans(self) -> None:
        """Drop the plans made so far; to be called whenever the arena changes other than by them."""
        self._idle_runs = []
        self._seen_by_trigger = None

    def stays_tidy(self, seqs: Sequence[int]) -> bool:
        """Whether compactions would move nothing during decode steps of ``seqs`` at the top of the arena."""
        return self._compactor is None or self._compactor.stays_tidy(self._arena, seqs)

    def _plan_for_trigger(self) -> Moves:
        self._seen_by_trigger = None
        self._seen_by_trigger = self.plan()
        return self._seen_by_trigger
