"""Evicted, swapped and prefetched blocks in the host tier: stories with the numbers of their blocks."""

import pytest

from policies import Chunk, Exported, OutOfCells, Transfer, Unsupported
from policies.paging.host_offload import TransferLog
from tests.policies.paging.cache import (
    BACK,
    OTHER,
    OUT,
    SAME,
    Engine,
    begin,
    cache,
    counted,
    moves_of,
    order,
    run,
    says,
    table,
    tell,
    transfers_of,
)


def swap_out(policy, seq):
    """What was exported of a sequence that then gave up its cells; None where it stays."""
    exported = policy.export(seq)
    if exported is not None:
        policy.free(seq)
    return exported


def comes_back(policy, seq, exported, **conditions):
    """Whether there was room for it."""
    try:
        assert policy.import_(seq, exported, **conditions) == ()
    except OutOfCells:
        return False
    return True


def test_copies_and_transfers_come_with_the_first_micro_batch_only():
    policy = cache(8, n_ubatch=2, host_cells=32, prefix_cache=False)
    run(policy, (0, 0, 6), (2, 0, 4))
    policy.copy(0, 1)
    assert swap_out(policy, 2) is not None
    batches = run(policy, (1, 6, 5))
    assert len(batches) == 3
    assert moves_of(batches) == [(8, 12, 2)]
    assert transfers_of(batches) == (Transfer(OUT, 12, 0, 4),)
    assert moves_of(run(policy, (1, 11, 1))) == []


def test_a_sequence_goes_to_the_host_tier_and_comes_back_under_another_number():
    policy = cache(4, host_cells=16, prefix_cache=False)
    run(policy, (0, 0, 10))
    exported = swap_out(policy, 0)
    assert exported is not None
    assert (policy.sequences(), order(policy)) == ([], [3, 2, 1, 4])
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 12),)
    assert policy.settle_transfers() == ()
    run(policy, (5, 0, 2))
    assert comes_back(policy, 3, exported)
    assert exported.tokens == 10
    assert (table(policy, 3), order(policy), policy.host.used) == ([2, 1, 4], [], 0)
    assert policy.sequences() == [3, 5]
    [batch] = run(policy, (3, 10, 1))
    assert transfers_of([batch]) == (Transfer(BACK, 8, 0, 4), Transfer(BACK, 4, 4, 4), Transfer(BACK, 16, 8, 4))
    assert batch.cells.tolist() == [18]
    assert batch.views[0].cells.tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 16, 17, 18]


def test_blocks_that_are_still_cached_are_not_copied_back():
    """Block 2 was overwritten while the sequence was away, and block 3 was never full."""
    policy = cache(4, host_cells=16)
    begin(policy, 0, says(0, 10))
    exported = swap_out(policy, 0)
    policy.settle_transfers()
    assert order(policy) == [3, 4, 2, 1]
    run(policy, (1, 0, 9))
    assert table(policy, 1) == [3, 4, 2]
    policy.settle_transfers()
    policy.free(1)
    assert comes_back(policy, 2, exported)
    assert exported.tokens == 10
    assert table(policy, 2) == [1, 2, 4]
    assert policy.settle_transfers() == (Transfer(BACK, 8, 4, 4), Transfer(BACK, 16, 8, 4))
    assert policy.match(3, SAME, 10) == 8
    assert policy.admission.found(3) == [1, 2]


def test_free_blocks_that_are_still_cached_are_not_room_for_the_others():
    """Two blocks are still there and both are free, but the third has been taken."""
    policy = cache(3, host_cells=16)
    begin(policy, 0, says(0, 10))
    exported = swap_out(policy, 0)
    run(policy, (1, 0, 1))
    assert order(policy) == [2, 1]
    assert not comes_back(policy, 0, exported)
    assert order(policy) == [2, 1]
    policy.free(1)
    assert comes_back(policy, 0, exported)
    assert exported.tokens == 10
    assert table(policy, 0) == [1, 2, 3]


def test_a_sequence_stays_swapped_out_while_there_is_no_room():
    """It needs 3 blocks, and with others running one of 6 must stay free."""
    policy = cache(5, host_cells=16, prefix_cache=False, watermark=0.2)
    run(policy, (0, 0, 10))
    exported = swap_out(policy, 0)
    run(policy, (1, 0, 12))
    assert not comes_back(policy, 0, exported)
    policy.free(1, 8)
    assert not comes_back(policy, 0, exported, waits=True)
    assert policy.sequences() == [1]
    assert comes_back(policy, 0, exported)
    assert exported.tokens == 10
    assert order(policy) == []


def test_a_tier_too_small_takes_no_sequence():
    policy = cache(8, host_cells=8, prefix_cache=False)
    run(policy, (0, 0, 9), (1, 0, 5))
    assert swap_out(policy, 0) is None
    assert table(policy, 0) == [1, 2, 3]
    assert swap_out(policy, 1) is not None
    run(policy, (2, 0, 1))
    assert swap_out(policy, 2) is None
    assert policy.host.used == 2


