"""Free cells against a plain array of cells, and searches against llama.cpp's loops."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.free_cells import FreeCells
from policies.cells.search import cells_array, find_contiguous, find_scattered, last_cells, start_of_search
from tests.policies.cells.test_free_extents import SIZE, extents_by_hand

TAKING = ("take_each", "take", "take_next", "take_last", "take_run", "take_run")
GIVING_BACK = ("release_each", "release_run")
READING = ("extents", "largest", "ends", "beside", "copy")
OPERATIONS = st.tuples(
    st.sampled_from([*TAKING, *GIVING_BACK, *READING]), st.integers(0, 299) | st.none(), st.integers(1, 20)
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.sampled_from([1, 9, 60, 300]), st.lists(OPERATIONS, max_size=30), st.booleans())
def test_cells_are_free_that_were_not_taken(size, operations, full):
    """Some numbers are only counted when they are asked for: they are read now and then, and all of them at the end."""
    kept, used, behind = FreeCells.of(size, [] if full else range(size)), np.full(size, full), 0
    for what, at, n in operations:
        at = behind if at is None else at % size  # None: go on behind the cells that were taken last.
        if what in TAKING and not used.all():
            taken = taken_by(what, kept, used, at, n)
            used[taken] = True
            behind = taken[-1] + 1 if taken else 0
        elif what in GIVING_BACK and used.any():
            used[given_back(what, kept, used, at, n)] = False
        elif what in READING:
            read(what, kept, used, at)
        assert kept.total == size - used.sum()
    for what in READING:
        read(what, kept, used, behind)


def taken_by(what, kept, used, at, n):
    """The cells that were taken, in that order."""
    free = np.flatnonzero(~used)
    following = np.concatenate((free[free >= at], free[free < at]))[:n].tolist()
    if what == "take_next":
        assert kept.take_next(at, len(following)) == following
        return following
    if what == "take_last":
        assert last_cells(kept, n).tolist() == free[::-1][:n].tolist()
        assert kept.take_last(len(following)) == free[::-1][:n].tolist()
        return free[::-1][:n].tolist()
    if what == "take_run":
        in_a_row = following == list(range(following[0], following[0] + len(following)))
        assert kept.take_run(at, len(following)) == (following[0] if in_a_row else -1)
        return following if in_a_row else []
    if what == "take":
        run = range(following[0], next(end for _, end in extents_by_hand(used) if end > following[0]))
        kept.take(run.start, len(run))
        return list(run)
    chosen = free[at % len(free) :: n][::-1]
    kept.take_each(chosen.tolist())
    return chosen.tolist()


def given_back(what, kept, used, at, n):
    """The cells that were given back."""
    held = np.flatnonzero(used)
    chosen = held[at % len(held) :: n]
    if what == "release_run":
        start, end = extents_by_hand(~used)[0]
        kept.release_run(start, end - start)
        return range(start, end)
    kept.release_each(chosen[::-1].tolist())
    return chosen


def read(what, kept, used, at):
    """Compare what there is with a look at every cell."""
    extents, size = extents_by_hand(used), len(used)
    if what == "extents":
        assert list(kept) == extents
        assert len(kept) == len(extents)
    elif what == "largest":
        assert kept.largest == max((end - start for start, end in extents), default=0)
    elif what == "ends":
        assert kept.top == np.flatnonzero(used).max(initial=-1) + 1
        assert (kept.mask == ~used).all()
    elif what == "beside":
        assert kept.first_cell(at) == next((cell for cell in range(at, size) if not used[cell]), size)
        assert kept.last_before(at) == np.flatnonzero(~used[:at]).max(initial=-1)
        assert kept.used_below(at) == np.flatnonzero(used[:at]).max(initial=-1)
        for start, end in extents:
            if start <= at < end:
                assert (kept.end_of_run(at), kept.start_of_run(at), kept.free_from(at)) == (end, start, end - at)
    else:
        twin = deepcopy(kept)
        twin.release_each(np.flatnonzero(used).tolist())
        assert list(twin) == [(0, size)]
        assert list(kept) == extents


def find_cell_by_cell(used, head, n):
    """llama.cpp b4875's loop, one cell at a time: where it finds a slot, and where the head is left."""
    size = len(used)
    if head > sum(used) + 2 * n:
        head = 0
    if n > size:
        return None, head
    tested = 0
    while True:
        if head + n > size:
            tested += size - head
            head = 0
            continue
        for i in range(n):
            if used[head + i]:
                head += i + 1
                tested += i + 1
                break
        else:
            return head, head
        if tested >= size:
            return None, head


@given(
    st.lists(st.booleans(), min_size=1, max_size=SIZE),
    st.integers(0, SIZE),
    st.integers(1, SIZE + 2),
)
def test_scattered_search_takes_free_cells_round_from_the_head(used, head, n):
    size = len(used)
    free = FreeCells(size)
    free.take_each(np.flatnonzero(used).tolist())
    order = [(head + i) % size for i in range(size)] if head < size else list(range(size))
    expected = [cell for cell in order if not used[cell]][:n]
    found = find_scattered(free, head, n)
    assert (found is None) if len(expected) < n else (cells_array(found).tolist() == expected)


def test_searches_that_fail_leave_the_head_where_the_original_does():
    """Full enough that most searches fail: drawn at random, since shrinking seeks the empty cases."""
    rng = np.random.default_rng(4)
    failed = 0
    for _ in range(3000):
        used = (rng.random(rng.integers(2, 64)) < rng.choice([0.3, 0.6, 0.9])).tolist()
        head, n = int(rng.integers(len(used))), int(rng.integers(1, len(used) + 1))
        free = FreeCells(len(used))
        free.take_each(np.flatnonzero(used).tolist())
        found = find_contiguous(free, start_of_search(head, sum(used), n), n)
        assert found == find_cell_by_cell(used, head, n)
        failed += found[0] is None
    assert failed > 1000
