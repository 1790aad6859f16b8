"""The arithmetic of block tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.block_table import (
    blocks_behind,
    blocks_for,
    blocks_in_sight,
    most_blocks_in_window,
)

DERANDOMIZED = settings(derandomize=True, deadline=None, max_examples=100)
SIZES = st.integers(1, 5)


@pytest.mark.slow
@DERANDOMIZED
@given(size=SIZES, window=st.integers(1, 12), position=st.integers(0, 40))
def test_blocks_behind_a_window_are_those_of_which_no_token_is_seen(size, window, position):
    """The token at a position sees itself and the ``window - 1`` tokens before it."""
    first_seen = max(position - window + 1, 0)
    behind = blocks_behind(position, window, size)
    assert behind * size <= first_seen < (behind + 1) * size


@pytest.mark.slow
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
