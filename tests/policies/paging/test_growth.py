"""The arithmetic of growing block tables, against tables that grow token by token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.growth import (
    blocks_behind,
    blocks_for,
    blocks_in_sight,
    first_block_behind_step,
    most_blocks_in_window,
    next_block_step,
    steps_covered,
)

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=200)
SIZES = st.integers(1, 5)


def takes(length, n_blocks, size, steps):
    """The steps in which a sequence that gets a token in each needs a block more than it has."""
    found = []
    for step in range(steps):
        if length + step + 1 > n_blocks * size:
            found.append(step)
            n_blocks += 1
    return found


@DERANDOMIZED
@given(size=SIZES, length=st.integers(0, 30), spare=st.integers(0, 2))
def test_a_sequence_takes_its_next_block_and_then_one_every_size_steps(size, length, spare):
    n_blocks = blocks_for(length, size) + spare
    assert (n_blocks - spare) * size - length in range(size)
    first = next_block_step(length, n_blocks, size)
    assert takes(length, n_blocks, size, 40) == list(range(first, 40, size))


@DERANDOMIZED
@given(size=SIZES, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), free=st.integers(0, 12))
def test_blocks_cover_the_steps_up_to_the_first_that_lacks_one(size, lengths, free):
    n_blocks = [blocks_for(length, size) for length in lengths]
    firsts = sorted(next_block_step(length, n, size) for length, n in zip(lengths, n_blocks, strict=True))
    wanted = sorted(
        step for length, n in zip(lengths, n_blocks, strict=True) for step in takes(length, n, size, size * (free + 2))
    )
    assert steps_covered([(first, 1) for first in firsts], free, size) == wanted[free]
    groups = [(first, firsts.count(first)) for first in sorted(set(firsts))]
    assert steps_covered(groups, free, size) == wanted[free]


@DERANDOMIZED
@given(size=SIZES, window=st.integers(1, 12), position=st.integers(0, 40))
def test_blocks_behind_a_window_are_those_of_which_no_token_is_seen(size, window, position):
    """The token at a position sees itself and the ``window - 1`` tokens before it."""
    first_seen = max(position - window + 1, 0)
    behind = blocks_behind(position, window, size)
    assert behind * size <= first_seen < (behind + 1) * size


@DERANDOMIZED
@given(size=SIZES, window=st.integers(1, 12), length=st.integers(0, 20))
def test_the_first_block_is_left_behind_at_the_step_foreseen(size, window, length):
    step = first_block_behind_step(length, window, size)
    assert blocks_behind(length + step, window, size) == 1
    assert blocks_behind(length + step - 1, window, size) == 0
    assert blocks_behind(length + step + size, window, size) == 2


@DERANDOMIZED
@given(size=SIZES, window=st.integers(1, 12), n_ubatch=st.integers(1, 8), blocks=st.integers(0, 9))
def test_a_window_needs_and_holds_no_more_blocks_than_it_can_see(size, window, n_ubatch, blocks):
    in_sight = blocks_in_sight(window, size)
    assert blocks - blocks_behind(blocks * size, window, size) <= in_sight
    if blocks >= in_sight:
        assert blocks - blocks_behind(blocks * size, window, size) == in_sight
    for start in range(40):
        held = blocks_for(start + n_ubatch, size) - blocks_behind(start, window, size)
        assert held <= most_blocks_in_window(window, n_ubatch, size)