def test_without_a_tier_sequences_stay():
    policy = cache(4)
    run(policy, (0, 0, 4))
    assert swap_out(policy, 0) is None
    with pytest.raises(Unsupported):
        policy.import_(0, Exported(4))
    assert (list(policy.fetch(SAME, 9)), policy.settle_transfers(), policy.sequences()) == ([], (), [0])
    assert policy.groups[0].host_cells == cache(4, host_cells=3).groups[0].host_cells == 0
    assert cache(4, host_cells=11).groups[0].host_cells == 8


def test_a_forgotten_swapped_sequence_gives_up_its_slots():
    policy = cache(4, host_cells=8, prefix_cache=False)
    run(policy, (0, 0, 8), (1, 0, 8))
    exported = swap_out(policy, 0)
    assert swap_out(policy, 1) is None
    policy.drop_export(exported)
    assert policy.host.used == 0
    other = swap_out(policy, 1)
    assert other not in (None, exported)
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 8), Transfer(OUT, 12, 0, 8))


def test_evicted_blocks_are_found_in_the_host_tier_brought_back_and_stay_there():
    policy = cache(3, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    assert order(policy) == [3, 2, 1]
    batches = run(policy, (1, 0, 12))
    assert table(policy, 1) == [3, 2, 1]
    assert transfers_of(batches) == (Transfer(OUT, 8, 0, 4), Transfer(OUT, 4, 4, 4))
    policy.free(1)
    assert policy.match(2, SAME, 9) == 8
    assert policy.admission.found(2) == [~1, ~0]
    tell(policy, 2, says(0, 9))
    assert policy.reserve(Chunk(2, 8, 1))
    [batch] = run(policy, (2, 8, 1))
    assert transfers_of([batch]) == (Transfer(BACK, 4, 4, 4), Transfer(BACK, 8, 0, 4))
    assert policy.match(3, SAME, 9) == 8
    assert policy.admission.found(3) == [1, 2]
    assert policy.host.used == 2
    policy.free(2)
    assert transfers_of(run(policy, (4, 0, 12))) == ()
    assert policy.match(3, SAME, 9) == 8


def test_a_prefix_may_lie_in_both_tiers_by_turns():
    """The second of three blocks is gone from the pool, the others are still there."""
    policy = cache(5, host_cells=32)
    begin(policy, 0, says(0, 13))
    policy.free(0)
    policy.pool.forget(2)
    assert policy.match(1, SAME, 13) == 12
    assert policy.admission.found(1) == [1, ~0, 3]
    assert begin(policy, 1, SAME, 13) == 12
    assert table(policy, 1) == [1, 4, 3, 5]
    assert policy.pool.find(SAME.keys(4, 2)[1]) == 4


def test_the_host_tier_forgets_the_least_recently_used():
    """There are two slots; the end of the first text came first and goes first."""
    policy = cache(3, host_cells=8)
    begin(policy, 0, says(0, 12))
    policy.free(0)
    assert order(policy) == [3, 2, 1]
    batches = run(policy, (1, 0, 12))
    assert transfers_of(batches) == (
        Transfer(OUT, 12, 0, 4),
        Transfer(OUT, 8, 4, 4),
        Transfer(OUT, 4, 0, 4),
    )
    keys = SAME.keys(4, 3)
    assert [policy.host.find(key) for key in keys] == [0, 1, None]


def test_a_second_eviction_counts_as_a_use_in_the_host_tier():
    """The first text, computed and evicted again, is not written there again, and counts as newer than the second."""
    policy = cache(3, host_cells=8)
    for text in (0, 1, 0):
        tell(policy, 0, says(text, 5))
        run(policy, (0, 0, 5))
        policy.free(0)
        run(policy, (9, 0, 12))
        policy.free(9)
    [slot] = policy.host.hold(1)
    assert slot == 1
    assert policy.match(1, SAME, 5) == 4
    assert policy.match(1, OTHER, 5) == 0


def test_blocks_that_are_neighbours_in_both_tiers_make_one_transfer():
    log = TransferLog(4)
    for block, slot, to_host in [(1, 0, OUT), (2, 1, OUT), (3, 2, BACK), (4, 3, BACK), (5, 5, BACK), (7, 6, BACK)]:
        log.add(block, slot, to_host=to_host)
    log.add(6, 5, to_host=BACK)
    assert len(log) == 5
    assert log.settle() == (
        Transfer(OUT, 4, 0, 8),
        Transfer(BACK, 12, 8, 8),
        Transfer(BACK, 20, 20, 4),
        Transfer(BACK, 28, 24, 4),
        Transfer(BACK, 24, 20, 4),
    )
    assert (len(log), log.settle()) == (0, ())


def test_blocks_brought_back_are_forgotten_after_all_others_and_the_last_of_them_first():
    policy = cache(3, host_cells=16)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 12))
    policy.free(1)
    begin(policy, 2, says(5, 9))
    policy.free(2)
    run(policy, (1, 0, 12))
    policy.free(1)
    same, other = SAME.keys(4, 2), says(5, 8).keys(4, 2)
    assert [policy.host.find(key) for key in (*same, *other)] == [1, 0, 3, 2]
    assert begin(policy, 3, SAME, 9) == 8
    policy.free(3)
    gone = [policy.host.hold(1)[0] for _ in range(4)]
    assert gone == [2, 3, 0, 1]


