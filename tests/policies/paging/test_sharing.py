"""Blocks that several sequences share, and copies on write: stories with the numbers of their blocks."""

import pytest

from policies import Chunk, OutOfCells, Unsupported
from tests.policies.paging.cache import (
    SAME,
    Engine,
    begin,
    cache,
    counted,
    moves_of,
    order,
    refs,
    run,
    says,
    table,
    tell,
)


def test_the_source_of_a_copy_may_be_the_first_to_write():
    policy = cache(8)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    batches = run(policy, (0, 6, 3))
    assert (table(policy, 0), table(policy, 1)) == ([1, 3, 4], [1, 2])
    assert moves_of(batches) == [(8, 12, 2)]
    assert moves_of(run(policy, (1, 6, 1))) == []
    assert (table(policy, 1), counted(policy)) == ([1, 2], (12, 12))


def test_the_last_of_several_to_write_keeps_the_block():
    policy = cache(8)
    run(policy, (0, 0, 7))
    for seq in (1, 2, 3):
        policy.copy(0, seq)
    assert refs(policy)[2] == 4
    batches = run(policy, (2, 7, 1), (0, 7, 2), (3, 7, 1))
    assert moves_of(batches) == [(8, 12, 3), (8, 16, 3), (8, 24, 3)]
    assert [table(policy, seq) for seq in range(4)] == [[1, 4, 5], [1, 2], [1, 3], [1, 6]]
    assert moves_of(run(policy, (1, 7, 1))) == []
    assert table(policy, 1) == [1, 2]


def test_three_sequences_that_share_a_block_need_two_more():
    policy = cache(3)
    run(policy, (0, 0, 3))
    policy.copy(0, 1)
    policy.copy(0, 2)
    batches = run(policy, (0, 3, 1), (1, 3, 1), (2, 3, 1))
    assert moves_of(batches) == [(4, 8, 3), (4, 12, 3)]
    assert [table(policy, seq) for seq in range(3)] == [[2], [3], [1]]
    assert batches[0].cells.tolist() == [11, 15, 7]
    tight = cache(2)
    run(tight, (0, 0, 3))
    tight.copy(0, 1)
    tight.copy(0, 2)
    with pytest.raises(OutOfCells, match="needs 2 blocks of 4 cells, 1 are free"):
        run(tight, (0, 3, 1), (1, 3, 1), (2, 3, 1))
    assert moves_of(run(tight, (0, 3, 1))) == [(4, 8, 3)]


def test_part_of_a_sequence_can_be_shared_and_the_full_blocks_of_both_differ():
    """Sequence 1 sees 6 of 8 tokens. From there on its text is not the one that block 2 was cached under."""
    policy = cache(8)
    begin(policy, 0, says(0, 8))
    policy.copy(0, 1, 0, 6)
    assert counted(policy) == (8, 8)
    tell(policy, 1, says(0, 6, (5, 0, 6)))
    batches = run(policy, (1, 6, 2))
    assert moves_of(batches) == [(8, 12, 2)]
    assert (table(policy, 0), table(policy, 1)) == ([1, 2], [1, 3])
    assert policy.match(2, SAME, 9) == 8
    assert policy.admission.found(2) == [1, 2]
    assert policy.match(2, says(0, 6, (5, 0, 6)), 9) == 8
    assert policy.admission.found(2) == [1, 3]


def test_only_the_beginning_of_a_sequence_can_be_shared():
    policy = cache(4)
    run(policy, (0, 0, 6), (1, 0, 1))
    with pytest.raises(Unsupported, match="mine: only the beginning of a sequence can be shared, with one that holds"):
        policy.copy(0, 2, 2)
    with pytest.raises(Unsupported, match="with one that holds nothing"):
        policy.copy(0, 1)
    policy.copy(0, 0)
    policy.copy(7, 2)
    policy.copy(0, 2, 0, 0)
    assert policy.sequences() == [0, 1]


def test_a_pending_copy_is_not_made_once_its_owner_has_ended():
    policy = cache(4)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    assert table(policy, 1) == [1, 3]
    policy.free(1)
    assert moves_of(run(policy, (0, 6, 1))) == []


def test_a_truncated_block_that_others_hold_is_copied_before_it_is_written():
    policy = cache(8)
    begin(policy, 0, says(0, 9))
    begin(policy, 1, says(0, 9))
    assert table(policy, 1) == [1, 2, 4]
    policy.free(1, 6)
    assert moves_of(run(policy, (1, 6, 2))) == [(8, 16, 2)]
    assert (table(policy, 1), policy.match(2, SAME, 9), policy.admission.found(2)) == ([1, 4], 8, [1, 2])


@pytest.mark.parametrize("leaves", ["all", "in part", "by its window"])
def test_cells_that_only_a_sequence_that_left_could_see_are_no_longer_counted(leaves):
    """Sequence 1 sees 6 of 8 tokens."""
    policy = cache(8, window=6 if leaves == "by its window" else None)
    run(policy, (0, 0, 8))
    policy.copy(0, 1, 0, 6)
    assert counted(policy) == (8, 8)
    if leaves == "all":
        policy.free(0)
        assert counted(policy) == (6, 6)
    elif leaves == "in part":
        policy.free(0, 3)
        assert counted(policy) == (6, 6)
    else:
        run(policy, (0, 8, 5))
        run(policy, (0, 13, 1))
        assert counted(policy) == (12, 12)


def test_blocks_for_drafted_tokens_do_not_count_as_tokens():
    policy = cache(8)
    assert policy.reserve(Chunk(0, 0, 6), lookahead=8)
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    run(policy, (1, 6, 1))
    assert (table(policy, 0), table(policy, 1)) == ([1, 2, 3, 4], [1, 5])
    assert counted(policy) == (9, 9)


def test_a_copy_of_a_copy_that_was_never_made():
    policy = cache(8)
    engine = Engine(policy)
    engine.run((0, 0, 6))
    policy.copy(0, 1)
    assert policy.reserve(Chunk(1, 6, 1))
    policy.copy(1, 2)
    assert policy.reserve(Chunk(2, 6, 1))
    policy.free(1)
    assert engine.run((2, 6, 1)) == [0, 1, 2, 3, 4, 5, 206]


def test_a_block_that_was_never_written_is_not_found_although_its_beginning_is_to_be_copied():
    """Sequence 0 is to get a copy of block 2, so sequence 1 was to write to block 2 itself, but ends."""
    policy = cache(8)
    tell(policy, 0, says(0, 20))
    run(policy, (0, 0, 6))
    policy.copy(0, 1)
    tell(policy, 1, says(0, 20))
    assert policy.reserve(Chunk(0, 6, 1))
    assert policy.reserve(Chunk(1, 6, 2))
    assert (table(policy, 0), table(policy, 1)) == ([1, 3], [1, 2])
    policy.free(1)
    assert moves_of(run(policy, (0, 6, 1))) == [(8, 12, 2)]
    assert policy.match(2, SAME, 9) == 4
    assert order(policy) == [2, 4, 5, 6, 7, 8]


def test_a_sequence_may_be_opened_with_its_text_before_it_shares_blocks():
    policy = cache(8)
    begin(policy, 0, says(0, 6))
    mine = says(0, 6, (5, 0, 6))
    tell(policy, 1, mine)
    policy.copy(0, 1)
    run(policy, (1, 6, 6))
    assert policy.match(2, mine, 13) == 12
