"""What must be true of a policy and its shadow after every rule, and after a step that found no room."""

from collections import Counter

import numpy as np

from policies import checking
from policies.checking import cells_by_owner
from policies.paging.blocks import NULL
from policies.paging.cache_groups import group_key


def the_policy_keeps_its_word(policy, shadow):
    """What shows without a shadow, as it is checked of plug-ins while they run."""
    lengths = {seq: len(text) for seq, text in shadow.text.items()}
    checking.keeps_its_word(policy, lengths, {})


def cells_hold_what_sequences_remember(policy, shadow):
    for group in range(len(policy.groups)):
        cells_of = cells_by_owner(policy.occupancy(group))
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
        for seq, (cells, positions) in cells_by_owner(policy.occupancy(group)).items():
            for cell, token in zip(cells, shadow.tokens_at(group, seq, positions), strict=True):
                assert token_in.setdefault(cell, token) == token
        assert set(token_in) == {cell for cell, of in enumerate(owners) if of}
        if shadow.streams == 1 and not shadow.in_blocks:
            assert len(set(token_in.values())) == len(token_in)


def blocks_are_counted(policy, shadow):
    for _, cache in shadow.caches:
        pool, tables = cache.pool, cache.tables.values()
        held = Counter(block for s in tables for block in s.blocks[s.skipped :])
        assert all(block == NULL for s in tables for block in s.blocks[: s.skipped])
        assert list(pool.refs) == [held[block] for block in range(pool.n)]
        free = pool.free.order()
        first = pool.free.per_page if policy.shared_memory else pool.first
        assert sorted(free) == [block for block in range(first, pool.n) if not held[block]]
        if not policy.shared_memory:
            assert len(pool.free) == len(free)


def one_pool_has_the_blocks_of_all_groups(policy, shadow):
    if not shadow.grouped:
        return
    pool, parts, sequences = policy.pool, policy.blocks.parts, policy.blocks.sequences.values()
    held = Counter(block for s in sequences for table in s.tables for block in table.blocks if block != NULL)
    assert list(pool.refs) == [held[block] for block in range(pool.n)]
    assert sorted(pool.free.order()) == [block for block in range(1, pool.n) if not held[block]]
    in_group = {}
    for at, part in enumerate(parts):
        for block in {block for s in sequences for block in s.tables[at].blocks} - {NULL}:
            assert in_group.setdefault(block, at) == at
        if not part.spec.holds_cells:
            # The states that a step begins and ends with, a checkpoint, and one for each drafted token.
            most = 3 + part.draft_tokens
            assert all(sum(block != NULL for block in s.tables[at].blocks) <= most for s in sequences)
    keyed = {block: key for block, key in enumerate(pool.keys) if key is not None}
    assert policy.blocks.prefix_cache or not keyed
    assert pool.n_free_cached == sum(not held[block] for block in keyed)
    text = {
        group_key(key, at): (at, words) for key, words in shadow.words.block_text.items() for at in range(len(parts))
    }
    for block, key in keyed.items():
        at, words = text[key]
        if parts[at].spec.holds_cells:
            group, size = policy.tables_of_groups.index(at), parts[at].size
            held_there = shadow.ids[group][block * size : (block + 1) * size].tolist()
            assert held_there[-len(words) :] == words


