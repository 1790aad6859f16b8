"""Free extents kept as blocks come and go, against a search over all blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.paging.block_extents import BlockExtents


def extents(free, n):
    """The lengths of the free extents."""
    return [len(run) for run in "".join("x" if block in free else " " for block in range(n)).split()]


@settings(deadline=None, max_examples=200)
@given(n=st.integers(1, 300), mostly=st.booleans(), data=st.data())
def test_number_and_largest_are_those_of_a_search(n, mostly, data):
    """``mostly``: most blocks are free at first, so that there are extents of more than a hundred."""
    some = set(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20)))
    free = set(range(n)) - some if mostly else some
    kept = BlockExtents(n, sorted(free))
    for _ in range(data.draw(st.integers(0, 20))):
        take = data.draw(st.booleans())
        those = sorted(free if take else set(range(n)) - free)
        if those:
            chosen = data.draw(st.lists(st.sampled_from(those), unique=True, max_size=20))
            if take:
                kept.take(chosen)
                free -= set(chosen)
            else:
                kept.give_back(chosen)
                free |= set(chosen)
        lengths = extents(free, n)
        assert (kept.n_free, kept.count) == (len(free), len(lengths))
        if data.draw(st.booleans()):
            assert kept.largest == max(lengths, default=0)
        block = data.draw(st.integers(0, n))
        assert kept.used_below(block) == max(set(range(block)) - free, default=0)
