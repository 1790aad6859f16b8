"""Tiles of sequences, counted as cells come and go, against a count of all cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Chunk
from policies.cells.arena import Arena
from policies.cells.reads import TILE, tile_counts
from policies.cells.tile_counts import TileCounts

SIZE = 5 * TILE + 30


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("gol"), st.integers(0, SIZE - 1), st.integers(1, 150)), max_size=30))
@settings(max_examples=75, deadline=None)
def test_tiles_are_those_of_the_cells_that_came_and_went(events):
    counts, held = TileCounts(Arena(SIZE)), set()
    counts.of(0)
    for what, start, n in events:
        cells = np.array(sorted(set(range(start, min(start + n, SIZE))) - held), dtype=np.int64)
        if what == "l":
            cells = np.array(sorted(held)[start % 7 : start % 7 + n], dtype=np.int64)
            counts.lose(0, cells)
            held -= set(cells.tolist())
        elif what == "o":
            for cell in cells.tolist():
                counts.add_one(0, cell)
            held |= set(cells.tolist())
        else:
            whole = len(cells) and cells[-1] - cells[0] == len(cells) - 1
            counts.add(0, range(cells[0], cells[-1] + 1) if whole else cells)
            held |= set(cells.tolist())
        tiles, runs = tile_counts(np.array(sorted(held), dtype=np.int64))
        assert counts.counts(0) == (tiles, len(held), runs)


def test_a_sequence_is_counted_when_it_is_asked_for_first():
    arena = Arena(SIZE)
    counts = TileCounts(arena)
    arena.take(range(60, 70), [Chunk(3, 0, 10)])
    counts.add(3, range(60, 70))
    assert counts.counts(3) == (2, 10, 1)
    arena.take(range(200, 201), [Chunk(3, 10, 1)])
    counts.add_chunks([Chunk(3, 10, 1)], range(200, 201))
    assert counts.counts(3) == (3, 11, 2)
    reads = counts.reads([Chunk(3, 10, 1)])
    assert (reads.scanned.tolist(), reads.useful.tolist(), reads.runs.tolist()) == ([3 * TILE], [11], [2])
    counts.forget(3)
    assert counts.counts(3) == (3, 11, 2)
