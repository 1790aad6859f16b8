"""Steps composed ahead: what decode steps fill is cached a step later, however the steps are taken."""

from functools import partial

import pytest

from policies import CacheConfig, Chunk, Content, SequencePlan
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks

PROMPTS = (5, 7, 8)


def started(eviction="lru", *, ahead=True, window=None, cells=160, build=PagedPolicy):
    """Three sequences whose prompts have been computed, in blocks of 4."""
    config = CacheConfig(cells=cells, block_size=4, n_ubatch=16)
    free = partial(free_blocks, eviction)
    policy = build("ahead", config, block_size=4, free=free, prefix_cache=True, window=window)
    if ahead:
        policy.compose_ahead(2)
    for seq, prompt in enumerate(PROMPTS):
        policy.open(seq, SequencePlan(prompt, 64, 64, Content([(seq, 0, 64)])))
        assert policy.reserve(Chunk(seq, 0, prompt))
        policy.allocate([Chunk(seq, 0, prompt)])
    return policy


def decode(policy, steps, first=0):
    """Take steps one by one, each composed while the token of the one before is not known."""
    for n in range(first, first + steps):
        step = [Chunk(seq, prompt + n, 1) for seq, prompt in enumerate(PROMPTS)]
        assert all(policy.reserve(chunk, in_flight=1, known=chunk.start) for chunk in step)
        policy.allocate(step)


def cached(policy, seq):
    """The number of a sequence's blocks that can be found."""
    return sum(policy.pool.keys[block] is not None for block in policy.tables[seq].blocks)


def state(policy):
    return policy.pool.keys, policy.pool.free.order(), {seq: list(t.blocks) for seq, t in policy.tables.items()}


def test_what_is_known_in_the_end_can_be_found():
    policy = started()
    decode(policy, 1)
    policy.note_known(1, 8)
    assert cached(policy, 1) == 2
    policy.note_known(1, 8)
    assert cached(policy, 1) == 2


def rows_of(policy):
    """The policy's rule, of which all three sequences are rows."""
    rule = policy.placement_rule()
    assert all(rule.join(seq, 100) for seq in range(3))
    return rule


@pytest.mark.parametrize("eviction", ["lru", "sieve", "lfu", "fifo"])
@pytest.mark.parametrize("steps", range(1, 10))
def test_rows_cache_what_single_steps_do(eviction, steps):
    single, together = started(eviction), started(eviction)
    decode(single, steps)
    rule = rows_of(together)
    for _ in range(steps):
        assert rule.reserve()
        assert rule.take_step()
    assert together.pool.keys == single.pool.keys
    for seq in range(3):
        rule.leave(seq)
    assert state(together) == state(single)


@pytest.mark.parametrize("eviction", ["lru", "sieve"])
def test_the_control_a_step_composed_after_another_caches_at_once(eviction):
    ahead, after = started(eviction), started(eviction, ahead=False)
    for policy in (ahead, after):
        rule = rows_of(policy)
        assert rule.take_step()
        for seq in range(3):
            rule.leave(seq)
    assert [cached(policy, 1) for policy in (ahead, after)] == [1, 2]


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_window_moves_on_a_step_later(steps):
    single, together, after = started(window=6), started(window=6), started(window=6, ahead=False)
    decode(single, steps)
    decode(together, 1)  # A prompt's blocks behind the window are still held.
    rule = rows_of(together)
    for n in range(steps - 1):
        assert rule.take_step()
        lengths = [prompt + n + 2 for prompt in PROMPTS]
        skipped = [together.tables[seq].skipped for seq in range(3)]
        # The step that still runs places the token before, and sees the five before that.
        assert skipped == [max(length - 2 - 6 + 1, 0) // 4 for length in lengths]
        most = max(length - 4 * gone for length, gone in zip(lengths, skipped, strict=True))
        assert rule.passes[0].groups[0].single_most == most
    for seq in range(3):
        rule.leave(seq)
    assert state(together) == state(single)
    for n in range(steps):
        step = [Chunk(seq, prompt + n, 1) for seq, prompt in enumerate(PROMPTS)]
        assert all(after.reserve(chunk) for chunk in step)
        after.allocate(step)
    assert all(after.tables[seq].skipped >= single.tables[seq].skipped for seq in range(3))


def test_a_window_has_room_for_all_steps_in_flight():
    """A sequence may hold what its window sees, and the tokens of two steps."""
    one, two = (started(window=6, ahead=ahead, cells=40) for ahead in (False, True))
    long = SequencePlan(60, 64, 64)
    assert one.refusal(long) is None
    assert two.refusal(long).startswith("the request needs 11 blocks of 4 cells")


def test_a_reserve_of_ones_own_is_asked_too():
    asked = []

    class Own(PagedPolicy):
        def reserve(self, chunk, *, whole=0, waits=False, in_flight=0, known=None):
            asked.append(chunk)
            return super().reserve(chunk, whole=whole, waits=waits, in_flight=in_flight, known=known)

    policy = started(build=Own)
    decode(policy, 1)
    assert asked[3:] == [Chunk(seq, prompt, 1) for seq, prompt in enumerate(PROMPTS)]
    assert cached(policy, 1) == 1
