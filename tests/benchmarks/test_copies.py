"""All copy kernels move cells correctly."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.copies import COPY_KERNELS
from policies import Moves
from policies.cells.arena import Arena
from policies.compaction.compactors import pack
from policies.layouts.llamacpp import limited_fill_holes


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    owners=st.lists(st.integers(-1, 3), min_size=2, max_size=60),
    compactor=st.sampled_from([pack, limited_fill_holes(8192, 4)]),
    piece=st.sampled_from([1, 20, 1 << 18]),
)
def test_all_copy_kernels_give_the_same_cells(owners, compactor, piece):
    arena = Arena(len(owners))
    for cell, seq in enumerate(owners):
        if seq >= 0:
            arena.free.take_each([cell])
            arena.put(np.array([cell]), (seq,), owners[:cell].count(seq))
    moves = compactor(arena)
    if moves.n_runs == 0:
        return
    by_hand = list(range(len(owners)))
    for src, dst, n in zip(moves.src.tolist(), moves.dst.tolist(), moves.length.tolist(), strict=True):
        by_hand[dst : dst + n] = by_hand[src : src + n]
    before = np.random.default_rng(1).integers(0, 1000, (3, len(owners), 4)).astype(np.float16)
    for carry_out in COPY_KERNELS.values():
        arrays = [before.copy(), before[:1, :, :2].copy()]
        with patch("benchmarks.copies._PIECE", piece):
            carry_out(arrays, moves)
        assert (arrays[0] == before[:, by_hand]).all()
        assert (arrays[1] == before[:1, by_hand, :2]).all()


@pytest.mark.parametrize("carry_out", COPY_KERNELS.values(), ids=COPY_KERNELS)
def test_a_run_may_overlap_itself_and_a_later_one_may_read_what_an_earlier_one_wrote(carry_out):
    array = np.arange(10)[None, :, None] * np.ones((2, 1, 3), dtype=np.int64)
    carry_out([array], Moves.from_runs([(2, 0, 5), (0, 7, 2), (7, 9, 1)]))
    assert array[0, :, 0].tolist() == [2, 3, 4, 5, 6, 5, 6, 2, 3, 2]


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    runs=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=8),
    kind=st.sampled_from(["f4", "f2", "i1"]),
    piece=st.sampled_from([1, 40, 1 << 18]),
)
def test_random_runs_in_sequence(runs, kind, piece):
    """Up, down and with overlaps, compared with plain list assignments."""
    cells = list(range(32))
    for source, target, n in runs:
        cells[target : target + n] = cells[source : source + n]
    before = np.random.default_rng(2).integers(0, 100, (3, 32, 2, 5)).astype(kind)
    for carry_out in COPY_KERNELS.values():
        array = before.copy()
        with patch("benchmarks.copies._PIECE", piece):
            carry_out([array], Moves.from_runs(runs))
        assert (array == before[:, cells]).all()


def test_arrays_that_cannot_be_moved_in_place_are_refused():
    """Otherwise a copy would be moved instead of the cells."""
    array = np.zeros((2, 8, 3, 4)).transpose(0, 1, 3, 2)
    for carry_out in COPY_KERNELS.values():
        with pytest.raises(ValueError, match="copy"):
            carry_out([array], Moves.from_runs([(4, 0, 2)]))
