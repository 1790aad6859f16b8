"""Free runs against a plain array of cells."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.arena import Arena
from policies.contiguous import find_run
from policies.free_runs import FreeRuns

SIZE = 60


def runs_by_hand(used):
    runs, start = [], None
    for i, taken in enumerate([*used, True]):
        if not taken and start is None:
            start = i
        if taken and start is not None:
            runs.append((start, i))
            start = None
    return runs


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, SIZE - 1), max_size=40)), max_size=12))
def test_taking_and_releasing_cells(operations):
    free, used = FreeRuns(SIZE), np.zeros(SIZE, dtype=bool)
    for take, cells in operations:
        chosen = np.array([c for c in sorted(cells) if used[c] != take], dtype=np.int64)
        (free.take_cells if take else free.release)(chosen)
        used[chosen] = take
        assert list(free) == runs_by_hand(used)
        assert free.total == SIZE - used.sum()
        assert free.largest == max((e - s for s, e in free), default=0)
        assert free.top == (np.flatnonzero(used)[-1] + 1 if used.any() else 0)


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
def test_search_by_runs_equals_search_by_cells(used, head, n):
    head = min(head, len(used) - 1)
    arena = Arena(len(used))
    arena.free.take_cells(np.flatnonzero(used))
    arena.head = head
    assert (find_run(arena, n), arena.head) == find_cell_by_cell(used, head, n)
