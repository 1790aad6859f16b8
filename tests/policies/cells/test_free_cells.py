"""Free cells against a plain array of cells, and searches against llama.cpp's loops."""

from copy import deepcopy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.free_cells import FreeCells
from policies.cells.search import cells_array, find_contiguous, find_scattered, start_of_search
from policies.vocabulary import Moves
from tests.policies.cells.test_free_extents import SIZE, extents_by_hand


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, SIZE - 1), max_size=40), st.booleans()), max_size=12),
)
def test_taking_and_releasing_cells(operations):
    free, used = FreeCells(SIZE), np.zeros(SIZE, dtype=bool)
    for take, cells, in_a_row in operations:
        chosen = np.array([c for c in sorted(cells) if used[c] != take], dtype=np.int64)
        if take and in_a_row and len(chosen):
            last = int(chosen[0])
            while last + 1 < SIZE and not used[last + 1]:
                last += 1
            chosen = np.arange(chosen[0], last + 1)
            free.take(int(chosen[0]), len(chosen))
        else:
            (free.take_cells if take else free.release)(chosen)
        used[chosen] = take
        assert list(free) == extents_by_hand(used)
        assert len(free) == len(list(free))
        assert free.total == SIZE - used.sum()
        assert free.largest == max((e - s for s, e in free), default=0)
        assert free.top == (np.flatnonzero(used)[-1] + 1 if used.any() else 0)
        assert free.last_cells(7).tolist() == np.flatnonzero(~used)[::-1][:7].tolist()
        assert all(free.count_below(cell) == (~used[:cell]).sum() for cell in range(SIZE + 1))


def test_a_copy_is_independent():
    free = FreeCells(10)
    free.take(3, 4)
    twin = deepcopy(free)
    twin.release(np.array([4]))
    assert list(free) == [(0, 3), (7, 10)]
    assert list(twin) == [(0, 3), (4, 5), (7, 10)]
    assert (twin.total, twin.first_run(1, 3)) == (7, 4)


def lengths_of_extents(free, n):
    """Of the free cells below n."""
    return [len(run) for run in "".join("x" if cell in free else " " for cell in range(n)).split()]


@settings(deadline=None, max_examples=200)
@given(n=st.integers(1, 300), mostly=st.booleans(), data=st.data())
def test_extents_of_more_than_a_hundred_cells_are_those_of_a_search(n, mostly, data):
    """``mostly``: most cells are free at first."""
    some = set(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20)))
    free = set(range(n)) - some if mostly else some
    kept = FreeCells.of(n, sorted(free))
    for _ in range(data.draw(st.integers(0, 20))):
        take = data.draw(st.booleans())
        those = sorted(free if take else set(range(n)) - free)
        if those:
            chosen = data.draw(st.lists(st.sampled_from(those), unique=True, max_size=20))
            (kept.take_each if take else kept.release_each)(chosen)
            free = free - set(chosen) if take else free | set(chosen)
        lengths = lengths_of_extents(free, n)
        assert (kept.total, kept.count) == (len(free), len(lengths))
        if data.draw(st.booleans()):
            assert kept.largest == max(lengths, default=0)
        at = data.draw(st.integers(0, n))
        following = [cell for cell in range(at, n) if cell in free]
        assert kept.first_cell(at) == (following[0] if following else n)
        assert kept.last_before(at) == max((cell for cell in free if cell < at), default=-1)
        assert kept.used_below(at) == max(set(range(at)) - free, default=-1)
        if at in free:
            end = next((cell for cell in range(at, n) if cell not in free), n)
            begin = next((cell for cell in range(at, -1, -1) if cell not in free), -1) + 1
            assert (kept.end_of_run(at), kept.start_of_run(at), kept.free_from(at)) == (end, begin, end - at)


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


@settings(max_examples=600)
@given(
    st.lists(st.booleans(), min_size=1, max_size=SIZE),
    st.integers(0, SIZE),
    st.integers(1, SIZE + 2),
)
def test_search_equals_search_by_cells(used, head, n):
    head = min(head, len(used) - 1)
    free = FreeCells(len(used))
    free.take_cells(np.flatnonzero(used))
    assert find_contiguous(free, start_of_search(head, sum(used), n), n) == find_cell_by_cell(used, head, n)


@given(
    st.lists(st.booleans(), min_size=1, max_size=SIZE),
    st.integers(0, SIZE),
    st.integers(1, SIZE + 2),
)
def test_scattered_search_takes_free_cells_round_from_the_head(used, head, n):
    size = len(used)
    free = FreeCells(size)
    free.take_cells(np.flatnonzero(used))
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
        free.take_cells(np.flatnonzero(used))
        found = find_contiguous(free, start_of_search(head, sum(used), n), n)
        assert found == find_cell_by_cell(used, head, n)
        failed += found[0] is None
    assert failed > 1000


@given(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=40), st.sampled_from([1, 1000]))
def test_moving_tokens_moves_the_free_cells(cells, times):
    """To the lowest free cell and back, once or so often that all moves are counted together."""
    free, target = FreeCells(SIZE), min(set(range(SIZE)) - cells)
    used = sorted(cells)
    free.take_cells(np.array(used))
    there = [(used[-1], target, 1), (target, used[-1], 1)] * (times // 2) + [(used[-1], target, 1)]
    free.move(Moves.from_runs(there))
    now = np.zeros(SIZE, dtype=bool)
    now[[*used[:-1], target]] = True
    assert list(free) == extents_by_hand(now)
    assert len(free) == len(list(free))
    assert free.total == SIZE - len(used)
    assert free.largest == max(e - s for s, e in free)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["next", "last", "run", "run", "run", "go on", "release", "largest", "extents", "top", "list"]
            ),
            st.integers(0, SIZE),
        ),
        max_size=30,
    ),
    st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 1),
    st.integers(1, 9),
)
def test_cells_taken_for_steps(operations, at_first, n):
    """They are those that a search finds, and everything that is kept up to date stays true."""
    free, used = FreeCells(SIZE), np.zeros(SIZE, dtype=bool)
    free.take_cells(np.array(sorted(at_first), dtype=np.int64))
    used[list(at_first)] = True
    behind = 0
    for what, at in operations:
        k = min(n, int(free.total))
        at = behind if what == "go on" else at
        following = [cell for cell in (*range(at, SIZE), *range(at)) if not used[cell]][:k]
        if what == "next" and k:
            assert free.take_next(at, k) == following
            used[following] = True
        elif what == "last" and k:
            expected = np.flatnonzero(~used)[::-1][:k].tolist()
            assert free.take_last(k) == expected
            used[expected] = True
        elif what in ("run", "go on") and k:
            consecutive = following == list(range(following[0], following[0] + k))
            assert free.take_run(at, k) == (following[0] if consecutive else -1)
            if consecutive:
                used[following] = True
                behind = following[-1] + 1
        elif what == "release":
            gone = np.flatnonzero(used)[at::n]
            free.release(gone)
            used[gone] = False
        elif what == "largest":
            assert free.largest == max((e - s for s, e in free), default=0)
        elif what == "extents":
            assert len(free) == len(list(free))
        elif what == "top":
            assert free.top == np.flatnonzero(used).max(initial=-1) + 1
        elif what == "list":
            assert list(free) == extents_by_hand(used)
        assert free.total == SIZE - used.sum()
    assert list(free) == extents_by_hand(used)
