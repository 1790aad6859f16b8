"""One sequence's block table, and how tables grow over many decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from policies.content import Content
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, StepReads, Usages, lengths_after
from policies.fast_forward.lockstep import LockstepSequence
from policies.paging.block_occupancy import BlockOccupancy
from policies.paging.blocks import BlockPool
from policies.vocabulary import IntArray, Usage


class Paged(LockstepSequence):
    """One sequence: its blocks, and how far they are filled."""

    __slots__ = ("content", "named", "prompt", "reserved", "skipped", "table")

    def __init__(self, content: Content, prompt: int = 0):
        super().__init__()
        self.content = content
        self.prompt = prompt
        """Tokens of its prompt."""
        self.table: list[int] = []
        """A block for every ``block_size`` positions; ``NULL`` where a window has moved on."""
        self.reserved = 0
        """Tokens for which room was set aside by a ``reserve`` whose chunk is still to be placed."""
        self.named = 0
        """Blocks from the first that have been given their key."""
        self.skipped = 0
        """Blocks from the first that are ``NULL``."""

    def cells(self, start: int, stop: int, size: int) -> IntArray:
        """The cells of tokens ``[start, stop)`` in blocks of that size; shape (stop - start,)."""
        if stop - start == 1:
            return np.array([self.table[start // size] * size + start % size], dtype=np.int64)
        positions = np.arange(start, stop)
        first = start // size
        table = np.array(self.table[first : -(-stop // size)], dtype=np.int64)
        return np.asarray(table[positions // size - first] * size + positions % size)


def plan_steps(
    active: Sequence[Paged], n: int, size: int, pool: BlockPool, take: Callable[[int, bool], Usages | None]
) -> FastForward | None:
    """What at most ``n`` decode steps of these sequences read, until the free blocks run out; None where that is not
    worth it, or somebody must first have a block of its own to write into."""
    if any(pool.holders(s.table[s.length // size]) > 1 for s in active if s.length < len(s.table) * size):
        return None
    steps = min(n, MAX_STEPS)
    # The steps for which some sequence needs a block more.
    wanted = sorted(j for s in active for j in range(len(s.table) * size - s.length, steps, size))
    if len(wanted) > len(pool.free):
        steps = wanted[len(pool.free)]
    if steps < 2:
        return None
    lengths = lengths_after([s.length for s in active], steps)
    scanned, runs = lengths.sum(axis=1), (-(-lengths // size)).sum(axis=1)
    return FastForward(
        (DecodePass(len(active), (StepReads(scanned, scanned, runs, scanned, lengths.max(axis=1)),)),), take
    )


def append_steps(
    active: Sequence[Paged],
    size: int,
    pool: BlockPool,
    fill: BlockOccupancy,
    name: Callable[[Paged, int], None],
    usage: Callable[[], Usage],
    k: int,
    look: bool,
) -> Usages | None:
    """``k`` tokens more for each sequence, as if step by step; how full the cache is after each, if that is asked for.

    Blocks of ``size`` are taken from the pool, and named when so many tokens of the sequence are there, in the order in
    which steps come to them. Nobody else may hold the blocks that are written into, and there must be enough free ones.
    """
    starts = [s.length for s in active]
    stored, top = fill.stored + len(active) * np.arange(1, k + 1), fill.top
    # A block is taken when the one before it is full, and named when it is full itself.
    events = sorted(
        (j, i, full)
        for i, s in enumerate(active)
        for full, j in [
            *((False, j) for j in range(len(s.table) * size - s.length, k, size)),
            *((True, j) for j in range(-(s.length + 1) % size, k, size)),
        ]
    )
    changes = [(0, usage())] if look else []
    for j, together in groupby(events, key=itemgetter(0)):
        took = False
        for _, i, full in together:
            if full:
                name(active[i], starts[i] + j + 1)
            else:
                active[i].table += pool.take(1)
                took = True
        if took and look:
            changes.append((j, usage()))
    ends = np.zeros(k, dtype=np.int64)
    for s, start in zip(active, starts, strict=True):
        s.length, s.reserved = start + k, 0
        positions, first = np.arange(start, start + k), start // size
        blocks = np.array(s.table[first:], dtype=np.int64)[positions // size - first]
        np.maximum(ends, blocks * size + positions % size + 1, out=ends)
        for at in range(first, -(-s.length // size)):
            fill.raise_to(s.table[at], min(size, s.length - at * size))
    if not look:
        return None
    lasted = np.diff([j for j, _ in changes], append=k)

    def lockstep_steps(field: str) -> IntArray:
        return np.repeat([getattr(usage, field) for _, usage in changes], lasted)

    return Usages(
        stored=stored,
        allocated=lockstep_steps("allocated"),
        placeable=lockstep_steps("placeable"),
        free_extents=lockstep_steps("free_extents"),
        largest_free_extent=lockstep_steps("largest_free_extent"),
        span=np.maximum(np.maximum.accumulate(ends), top),
        cached=lockstep_steps("cached"),
    )
