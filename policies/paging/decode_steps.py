"""Many decode steps of block tables at once: what they read, and the blocks that they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, StepReads, Usages, lengths_after
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable
from policies.paging.growth import blocks_for_each, next_block_step, steps_covered
from policies.vocabulary import IntArray


def plan_decode_steps(
    blocks: BlockManager, tables: Sequence[BlockTable], n: int, *, one_run: bool = False
) -> FastForward | None:
    """Plan at most ``n`` decode steps of these sequences, until the free blocks run out.

    ``one_run``: each sequence is read as one run, not block by block.

    None where fewer than two steps can be taken, where a sequence must first copy a shared block, and where some have
    spare blocks and others have none.
    """
    size, pool = blocks.block_size, blocks.pool
    if any(pool.holders(s.blocks[s.length // size]) > 1 for s in tables if s.length < len(s.blocks) * size):
        return None
    firsts = sorted(next_block_step(s.length, len(s.blocks), size) for s in tables)
    if firsts[-1] - firsts[0] >= size:
        return None
    steps = min(n, MAX_STEPS, steps_covered([(first, 1) for first in firsts], len(pool.free), size))
    if steps < 2:
        return None
    lengths = lengths_after([s.length for s in tables], steps)
    scanned = lengths.sum(axis=1)
    runs = np.full(steps, len(tables)) if one_run else blocks_for_each(lengths, size).sum(axis=1)
    sums = StepReads(scanned, scanned, runs, scanned, lengths.max(axis=1))
    return FastForward((DecodePass(len(tables), (sums,)),), partial(_take_decode_steps, blocks, tables))


def _take_decode_steps(blocks: BlockManager, tables: Sequence[BlockTable], k: int, look: bool) -> Usages | None:
    """Give each sequence ``k`` tokens more, as if step by step; ``look``: report how full the cache is after each.

    Blocks are taken and cached in the order in which single steps would do it. Blocks that are written to must not be
    shared, and enough must be free.
    """
    size, lag, occupancy = blocks.block_size, blocks.lag, blocks.counted_occupancy() if look else blocks.occupancy
    starts = [s.length for s in tables]
    stored, top = occupancy.stored + len(tables) * np.arange(1, k + 1), occupancy.top if look else 0
    events = []
    for i, s in enumerate(tables):
        first = next_block_step(s.length, len(s.blocks), size)
        events += [(step, i, False) for step in range(first, k, size)]
        events += [(step, i, True) for step in range((first - 1 + lag) % size, k, size)]
    events.sort()
    changes = [(0, blocks.usage())] if look else []
    for step, together in groupby(events, key=itemgetter(0)):
        took = False
        for _, i, full in together:
            if full:
                blocks.cache_full_blocks(tables[i], starts[i] + step + 1 - lag)
            else:
                blocks.extend(tables[i], 1, ahead=True)
                took = True
        if took and look:
            changes.append((step, blocks.usage()))
    ends = np.zeros(k, dtype=np.int64)
    for s, start in zip(tables, starts, strict=True):
        blocks.write(s, start, start + k)
        np.maximum(ends, s.cells(start, start + k, size) + 1, out=ends)
    if not look:
        return None
    lasted = np.diff([step for step, _ in changes], append=k)

    def in_each_step(field: str) -> IntArray:
        return np.repeat([getattr(usage, field) for _, usage in changes], lasted)

    return Usages(
        stored=stored,
        allocated=in_each_step("allocated"),
        placeable=in_each_step("placeable"),
        free_extents=in_each_step("free_extents"),
        largest_free_extent=in_each_step("largest_free_extent"),
        span=np.maximum(np.maximum.accumulate(ends), top),
        cached=in_each_step("cached"),
    )
