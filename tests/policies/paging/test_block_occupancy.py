"""Tokens in each block, against plain lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.block_table import BlockOccupancy

SIZE = 4


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.sampled_from([1, 7, 300, 1500]), st.data())
def test_sum_and_top_are_those_of_a_list(n, data):
    occupancy, expected = BlockOccupancy(n, SIZE), [0] * n
    blocks = st.integers(0, n - 1)
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["raise_to", "fill", "empty", "set_to", "empty all above"]))
        if what == "raise_to":
            block, tokens = data.draw(blocks), data.draw(st.integers(1, SIZE))
            occupancy.raise_to(block, tokens)
            expected[block] = max(expected[block], tokens)
        elif what == "set_to":
            block, tokens = data.draw(blocks), data.draw(st.integers(0, SIZE))
            occupancy.set_to(block, tokens)
            expected[block] = tokens
        else:
            first = data.draw(blocks)
            chosen = (
                list(range(first, n))
                if what == "empty all above"
                else data.draw(st.lists(blocks, unique=True, max_size=9))
            )
            getattr(occupancy, what.split()[0])(chosen)
            for block in chosen:
                expected[block] = SIZE if what == "fill" else 0
        held = [block for block in range(n) if expected[block]]
        assert occupancy.stored == sum(expected)
        assert occupancy.top == (held[-1] * SIZE + expected[held[-1]] if held else 0)


@pytest.mark.parametrize("up_to_date", [True, False])
def test_a_reset_empties_all_blocks(up_to_date):
    occupancy = BlockOccupancy(9, SIZE)
    occupancy.fill([2, 3])
    occupancy.up_to_date = up_to_date
    occupancy.empty([3])
    assert occupancy.stored == (SIZE if up_to_date else 2 * SIZE)
    occupancy.reset()
    assert (occupancy.stored, occupancy.top, occupancy.up_to_date) == (0, 0, True)


def test_tokens_that_are_added_one_by_one_raise_the_top():
    occupancy, seen = BlockOccupancy(9, SIZE), []
    for block in (5, 5, 7, 2):
        occupancy.add_tokens(block, 1)
        seen.append((occupancy.top, occupancy.stored))
    assert seen == [(21, 1), (22, 2), (29, 3), (29, 4)]
    occupancy.empty([7])
    assert occupancy.top == 22
