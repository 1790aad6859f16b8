"""What must be true of a policy and its shadow after every rule, and after a step that found no room."""

from collections import Counter

import numpy as np

from policies.paging.blocks import NULL
from tests.policies.invariants.shadow import cells_by_owner


def cells_hold_what_sequences_remember(policy, shadow):
    for group in range(len(policy.groups)):
        cells_of = cells_by_owner(policy, group)
        assert set(cells_of) <= set(shadow.plans)
        for seq in shadow.plans:
            cells, positions = cells_of.get(seq, ([], []))
            tokens = shadow.tokens_at(group, seq, positions)
            if not shadow.moves_unreported and not shadow.transfers_unreported:
                assert shadow.ids[group][cells].tolist() == tokens
                if not shadow.rotations_unreported:
                    assert shadow.rotary[group][cells].tolist() == positions


def a_cell_has_two_owners_only_for_a_copied_token(policy, shadow):
    for group in range(len(policy.groups)):
        owners = policy.occupancy(group).owners
        token_in = {}
        for seq, (cells, positions) in cells_by_owner(policy, group).items():
            for cell, token in zip(cells, shadow.tokens_at(group, seq, positions), strict=True):
                assert token_in.setdefault(cell, token) == token
        assert set(token_in) == {cell for cell, of in enumerate(owners) if of}
        if shadow.streams == 1 and not shadow.paged:
            assert len(set(token_in.values())) == len(token_in)


def first_owners_are_those_of_the_map(policy, shadow):
    for group in range(len(policy.groups)):
        assert np.array_equal(policy.first_owners(group), policy.occupancy(group).first_owner())


def usage_counts_the_cells(policy, shadow):
    usage = policy.usage()
    used = np.array([bool(of) for of in policy.occupancy().owners])
    assert usage.capacity == policy.capacity <= policy.groups[0].cells
    assert usage.stored == used.sum() <= usage.allocated
    assert usage.free + usage.allocated == usage.capacity
    assert 0 <= usage.external_fragmentation <= 1
    assert 0 <= usage.largest_free_extent <= usage.free
    top = int(np.flatnonzero(used).max(initial=-1)) + 1
    assert usage.span == top
    if usage.stored == usage.allocated and policy.capacity == policy.groups[0].cells:
        free_extents = [n for stream in np.split(used, shadow.streams) for n in lengths_of_runs(~stream)]
        assert (usage.free_extents, usage.largest_free_extent) == (len(free_extents), max(free_extents, default=0))


def sequences_are_those_that_hold_cells(policy, shadow):
    holding = [seq for seq in sorted(shadow.plans) if shadow.text[seq]]
    named = policy.sequences()
    assert named == sorted(set(named))
    assert set(holding) <= set(named) <= set(shadow.plans)


def blocks_are_counted(policy, shadow):
    if not shadow.paged:
        return
    pool, tables = policy.pool, policy.tables.values()
    held = Counter(block for s in tables for block in s.blocks[s.skipped :])
    assert all(block == NULL for s in tables for block in s.blocks[: s.skipped])
    assert pool.refs == [held[block] for block in range(pool.n)]
    free = pool.free.order()
    assert sorted(free) == [block for block in range(pool.first, pool.n) if not held[block]]
    assert len(pool.free) == len(free)


def cached_blocks_hold_what_their_key_says(policy, shadow):
    if not shadow.paged:
        return
    pool, size = policy.pool, policy.block_size
    keyed = {block: key for block, key in enumerate(pool.keys) if key is not None}
    assert policy.prefix_cache or not keyed
    for key in keyed.values():
        assert keyed[pool.find(key)] == key
    assert pool.n_cached == len(set(keyed.values()))
    assert pool.n_free_cached == sum(1 for block in keyed if pool.refs[block] == 0)
    assert policy.usage().cached == pool.n_free_cached * size
    if shadow.transfers_unreported:
        return
    block_text = shadow.words.block_text
    for block, key in keyed.items():
        assert shadow.ids[0][block * size : (block + 1) * size].tolist() == block_text[key]
    for key, tokens in block_text.items() if policy.host is not None else ():
        slot = policy.host.find(key)
        if slot is not None:
            assert shadow.host_ids[slot * size : (slot + 1) * size].tolist() == tokens


