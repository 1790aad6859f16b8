"""Where the search of one arena for all sequences begins."""

import pytest

from policies import CacheConfig, Chunk
from policies.layouts.unified import UnifiedPolicy


@pytest.fixture
def policy():
    """Sequences 0, 1 and 2 in cells 0 to 11 of 40; the next search begins at cell 12."""
    policy = UnifiedPolicy("mine", CacheConfig(cells=40, n_ubatch=8))
    for seq in range(3):
        policy.allocate([Chunk(seq, 0, 4)])
    return policy


def cells(policy, seq, start, n):
    (batch,) = policy.allocate([Chunk(seq, start, n)])
    return batch.cells.tolist()


def test_it_goes_on_behind_what_was_placed_last(policy):
    assert cells(policy, 3, 0, 2) == [12, 13]
    assert cells(policy, 3, 2, 1) == [14]


@pytest.mark.parametrize(("start", "stop", "found"), [(0, None, [4, 5]), (2, None, [6, 7]), (1, 3, [5, 6])])
def test_it_begins_at_the_first_cell_that_was_given_up(policy, start, stop, found):
    policy.free(1, start, stop)
    assert cells(policy, 3, 0, 2) == found


def test_it_stays_where_it_was_if_no_cell_or_a_later_one_was_given_up(policy):
    policy.arena.head = 5
    policy.free(2)
    policy.free(7)
    assert policy.arena.head == 5


def test_it_begins_at_the_first_free_cell_when_only_one_sequence_is_kept(policy):
    policy.keep(1)
    assert cells(policy, 3, 0, 2) == [0, 1]


def test_it_begins_at_the_first_cell_that_a_shift_gives_up_or_else_at_the_start(policy):
    policy.shift(1, 0, None, -2)
    assert policy.arena.head == 4
    policy.shift(1, 0, None, 3)
    assert policy.arena.head == 0
