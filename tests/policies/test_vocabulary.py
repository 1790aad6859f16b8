"""The words between the rooms: how fragmentation is computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.vocabulary import Usage, external_fragmentation, internal_fragmentation

COUNTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=30)


@pytest.mark.slow
@pytest.mark.parametrize("share", [external_fragmentation, internal_fragmentation])
@given(COUNTS)
def test_fragmentation_of_counts_and_of_arrays_is_the_same_bit_for_bit(share, counts):
    expected = [1.0 - part / whole if whole > 0 else 0.0 for part, whole in counts]
    assert [share(part, whole) for part, whole in counts] == expected
    parts, wholes = np.array(counts).T
    assert share(parts, wholes).tolist() == expected


def test_a_full_cache_is_not_fragmented_and_an_empty_one_wastes_nothing():
    full = Usage(64, 64, 64, 0, 0, 0, 64)
    empty = Usage(64, 0, 0, 64, 1, 64, 0)
    assert full.external_fragmentation == empty.external_fragmentation == 0.0
    assert full.internal_fragmentation == empty.internal_fragmentation == 0.0


def test_fragmentation_by_hand():
    """Of 64 cells 40 are allocated and 30 hold a token; of the 24 free ones a sequence can have 6."""
    usage = Usage(64, 30, 40, 6, 4, 6, 50)
    assert usage.external_fragmentation == 0.75
    assert usage.internal_fragmentation == 0.25
