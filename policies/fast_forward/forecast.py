"""Several decode steps at once: what a policy foresees while nothing is decided anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from policies.vocabulary import IntArray, Usage

MAX_STEPS = 1024
"""Steps that are foreseen at a time: arrivals mostly come earlier."""

STEP_NUMBERS: IntArray = np.arange(1, MAX_STEPS + 1)
"""The steps, counted from the first."""


@dataclass(frozen=True, slots=True)
class Usages:
    """How full and how broken up the cache is after each of some steps: ``Usage``, each field an array of shape
    (steps,), int64."""

    stored: IntArray
    allocated: IntArray
    placeable: IntArray
    free_extents: IntArray
    largest_free_extent: IntArray
    span: IntArray
    cached: IntArray

    @staticmethod
    def repeated(usage: Usage, steps: int, **changed: IntArray) -> Usages:
        """The same after all steps, but for some fields."""
        names = [field.name for field in fields(Usages)]
        return Usages(
            **{name: np.full(steps, getattr(usage, name)) for name in names if name not in changed}, **changed
        )


class StepReads(NamedTuple):
    """What attention reads in one cache group in each of some steps, all tokens of a pass together; arrays of shape
    (steps,), int64."""

    scanned: IntArray
    """Scores computed."""
    useful: IntArray
    """Those against a cell that the token's sequence can see."""
    runs: IntArray
    """Contiguous pieces (blocks, for a block table) that the scanned cells lie in."""
    span: IntArray
    """Cells that the kernel reads at least once."""
    max_scanned_per_token: IntArray
    """Cells that one token is scored against, at most."""

    def first_steps(self, n: int) -> StepReads:
        """The first ``n`` steps."""
        return StepReads(
            self.scanned[:n], self.useful[:n], self.runs[:n], self.span[:n], self.max_scanned_per_token[:n]
        )


class DecodePass(NamedTuple):
    """A forward pass that each of some steps has."""

    tokens: int
    """In each step, one for each of its sequences."""
    groups: tuple[StepReads, ...]
    """One for each cache group."""

    def first_steps(self, n: int) -> DecodePass:
        """In the first ``n`` steps."""
        return DecodePass(self.tokens, tuple(sums.first_steps(n) for sums in self.groups))


class FastForward(NamedTuple):
    """Decode steps in a row of the same sequences, a token for each, none of them taken yet."""

    passes: tuple[DecodePass, ...]
    """Those of a step, in order; nearly always one."""
    take_steps: Callable[[int, bool], Usages | None]
    """Take so many of the steps, and say, where that is asked for, how full the cache is after each. To be called
    once, before anything else."""

    @property
    def steps(self) -> int:
        """How many could be placed before the policy must decide something."""
        return len(self.passes[0].groups[0].span)

    def first_steps(self, n: int) -> FastForward:
        """The first ``n`` steps."""
        return FastForward(tuple(each.first_steps(n) for each in self.passes), self.take_steps)


def lengths_after(starts: Sequence[int], steps: int, most: int | None = None) -> IntArray:
    """What each sequence holds after each step if it holds ``starts`` now, and at most ``most``; shape (steps, n)."""
    held = np.array(starts, dtype=np.int64)[None, :] + np.arange(1, steps + 1)[:, None]
    return held if most is None else np.minimum(held, most)