def test_swapped_sequences_have_priority_over_evicted_blocks():
    policy = cache(5, host_cells=12)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 20))
    policy.free(1, 9)
    assert policy.match(2, SAME, 9) == 8
    assert swap_out(policy, 1) is not None
    assert policy.match(2, SAME, 9) == 0
    begin(policy, 2, says(5, 9))
    policy.free(2)
    run(policy, (3, 0, 20))
    assert policy.match(2, says(5, 9), 9) == 0


def test_a_prefix_is_fetched_ahead_of_its_use():
    """It comes into free blocks, where it waits as any other cached prefix does."""
    policy = cache(4, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 16))
    policy.free(1)
    policy.settle_transfers()
    assert policy.fetch(SAME, 4) == []
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)
    assert policy.settle_transfers() == (Transfer(BACK, 4, 4, 4), Transfer(BACK, 8, 0, 4))
    assert order(policy) == [4, 3, 2, 1]
    assert (policy.sequences(), policy.usage().cached, counted(policy)) == ([], 8, (0, 0))
    assert policy.fetch(SAME, 9) == []
    assert begin(policy, 2, SAME, 9) == 8
    assert transfers_of(run(policy, (2, 9, 1))) == ()


def test_nothing_is_fetched_without_enough_free_blocks():
    """Two blocks are in the tier, and 1 of 11 must stay free: with 3 free ones they come, with 2 they do not."""
    policy = cache(10, host_cells=32, watermark=0.1)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 40))
    policy.free(1, 32)
    policy.settle_transfers()
    assert len(order(policy)) == 2
    assert policy.fetch(SAME, 9) == []
    assert policy.settle_transfers() == ()
    policy.free(1, 28)
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)


def test_nothing_is_fetched_into_the_free_blocks_of_its_own_prefix():
    """The first block is in the pool and the only free one; the second, in the host tier, would need another."""
    policy = cache(3, host_cells=32)
    begin(policy, 0, says(0, 9))
    policy.free(0)
    run(policy, (1, 0, 8))
    assert (order(policy), policy.pool.find(SAME.keys(4, 1)[0])) == ([1], 1)
    assert policy.fetch(SAME, 9) == []
    policy.free(1, 4)
    assert policy.fetch(SAME, 9) == SAME.keys(4, 2)[1:]


def test_a_block_that_was_never_written_is_not_found_in_the_host_tier_either():
    policy = cache(4, host_cells=32)
    tell(policy, 0, says(0, 9))
    assert policy.reserve(Chunk(0, 0, 9))
    policy.free(0)
    assert policy.settle_transfers() == ()
    assert policy.match(1, SAME, 9) == 0


def test_a_sequence_is_swapped_out_with_the_source_of_its_pending_copy():
    policy = cache(8, host_cells=32, prefix_cache=False)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    exported = swap_out(policy, 1)
    engine.run((0, 6, 1))
    assert comes_back(policy, 1, exported)
    assert exported.tokens == 6
    assert engine.run((1, 6, 1)) == [0, 1, 2, 3, 4, 5, 106]


def test_the_source_of_a_pending_copy_is_not_overwritten_from_the_host_tier():
    """Its holder has ended, but it is held until the copy has been made."""
    policy = cache(4, host_cells=32, prefix_cache=False)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    exported = swap_out(policy, 0)
    engine.run((1, 0, 2))
    policy.copy(1, 2)
    assert policy.reserve(Chunk(2, 2, 1))
    policy.free(1)
    assert order(policy) == [3, 4]
    assert comes_back(policy, 0, exported)
    assert exported.tokens == 6
    assert engine.run((0, 6, 1), (2, 2, 1)) == [100, 101, 202]
    assert (table(policy, 0), table(policy, 2), order(policy)) == ([3, 4], [1], [2])


def test_blocks_found_in_the_host_tier_may_be_gone_when_they_are_reserved():
    policy = cache(3, host_cells=4)
    begin(policy, 0, says(0, 5))
    policy.free(0)
    run(policy, (1, 0, 12))
    policy.free(1)
    begin(policy, 2, says(5, 5))
    policy.free(2)
    assert policy.match(3, SAME, 5) == 4
    tell(policy, 3, says(0, 5))
    run(policy, (4, 0, 12))
    policy.free(4)
    assert policy.match(5, says(5, 5), 5) == 4
    assert not policy.reserve(Chunk(3, 4, 1))


@pytest.mark.parametrize("chunks", [[], [(1, 4, 0)]], ids=["no chunk", "a chunk of no token"])
def test_an_empty_step_loses_no_pending_transfer(chunks):
    policy = cache(4, host_cells=16)
    run(policy, (0, 0, 4), (1, 0, 4))
    assert swap_out(policy, 0) is not None
    assert run(policy, *chunks) == ()
    assert policy.settle_transfers() == (Transfer(OUT, 4, 0, 4),)