ALWAYS_TRUE = (
    cells_hold_what_sequences_remember,
    a_cell_has_two_owners_only_for_a_copied_token,
    first_owners_are_those_of_the_map,
    usage_counts_the_cells,
    sequences_are_those_that_hold_cells,
    blocks_are_counted,
    cached_blocks_hold_what_their_key_says,
)


def nothing_is_left(policy, shadow):
    """Every sequence has been freed."""
    assert policy.sequences() == []
    usage = policy.usage()
    assert (usage.stored, usage.allocated, usage.span) == (0, 0, 0)
    assert (usage.free, usage.free_extents) == (policy.capacity, shadow.streams)
    if shadow.paged and policy.host is not None:
        assert policy.host.hold(policy.host.n) is not None


def state_of(policy, shadow):
    """Everything that can be seen of a policy."""
    maps = [policy.occupancy(group) for group in range(len(policy.groups))]
    pool = (policy.pool.free.order(), list(policy.pool.keys)) if shadow.paged else None
    return [(m.position.tolist(), m.owners) for m in maps], policy.usage(), policy.sequences(), pool


def only_compaction_changed(policy, shadow, step, before, *, untouched):
    """No room for a step: nothing has changed except by compaction; and, as in the original, by what a window gave up.

    ``untouched``: no micro-batch was kept.
    """
    if shadow.paged:
        only_the_window_moved(policy, shadow, step, before)
        return
    for chunk in step:
        shadow.window_moves_on(chunk.seq, chunk.start + chunk.n)
    if shadow.evicts:
        only_evictions_were_made(policy, shadow, before)
    elif untouched:
        (maps, usage, sequences, _), (old_maps, old_usage, old_sequences, _) = state_of(policy, shadow), before
        assert sequences == old_sequences
        assert (usage.stored, usage.allocated) == (old_usage.stored, old_usage.allocated)
        if maps[0] == old_maps[0]:
            assert usage == old_usage
        for group in range(len(maps)):
            if group not in shadow.window:
                assert tokens_of(maps[group]) == tokens_of(old_maps[group])


def only_evictions_were_made(policy, shadow, before):
    """No room for a step: all that is there was there, for the same sequences."""
    (maps, usage, sequences, _), (old_maps, old_usage, old_sequences, _) = state_of(policy, shadow), before
    assert sequences == old_sequences
    assert usage.allocated <= old_usage.allocated
    for now, then in zip(maps, old_maps, strict=True):
        old, new = tokens_of(then), tokens_of(now)
        assert {key: n for key, n in new.items() if key[1]} == {key: n for key, n in (new & old).items() if key[1]}


def only_the_window_moved(policy, shadow, step, before):
    """No room for these chunks: nothing has changed, except that blocks are gone which their tokens cannot see."""
    if shadow.evicts:
        only_evictions_were_made(policy, shadow, before)
        return
    after = state_of(policy, shadow)
    if not shadow.paged or policy.window is None:
        assert after == before
        return
    size, window = policy.block_size, policy.window
    first = {chunk.seq: max(chunk.start + 1 - window, 0) // size * size for chunk in step}
    (position, owners), (now, owners_now) = before[0][0], after[0][0]
    stay = [{seq for seq in of if at >= first.get(seq, 0)} for at, of in zip(position, owners, strict=True)]
    assert [set(of) for of in owners_now] == stay
    assert now == [at if of else -1 for at, of in zip(position, stay, strict=True)]
    assert after[2] == before[2]


def lengths_of_runs(free):
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(int)))
    return (edges[1::2] - edges[::2]).tolist()


def tokens_of(cell_map):
    position, owners = cell_map
    return Counter(zip(position, owners, strict=True))
