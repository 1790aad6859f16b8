"""Searches for regions, beside models that look at every cell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.region_search import SEARCHES, region_search

ASKED = st.lists(st.one_of(st.integers(1, 60), st.integers(-40, -1)), max_size=60)
"""Cells of a region to take; or, negative, which of the regions to give back."""


def runs_of(free):
    """Starts and ends of the free extents."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def fitting(free, n, _):
    return [(start, end) for start, end in runs_of(free) if end - start >= n]


def by_first_fit(free, n, cursor):
    return min((start for start, _ in fitting(free, n, cursor)), default=None)


def by_best_fit(free, n, cursor):
    return min(fitting(free, n, cursor), key=lambda run: (run[1] - run[0], run[0]), default=(None, None))[0]


def by_worst_fit(free, n, cursor):
    return min(fitting(free, n, cursor), key=lambda run: (run[0] - run[1], run[0]), default=(None, None))[0]


def by_next_fit(free, n, cursor):
    return min(fitting(free, n, cursor), key=lambda run: (run[1] <= cursor, run[0]), default=(None, None))[0]


def by_buddy(free, n, _):
    """Split and joined one at a time: a block is free if its cells are, and those of its buddy are not all."""
    size = 1
    while size < n:
        size *= 2
    while size <= len(free):
        for start in range(0, len(free) - size + 1, size):
            buddy = free[start ^ size : (start ^ size) + size]
            if free[start : start + size].all() and not (len(buddy) == size and buddy.all()):
                return start
        size *= 2
    return None


MODELS = {
    "first-fit": by_first_fit,
    "best-fit": by_best_fit,
    "next-fit": by_next_fit,
    "worst-fit": by_worst_fit,
    "buddy": by_buddy,
}


def played(name, cells, asked):
    """Take and give back regions; yields the search, what is free, where the last region ends, what is asked next."""
    search, free, regions, cursor = region_search(name, cells), np.ones(cells, dtype=bool), [], 0
    for n in asked:
        if n < 0:
            if regions:
                start, size = regions.pop(n % len(regions))
                search.give_back(start, size)
                free[start : start + size] = True
            continue
        yield search, free, cursor, n
        start = search.find(n)
        if start is not None:
            size = search.size_of(n)
            assert free[start : start + size].all()
            search.take(start, size)
            free[start : start + size] = False
            regions.append((start, size))
            cursor = start + size
    assert list(search.free) == runs_of(free)
    for start, size in regions:
        search.give_back(start, size)
    assert list(search.free) == [(0, cells)]
    assert search.largest == search.most


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=30, deadline=None)
@given(cells=st.integers(8, 150), asked=ASKED)
def test_a_search_finds_what_a_look_at_every_cell_finds(name, cells, asked):
    for search, free, cursor, n in played(name, cells, asked):
        assert search.find(n) == MODELS[name](free, n, cursor)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=30, deadline=None)
@given(cells=st.integers(8, 150), asked=ASKED)
def test_the_largest_region_is_the_largest_that_is_found(name, cells, asked):
    for search, _, _, _ in played(name, cells, asked):
        assert search.largest == max((n for n in range(1, cells + 1) if search.find(n) is not None), default=0)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_region_is_a_little_larger_than_asked_for(name):
    search = region_search(name, 2**14)
    most = {"buddy": 2.0, "slab": 1.125}.get(name, 1.0)
    sizes = [search.size_of(n) for n in range(1, 5000)]
    assert all(n <= size <= most * n for n, size in enumerate(sizes, 1))
    assert [search.size_of(size) for size in sizes] == sizes == sorted(sizes)
    assert max(size / n for n, size in enumerate(sizes, 1)) >= 0.98 * most


def test_buddies_join_only_with_one_another():
    search = region_search("buddy", 64)
    for _ in range(8):
        search.take(search.find(8), 8)
    for start in (8, 16):  # side by side, but halves of different blocks
        search.give_back(start, 8)
    assert (search.free.largest, search.largest, search.find(16)) == (16, 8, None)
    search.give_back(0, 8)
    assert (search.largest, search.find(16)) == (16, 0)


def test_a_slab_keeps_its_cells_for_its_class_until_it_is_empty():
    search = region_search("slab", 128)
    taken = []
    for n in (10, 10, 20):
        taken.append((search.find(n), search.size_of(n)))
        search.take(*taken[-1])
    # Eight regions of 10 make a slab of 80 cells; of 20, only one more finds room.
    assert taken == [(0, 10), (10, 10), (80, 20)]
    assert (search.free.total, search.free.largest, search.largest) == (88, 60, 28)
    assert (search.find(9), search.find(10), search.find(30)) == (100, 20, None)
    search.give_back(0, 10)
    assert search.find(30) is None
    search.give_back(10, 10)
    assert (search.find(30), search.largest) == (0, 80)
