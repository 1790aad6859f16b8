"""Copies on write that are still to be made, with blocks of 4 cells."""

import pytest

from policies.paging.block_table import PendingCopies


@pytest.fixture
def copies():
    """Block 1 to block 2, and from there to block 3; block 1 to block 5."""
    copies = PendingCopies(4)
    copies.add(1, 2, 3)
    copies.add(2, 3, 3)
    copies.add(1, 5, 2)
    return copies


def test_a_chain_of_copies_leads_back_to_the_block_that_holds_the_tokens(copies):
    assert [copies.origin(block) for block in (1, 2, 3, 5, 6)] == [1, 1, 1, 1, 6]


def test_copies_are_counted_by_the_block_that_they_read(copies):
    assert [copies.from_block(block) for block in (1, 2, 3)] == [2, 1, 0]


def test_copies_into_blocks_that_are_no_longer_held_are_dropped(copies):
    assert copies.cancel([3, 5, 9]) == [2, 1]
    assert copies.runs == [(4, 8, 3)]


def test_copies_are_handed_over_once(copies):
    moves, sources = copies.settle()
    assert list(zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True)) == [
        (4, 8, 3),
        (8, 12, 3),
        (4, 20, 2),
    ]
    assert sources == [1, 2, 1]
    moves, sources = copies.settle()
    assert (moves.n_runs, sources) == (0, [])
