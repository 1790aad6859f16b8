"""Free extents against a plain array of cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cells.free_extents import FreeExtents

SIZE = 60


def extents_by_hand(used):
    extents, start = [], None
    for i, taken in enumerate([*used, True]):
        if not taken and start is None:
            start = i
        if taken and start is not None:
            extents.append((start, i))
            start = None
    return extents


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, SIZE - 1), max_size=40)), max_size=12))
def test_taking_and_releasing_cells(operations):
    free, used = FreeExtents(SIZE), np.zeros(SIZE, dtype=bool)
    for take, cells in operations:
        chosen = np.array([c for c in sorted(cells) if used[c] != take], dtype=np.int64)
        for cell in chosen.tolist():
            (free.take if take else free.give_back)(cell, 1)
        used[chosen] = take
        assert list(free) == extents_by_hand(used)
        assert free.total == SIZE - used.sum()
        assert free.largest == max((e - s for s, e in free), default=0)


def test_arrays_given_out_do_not_prevent_changes():
    """A sampling profiler, in a dask worker, say, keeps frames and thus their arrays."""
    free = FreeExtents(100)
    kept = [free.arrays()]
    for cell in range(0, 100, 2):
        free.take(cell, 1)
        kept.append(free.arrays())
    assert len(free) == 50
    assert [len(starts) for starts, _ in kept[:3]] == [1, 1, 2]
