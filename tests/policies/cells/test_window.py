"""Cells that a window has passed: the quick search against one over all cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Chunk
from policies.cells.arena import Arena
from policies.cells.search import cells_array
from policies.cells.window import WindowCells, find_usable

SIZE, WINDOW = 40, 6


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
@settings(max_examples=75, deadline=None)
def test_the_first_usable_cells_are_found_once_round(events):
    """Sequences get up to nine tokens, or are dropped."""
    arena = Arena(SIZE)
    window = WindowCells(arena, None, WINDOW)
    ends = dict.fromkeys(range(4), 0)
    for seq, n in events:
        if n == 0:
            window.clear(arena.cells_of(seq)[0].tolist())
            arena.empty(seq)
            ends[seq] = 0
            continue
        assert window.look()
        found, expected = window.find(arena.head, n), find_usable(arena, WINDOW, arena.head, n)
        assert (found is None) == (expected is None)
        if found is None:
            continue
        assert cells_array(found).tolist() == cells_array(expected).tolist()
        window.take(found)
        assert not arena.free.mask[cells_array(found)].any()
        chunk = Chunk(seq, ends[seq], n)
        arena.write(cells_array(found), [chunk])
        window.note_chunks([chunk], found)
        arena.head, ends[seq] = int(found[-1]) + 1, ends[seq] + n
        for other, end in ends.items():
            positions = arena.cells_of(other)[1]
            assert positions.tolist() == list(range(end - len(positions), end))
            assert len(positions) >= min(end, WINDOW - 1)
        assert (arena.owner > 0).sum() == arena.used


def test_where_a_cell_is_shared_cells_are_searched_one_by_one():
    arena = Arena(SIZE)
    window = WindowCells(arena, None, WINDOW)
    arena.take(range(30), [Chunk(0, 0, 30)])
    arena.share(0, 1, 0, 3)
    assert not window.look()
    found = window.find(0, 5)
    assert cells_array(found).tolist() == [3, 4, 5, 6, 7]
    window.take(found)
    assert arena.cells_of(0)[1].tolist() == list(range(8, 30))
    assert arena.cells_of(1)[1].tolist() == [0, 1, 2]
    assert np.flatnonzero(arena.free.mask).tolist() == list(range(30, 40))
