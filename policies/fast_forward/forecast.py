"""Several decode steps at once: what a policy will read and take while it has nothing to decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from policies.vocabulary import IntArray, Usage

MAX_STEPS = 1024
"""Steps that are planned at a time: arrivals mostly come earlier."""

STEP_NUMBERS: IntArray = np.arange(1, MAX_STEPS + 1)
"""The numbers of the steps, from 1; shape (MAX_STEPS,)."""


@dataclass(frozen=True, slots=True)
class Usages:
    """How full and how broken up the cache is after each of several steps.

    The fields are those of ``Usage``, each an array of shape (steps,), int64.
    """

    stored: IntArray
    allocated: IntArray
    placeable: IntArray
    free_extents: IntArray
    largest_free_extent: IntArray
    span: IntArray
    cached: IntArray

    @staticmethod
    def repeated(usage: Usage, steps: int, **changed: IntArray) -> Usages:
        """One usage repeated for every step, with some fields replaced."""
        names = [field.name for field in fields(Usages)]
        return Usages(
            **{name: np.full(steps, getattr(usage, name)) for name in names if name not in changed}, **changed
        )


class StepReads(NamedTuple):
    """What attention reads in one cache group in each of several steps, all tokens of a pass together.

    Arrays of shape (steps,), int64.
    """

    scanned: IntArray
    """Scores computed."""
    useful: IntArray
    """Scores against a cell that the token's sequence can see."""
    runs: IntArray
    """Contiguous pieces (blocks, for a block table) that the scanned cells lie in."""
    span: IntArray
    """Cells that the kernel reads at least once."""
    max_scanned_per_token: IntArray
    """The most cells that one token is scored against."""

    def first_steps(self, n: int) -> StepReads:
        """The first ``n`` steps."""
        return StepReads(
            self.scanned[:n], self.useful[:n], self.runs[:n], self.span[:n], self.max_scanned_per_token[:n]
        )


class DecodePass(NamedTuple):
    """A forward pass that each of several decode steps makes."""

    tokens: int
    """Tokens in each step: one for each of its sequences."""
    groups: tuple[StepReads, ...]
    """What each cache group reads."""

    def first_steps(self, n: int) -> DecodePass:
        """The pass in the first ``n`` steps."""
        return DecodePass(self.tokens, tuple(sums.first_steps(n) for sums in self.groups))


class FastForward(NamedTuple):
    """Decode steps in a row, each with a token for every one of the same sequences; none of them is taken yet."""

    passes: tuple[DecodePass, ...]
    """The passes of a step, in order; nearly always one."""
    take_steps: Callable[[int, bool], Usages | None]
    """Take the first ``k`` steps; the second argument says whether to return how full the cache is after each.

    To be called once, before anything else is asked of the policy.
    """

    @property
    def steps(self) -> int:
        """Steps that can be placed before the policy must decide something."""
        return len(self.passes[0].groups[0].span)

    def first_steps(self, n: int) -> FastForward:
        """The first ``n`` steps."""
        return FastForward(tuple(each.first_steps(n) for each in self.passes), self.take_steps)


def lengths_after(starts: Sequence[int], steps: int, most: int | None = None) -> IntArray:
    """Tokens that each sequence holds after each step, ``starts`` now and at most ``most``; shape (steps, n)."""
    held = np.array(starts, dtype=np.int64)[None, :] + np.arange(1, steps + 1)[:, None]
    return held if most is None else np.minimum(held, most)
