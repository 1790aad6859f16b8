"""States of sequences: where they lie, what they share, and what of them can be taken back."""

import pytest

from policies import Chunk
from policies.cells.arena import FOREVER
from policies.cells.split_batch import split_keeping_tails
from policies.cells.states import StateMemory


def states(n=3, *steps, snapshots=0):
    memory = StateMemory(n, snapshots)
    for step in steps:
        memory.place([Chunk(*chunk) for chunk in step])
    return memory


def cells(memory):
    return [(position, *sorted(seqs)) for position, seqs in zip(memory.position, memory.seqs, strict=True)]


def test_the_states_of_a_micro_batch_lie_together_in_its_order():
    memory = states(3, [(2, 0, 5)], [(0, 0, 3)])
    assert cells(memory) == [(4, 2), (2, 0), (-1,)]
    memory.place([Chunk(0, 3, 1), Chunk(1, 0, 1), Chunk(2, 5, 1)])
    assert cells(memory) == [(3, 0), (0, 1), (5, 2)]
    assert [memory.last_position(seq) for seq in range(3)] == [3, 0, 5]


def test_a_copy_shares_the_state_until_one_goes_on():
    memory = states(3, [(0, 0, 5)])
    memory.copy(0, 2)
    assert (cells(memory), memory.used) == ([(4, 0, 2), (-1,), (-1,)], 1)
    memory.place([Chunk(2, 5, 2)])
    assert cells(memory) == [(4, 0), (6, 2), (-1,)]
    memory.copy(2, 0)
    assert (cells(memory), memory.used) == ([(-1,), (6, 0, 2), (-1,)], 1)


def test_what_a_state_has_seen_is_removed_whole_or_not_at_all():
    memory = states(2, [(0, 0, 5)])
    assert not memory.remove(0, 3, FOREVER)
    assert memory.remove(0, 1, 3)  # Not the token that it stands after: as if nothing had been asked.
    assert memory.remove(0, 5, FOREVER)
    assert memory.last_position(0) == 4
    assert not memory.remove(-1, 0, FOREVER)
    assert memory.remove(0, 0, FOREVER)
    assert (memory.last_position(0), memory.used) == (-1, 0)


def test_snapshots_take_back_as_many_tokens_once():
    memory = states(2, [(0, 0, 9)], snapshots=2)
    assert not memory.remove(0, 6, FOREVER)
    assert memory.remove(0, 7, FOREVER)
    assert memory.last_position(0) == 6
    assert not memory.remove(0, 6, FOREVER)
    memory.place([Chunk(0, 7, 1)])
    assert memory.remove(0, 7, FOREVER)
    assert memory.last_position(0) == 6


def test_a_state_that_was_saved_comes_back():
    memory = states(2, [(0, 0, 9)], [(1, 0, 4)])
    memory.restore(0, 5)
    assert [memory.last_position(seq) for seq in (0, 1)] == [5, 3]
    memory.restore(0, -1)
    assert [memory.last_position(seq) for seq in (0, 1)] == [-1, 3]


def test_the_last_tokens_of_a_sequence_are_never_cut_apart():
    assert split_keeping_tails([Chunk(0, 0, 10)], 8, 4, sequential=True) == [(Chunk(0, 0, 6),), (Chunk(0, 6, 4),)]
    assert split_keeping_tails([Chunk(0, 0, 12)], 8, 4, sequential=True) == [(Chunk(0, 0, 8),), (Chunk(0, 8, 4),)]
    step = [Chunk(0, 5, 6), Chunk(1, 0, 3)]
    assert split_keeping_tails(step, 8, 4, sequential=False) == [(Chunk(0, 5, 6),), (Chunk(1, 0, 3),)]
    assert split_keeping_tails(step, 8, 2, sequential=False) == [(Chunk(0, 5, 3), Chunk(1, 0, 3)), (Chunk(0, 8, 3),)]


@pytest.mark.parametrize("delta", [-3, 2])
def test_a_state_moves_with_its_token(delta):
    memory = states(2, [(0, 0, 9)])
    memory.shift(0, 2, 8, delta)
    assert memory.last_position(0) == 8
    memory.shift(0, 2, FOREVER, delta)
    assert memory.last_position(0) == 8 + delta
