"""Free extents kept as blocks come and go, against a search over all blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging import block_extents
from policies.paging.block_extents import BlockExtents


def extents(free, n):
    """The lengths of the free extents."""
    return [len(run) for run in "".join("x" if block in free else " " for block in range(n)).split()]


@pytest.mark.parametrize("renewal", [0.0, 0.3, 1e9])
@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, 60), data=st.data())
def test_number_and_largest_are_those_of_a_search(renewal, n, data):
    """``renewal``: how soon lengths that are kept are dropped."""
    free = set(data.draw(st.lists(st.integers(0, n - 1), unique=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_extents, "_RENEWAL", renewal)
        kept = BlockExtents(n, sorted(free))
        for _ in range(data.draw(st.integers(0, 20))):
            take = data.draw(st.booleans())
            those = sorted(free if take else set(range(n)) - free)
            if those:
                chosen = data.draw(st.lists(st.sampled_from(those), unique=True))
                if take:
                    kept.take(chosen[1:])
                    for block in chosen[:1]:
                        kept.take_one(block)
                    free -= set(chosen)
                else:
                    kept.give_back(chosen)
                    free |= set(chosen)
            lengths = extents(free, n)
            assert (kept.n_free, kept.count) == (len(free), len(lengths))
            if data.draw(st.booleans()):
                assert kept.largest == max(lengths, default=0)
