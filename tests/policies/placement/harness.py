"""Holds a placement rule against the policy's own ``allocate``: the same steps in two policies made alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from policies import Chunk, OutOfCells, Policy
from policies.placement.rule import PassReads

ENDLESS = 1 << 40


def reads_of(work: PassReads) -> tuple[object, ...]:
    """All that a clock is told of a pass, so that two can be compared."""
    return (
        work.tokens,
        work.chunks,
        [
            (
                *(group.single_scanned, group.single_useful, group.single_most, group.single_most_useful),
                *(group.runs, group.span, sorted(group.longer), group.mapped, tuple(group.transfers), group.prepares),
                *(group.moves.src.tolist(), group.moves.dst.tolist(), group.moves.length.tolist()),
                *(group.shift.cells.tolist(), group.shift.deltas.tolist()),
            )
            for group in work.groups
        ],
    )


def state_of(policy: Policy) -> list[object]:
    """The whole cache, cell by cell."""
    found: list[object] = []
    for group in range(len(policy.groups)):
        cells = policy.occupancy(group)
        found += [cells.position.tolist(), cells.owners]
    return found


def _attempt(place: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], str | None]:
    """What was placed, or nothing and why there was no room."""
    try:
        return place(), None
    except OutOfCells as reason:
        return (), str(reason)


class Twins:
    """A policy whose decoding sequences are rows of its rule, and another that is asked for every step.

    ``make``: makes the policy, twice the same one.
    """

    def __init__(self, make: Callable[[], Policy]):
        self.ruled, self.asked = make(), make()
        rule = self.ruled.placement_rule()
        assert rule is not None, "the policy has a rule"
        self.rule = rule
        self.rule.places_whole_steps = True
        self.lengths: dict[int, int] = {}
        """Tokens of each sequence."""

    def both(self) -> tuple[Policy, Policy]:
        """The two policies."""
        return self.ruled, self.asked

    def join(self, seqs: Sequence[int], left: int = ENDLESS) -> list[int]:
        """Let sequences become rows, in the order of their numbers; those that cannot are left out."""
        return [seq for seq in seqs if seq in self.rule.by_seq or self.rule.join(seq, left, seq)]

    def step(self, beside: Sequence[Chunk] = ()) -> bool:
        """Take one step in both, with chunks beside the rows, and compare all; False where neither has room."""
        rows = self.rule.rows
        chunks = [Chunk(row.seq, int(row.length), int(row.n)) for row in rows] + list(beside)
        if not chunks:
            return True
        batches, refusal = _attempt(lambda: self.asked.allocate(chunks))
        passes, refused = _attempt(lambda: self._take(beside))
        assert refused == refusal
        if refusal is not None:
            return False
        assert [reads_of(work) for work in passes] == [reads_of(PassReads.of(batch)) for batch in batches]
        for chunk in chunks:
            self.lengths[chunk.seq] = chunk.start + chunk.n
        self.compare()
        return True

    def _take(self, beside: Sequence[Chunk]) -> Sequence[PassReads]:
        return self.rule.passes if not beside and self.rule.take_step() else self.rule.place(beside)

    def compare(self) -> None:
        """Both must hold the same, and look the same."""
        assert state_of(self.ruled) == state_of(self.asked)
        asked = self.asked.usage()
        assert self.ruled.usage() == asked
        self.rule.look()
        names = ("stored", "allocated", "placeable", "free_extents", "largest_free_extent", "span")
        assert [getattr(self.rule, name) for name in names] == [getattr(asked, name) for name in names]
        for row in self.rule.rows:
            assert row.length == self.lengths.get(row.seq, row.length)
        assert np.array_equal(self.ruled.first_owners(), self.asked.first_owners())
