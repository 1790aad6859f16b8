"""Triggers: when to compact. What a trigger is, what it may know, and the simplest ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.cells.arena import Arena
from policies.cells.reads import padded_span
from policies.compaction.compactors import min_cells_to_move
from policies.vocabulary import IntArray, Moves

Count = TypeVar("Count", int, IntArray)


class TriggerInput(NamedTuple):
    """What a trigger decides by: counts of cells and tokens, never a clock."""

    used: int
    """Cells that hold a token."""
    top: int
    """One past the highest used cell."""
    span: int
    """``top`` rounded up to the kernel's padding: what attention over all cells reads."""
    pad: int
    """The kernel's padding."""
    tokens: int
    """Tokens of the step."""
    min_cells_to_move: Callable[[], int]
    """The fewest cells that compaction must move; a function, since it takes time to count them."""

    @staticmethod
    def of(arena: Arena, pad: int, tokens: int) -> TriggerInput:
        """The present state of an arena, and a step of ``tokens`` tokens."""
        span = padded_span(arena.top, pad, arena.size)
        return TriggerInput(arena.used, arena.top, span, pad, tokens, partial(min_cells_to_move, arena))


@dataclass(frozen=True, slots=True)
class TriggerForecast:
    """``TriggerInput`` before the first of some steps and after each of them, if no compaction comes in between.

    Arrays of shape (steps + 1,).
    """

    used: IntArray
    top: IntArray
    span: IntArray
    pad: int
    tokens: int
    min_cells_to_move: Callable[[], IntArray]

    def inputs(self) -> list[TriggerInput]:
        """The forecast as steps + 1 inputs."""
        columns = (self.used, self.top, self.span, self.min_cells_to_move())
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            TriggerInput(used, top, span, self.pad, self.tokens, partial(int, least)) for used, top, span, least in rows
        ]


def cells_saved(used: Count, span: Count, pad: int) -> Count:
    """Cells that attention would no longer read if all used cells were packed; for counts or arrays of them."""
    saved = span - -(-used // pad) * pad
    return saved * (saved > 0)


class _PlanRequested(Exception):
    """The trigger asked for a plan while it was only questioned about the future."""


class Trigger:
    """Never compacts. Other triggers override what they need.

    A trigger that decides by step sets ``checks_steps`` and implements ``due_before_step`` or ``due_after_step``; the
    other methods are then right, but slow where they question it step by step.
    """

    on_failure = False
    """Compact when a step finds no room, and try once more before giving up."""
    when_idle = False
    """Compact while the server has nothing to do, a slice at a time."""
    checks_steps = False
    """Whether it is asked before and after each step."""
    stateful = True
    """Whether an answer may depend on what it was asked before."""

    def due_before_step(self, state: TriggerInput, plan: Callable[[], Moves]) -> bool:
        """Whether to compact before this step. ``plan`` returns the moves that would take."""
        return False

    def due_after_step(self, state: TriggerInput) -> bool:
        """Whether to compact before the next step, asked when a step has been placed."""
        return False

    def rules_out(self, bounds: TriggerInput, saved: int, steps: int) -> bool:
        """Certainty that no compaction will be due in the next ``steps`` steps. Quick; may miss some cases.

        ``bounds`` has the least number of used cells and of cells to move, and the largest top and span, of all the
        steps; ``saved`` is their largest ``cells_saved``. The steps are then taken without ``advance``: ``skip`` is
        told their number alone. Changes nothing.
        """
        return not self.checks_steps

    def skip(self, steps: int) -> None:
        """Note that ``steps`` steps were taken for which ``rules_out`` was True."""

    def steps_until_due(self, forecast: TriggerForecast, steps: int) -> int:
        """How many of the next ``steps`` steps can be taken before compaction is due or a plan is needed to tell.

        Changes nothing.
        """
        return copy.copy(self)._question(forecast, steps) if self.checks_steps else steps

    def advance(self, forecast: TriggerForecast, steps: int) -> None:
        """Note that ``steps`` steps of the forecast were taken, none of them due."""
        if self.checks_steps:
            self._question(forecast, steps)

    def _question(self, forecast: TriggerForecast, steps: int) -> int:
        """Ask before and after each step until compaction is due or a plan is needed; returns the steps before."""

        def plan() -> Moves:
            raise _PlanRequested

        states = forecast.inputs()
        for i in range(steps):
            try:
                if self.due_before_step(states[i], plan) or self.due_after_step(states[i + 1]):
                    return i
            except _PlanRequested:
                return i
        return steps


class OnFailure(Trigger):
    """Compacts only when a step finds no room (llama.cpp b5589 to b6244: ``init_batch`` tries once more)."""

    on_failure = True


class Idle(Trigger):
    """Compacts only while no request waits or runs; an arrival stops it between two slices."""

    when_idle = True


def first_due(due: NDArray[np.bool_]) -> int:
    """Index of the first step that is due; their number, if none is."""
    at = int(due.argmax()) if len(due) else 0
    return at if len(due) and due[at] else len(due)
