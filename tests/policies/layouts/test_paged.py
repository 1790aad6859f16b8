"""Block tables of the paged policy: stories with the numbers of their blocks, which have 4 cells each."""

from functools import partial

import pytest

from policies import CacheConfig, Chunk, OutOfCells, SequencePlan, Unsupported
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks
from tests.policies.paging.cache import SAME, UNBOUNDED, begin, cache, order, refs, run, says, table, tell


def test_no_room_changes_nothing_and_says_how_much_was_missing():
    policy = cache(3)
    run(policy, (0, 0, 6))
    with pytest.raises(OutOfCells, match="the step needs 2 blocks of 4 cells, 1 are free") as caught:
        run(policy, (0, 6, 3), (1, 0, 1))
    assert caught.value.done == ()
    assert (table(policy, 0), order(policy), policy.sequences()) == ([1, 2], [3], [0])
    run(policy, (0, 6, 3))
    assert table(policy, 0) == [1, 2, 3]


def test_only_a_tail_can_go():
    policy = cache(4)
    run(policy, (0, 0, 10))
    with pytest.raises(Unsupported, match=r"mine: a block table gives up its tail only, not \[2, 5\) of 10"):
        policy.free(0, 2, 5)
    policy.free(0, 10)
    policy.free(0, 4, 4)
    policy.free(9)
    assert table(policy, 0) == [1, 2, 3]
    policy.free(0, 6, 99)
    assert (table(policy, 0), policy.can_truncate(0, 6), policy.can_truncate(0, 7), policy.can_truncate(9, 3)) == (
        [1, 2],
        6,
        6,
        0,
    )
    policy.free(0, 0, 6)
    assert policy.sequences() == []


def test_a_sequence_holds_no_gap():
    policy = cache(4)
    with pytest.raises(ValueError, match="mine: sequence 0 holds no token before position 1"):
        run(policy, (0, 1, 1))
    run(policy, (0, 0, 4))
    with pytest.raises(ValueError, match="mine: sequence 0 holds no token before position 5"):
        run(policy, (0, 5, 1))


def test_a_chunk_is_for_one_sequence():
    policy = cache(4)
    with pytest.raises(Unsupported, match="mine: a chunk for several sequences at once; copy the sequence instead"):
        policy.allocate([Chunk(0, 0, 4, (1,))])


@pytest.mark.parametrize(
    ("cells", "null_block", "message"),
    [
        (7, True, "7 cells make 1 blocks of 4, and block 0 is never handed out"),
        (3, False, "3 cells make 0 blocks of 4"),
    ],
)
def test_a_cache_without_a_block_to_hand_out_is_refused(cells, null_block, message):
    config = CacheConfig(cells=cells)
    with pytest.raises(ValueError, match=f"^{message}$"):
        PagedPolicy("mine", config, block_size=4, free=partial(free_blocks, "lru"), null_block=null_block)


def test_requests_that_even_an_empty_cache_could_not_hold_are_refused():
    policy = cache(3)
    assert policy.refusal(SequencePlan(5, UNBOUNDED, 12)) is None
    assert policy.refusal(SequencePlan(5, UNBOUNDED, 13)) == (
        "the request needs 4 blocks of 4 cells (5 prompt tokens, 13 in all), the cache has 3"
    )
    unbounded = cache(5, window=8, n_ubatch=4)
    assert unbounded.refusal(SequencePlan(5, UNBOUNDED, 300)) is None
    assert cache(3, window=8, n_ubatch=4).refusal(SequencePlan(5, UNBOUNDED, 300)) == (
        "the request needs 4 blocks of 4 cells (5 prompt tokens, 300 in all), the cache has 3"
    )


def test_usage_counts_blocks_and_what_is_in_them():
    policy = cache(6)
    begin(policy, 0, says(0, 6))
    begin(policy, 1, says(1, 5))
    policy.free(0)
    usage = policy.usage()
    assert (usage.capacity, usage.stored, usage.allocated, usage.placeable) == (24, 5, 8, 16)
    assert (usage.free_extents, usage.largest_free_extent, usage.span, usage.cached) == (2, 8, 17, 4)
    policy.free(1)
    assert policy.usage().cached == 8
    assert policy.usage().span == 0


def test_truncated_blocks_are_found_until_they_are_overwritten():
    """Block 2 still holds the old text, until another one is written into it."""
    policy = cache(4)
    begin(policy, 0, says(0, 8))
    policy.free(0, 6)
    assert policy.match(1, SAME, 9) == 8
    run(policy, (0, 6, 2))
    assert (table(policy, 0), refs(policy)) == ([1, 2], [0, 1, 1, 0, 0])
    assert policy.match(1, SAME, 9) == 4


def test_other_text_behind_a_truncation_is_found_under_its_own_keys():
    policy = cache(8)
    begin(policy, 0, says(0, 12))
    policy.free(0, 6)
    new = says(0, 6, (5, 0, 7))
    tell(policy, 0, new)
    run(policy, (0, 6, 6))
    assert policy.match(1, new, 20) == 12
    assert policy.admission.found(1) == table(policy, 0)
    assert policy.match(1, SAME, 20) == 4


def test_tokens_behind_a_truncation_are_not_cached_unless_their_text_is_known():
    policy = cache(8)
    begin(policy, 0, says(0, 12))
    policy.free(0, 4)
    run(policy, (0, 4, 8))
    assert policy.match(1, SAME, 20) == 12
    assert policy.admission.found(1) == [1, 2, 3]
    assert table(policy, 0) == [1, 4, 5]
    assert policy.pool.keys[4] is None
