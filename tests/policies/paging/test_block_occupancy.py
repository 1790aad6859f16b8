"""How far blocks are filled, against plain lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.block_occupancy import BlockOccupancy

SIZE = 4


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([1, 7, 300, 1500]), st.data())
def test_sum_and_top_are_those_of_a_list(n, data):
    fill, expected = BlockOccupancy(n, SIZE), [0] * n
    blocks = st.integers(0, n - 1)
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["raise_to", "fill", "empty", "set_to", "empty all above"]))
        if what == "raise_to":
            block, tokens = data.draw(blocks), data.draw(st.integers(1, SIZE))
            fill.raise_to(block, tokens)
            expected[block] = max(expected[block], tokens)
        elif what == "set_to":
            block, tokens = data.draw(blocks), data.draw(st.integers(0, SIZE))
            fill.set_to(block, tokens)
            expected[block] = tokens
        else:
            first = data.draw(blocks)
            chosen = (
                range(first, n) if what == "empty all above" else data.draw(st.lists(blocks, unique=True, max_size=9))
            )
            getattr(fill, what.split()[0])(chosen)
            for block in chosen:
                expected[block] = SIZE if what == "fill" else 0
        held = [block for block in range(n) if expected[block]]
        assert fill.stored == sum(expected)
        assert fill.top == (held[-1] * SIZE + expected[held[-1]] if held else 0)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_kept_is_begun_anew(kept):
    fill = BlockOccupancy(9, SIZE)
    fill.fill([2, 3])
    fill.kept = kept
    fill.empty([3])
    assert fill.stored == (SIZE if kept else 2 * SIZE)
    fill.begin_anew()
    assert (fill.stored, fill.top, fill.kept) == (0, 0, True)