def a_large_page_is_used_by_one_kind(policy, shadow):
    if not policy.shared_memory or shadow.grouped:
        return
    memory, taken = policy.pages, {}
    in_use = Counter()
    for kind, (_, cache) in enumerate(shadow.caches):
        small = memory.kinds[kind]
        blocks = [block for block, refs in enumerate(cache.pool.refs) if refs]
        cached = [block for block, key in enumerate(cache.pool.keys) if key is not None]
        for block in blocks + cached:
            assert taken.setdefault(block // small.per_page, kind) == kind
        in_use.update(block // small.per_page for block in blocks)
        owned = list(memory.owner).count(kind)
        idle = sum(memory.owner[page] == kind for page in memory.idle)
        assert small.n_free_beside_idle == (owned - idle) * small.per_page - len(blocks)
        assert len(small) == small.n_free_beside_idle + small.per_page * memory.n_available
    assert list(memory.in_use) == [in_use[page] for page in range(memory.n)]
    assert {page: kind for page, kind in enumerate(memory.owner) if kind >= 0} == taken
    assert set(memory.idle) == taken.keys() - in_use.keys()
    assert memory.n_unowned == memory.n - 1 - len(taken)
    assert 0 not in taken


def cached_blocks_hold_what_their_key_says(policy, shadow):
    for group, cache in shadow.caches:
        cached_in(cache, group, shadow)
    if policy.shared_memory and not shadow.grouped:
        sizes = [cache.pool.n_free_cached * policy.block_size for _, cache in shadow.caches]
        layers = [kind.layers for kind in policy._layout.kinds]
        assert policy.usage().cached == np.dot(sizes, layers) // sum(layers)


def cached_in(policy, group, shadow):
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
        assert shadow.ids[group][block * size : (block + 1) * size].tolist() == block_text[key]
    for key, tokens in block_text.items() if policy.host is not None else ():
        slot = policy.host.find(key)
        if slot is not None:
            assert shadow.host_ids[slot * size : (slot + 1) * size].tolist() == tokens


ALWAYS_TRUE = (
    the_policy_keeps_its_word,
    cells_hold_what_sequences_remember,
    a_cell_has_two_owners_only_for_a_copied_token,
    blocks_are_counted,
    one_pool_has_the_blocks_of_all_groups,
    a_large_page_is_used_by_one_kind,
    cached_blocks_hold_what_their_key_says,
)


def nothing_is_left(policy, shadow):
    """Every sequence has been freed."""
    checking.holds_nothing(policy)
    if shadow.paged and policy.host is not None:
        assert policy.host.hold(policy.host.n) is not None


def state_of(policy, shadow):
    """Everything that can be seen of a policy."""
    maps = [policy.occupancy(group) for group in range(len(policy.groups))]
    pools = [policy.pool] if shadow.grouped else [cache.pool for _, cache in shadow.caches]
    pool = [(each.free.order(), list(each.keys)) for each in pools]
    return [(m.position.tolist(), m.owners) for m in maps], policy.usage(), policy.sequences(), pool


def only_compaction_changed(policy, shadow, step, before, *, untouched):
    """No room for a step: nothing has changed except by compaction; and, as in the original, by what a window gave up.

    ``untouched``: no micro-batch was kept.
    """
    if shadow.in_blocks:
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
    windows = {group: cache.window for group, cache in shadow.caches if cache.window is not None}
    if shadow.grouped:
        windows = {at: group.window for at, group in enumerate(policy.groups) if group.window is not None}
    if not windows and not (shadow.grouped and policy.cuts_chunks):
        assert after == before
        return
    for group in range(len(policy.groups)):
        if group not in windows:
            assert after[0][group] == before[0][group]
            continue
        size = policy.blocks.parts[policy.tables_of_groups[group]].size if shadow.grouped else policy.block_size
        if shadow.grouped:
            first = {chunk.seq: shadow.lowest(group, chunk.start) // size * size for chunk in step}
        else:
            first = {chunk.seq: max(chunk.start + 1 - windows[group], 0) // size * size for chunk in step}
        (position, owners), (now, owners_now) = before[0][group], after[0][group]
        stay = [{seq for seq in of if at >= first.get(seq, 0)} for at, of in zip(position, owners, strict=True)]
        assert [set(of) for of in owners_now] == stay
        assert now == [at if of else -1 for at, of in zip(position, stay, strict=True)]
    assert after[2] == before[2]


def tokens_of(cell_map):
    position, owners = cell_map
    return Counter(zip(position, owners, strict=True))
