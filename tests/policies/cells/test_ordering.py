"""Runs in an order that overwrites nothing still needed, against moving all of them at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cells.ordering import in_safe_order, new_cells
from policies.vocabulary import Moves


def changing_places(lengths, order):
    """Runs that put segments of these lengths, one behind another, into another order; segments that stay are none."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    runs, at = [], 0
    for i in order:
        if at != starts[i]:
            runs.append((int(starts[i]), at, lengths[i]))
        at += lengths[i]
    return Moves.from_runs(runs)


def at_once(runs, size):
    """Which cell's token each cell has when all runs have read before any has written."""
    cells = np.arange(size)
    for src, dst, n in zip(runs.src, runs.dst, runs.length, strict=True):
        cells[dst : dst + n] = np.arange(src, src + n)
    return cells


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8) | st.lists(st.integers(1, 2), min_size=18, max_size=24),
    st.randoms(use_true_random=False),
    st.integers(0, 12),
)
def test_segments_change_places_however_little_room_there_is(lengths, random, room):
    """Where a cycle is longer than the room, only what fits is set aside at a time."""
    runs = changing_places(lengths, random.sample(range(len(lengths)), len(lengths)))
    packed = sum(lengths)
    found = in_safe_order(runs, packed, packed + room)
    cells = np.arange(packed + room)
    found.apply(cells)
    if not room and not found.n_runs:
        return
    assert (cells[:packed] == at_once(runs, packed)).all()
    assert ((found.src < packed + room) & (found.dst + found.length <= packed + room)).all()
    held = np.arange(packed + room) < packed
    assert (new_cells(found, held)[cells[:packed]] == np.arange(packed)).all()


@pytest.mark.parametrize(("room", "aside"), [(1, 1), (2, 2), (3, 3), (7, 3)])
def test_of_two_runs_that_change_places_the_shorter_is_set_aside_or_as_much_of_it_as_fits(room, aside):
    runs = changing_places([8, 3], [1, 0])
    found = in_safe_order(runs, 11, 11 + room)
    assert found.length[found.dst >= 11].max() == aside
    assert (found.src[found.dst >= 11] >= 8).all()


def test_a_full_cache_in_cycles_is_left_as_it_is():
    assert in_safe_order(changing_places([8, 3], [1, 0]), 11, 11).n_runs == 0


@pytest.mark.parametrize("room", [100, 1000])
def test_long_runs_stay_whole_where_there_is_room_for_the_short_ones(room):
    """Five prompts, and behind them their answers token by token in turn; each answer is to follow its prompt."""
    prompts, answer = 1000, 20
    runs = []
    for i in range(5):
        start = i * (prompts + answer)
        runs += [(i * prompts, start, prompts)] if i else []
        runs += [(5 * prompts + 5 * at + i, start + prompts + at, 1) for at in range(answer)]
    packed = 5 * (prompts + answer)
    found = in_safe_order(Moves.from_runs(sorted(runs, key=lambda run: run[1])), packed, packed + room)
    assert found.n_runs < 250
    assert found.n_cells < 1.05 * packed


@pytest.mark.parametrize("holes", [5, 40])
def test_tokens_that_fill_holes_are_followed_however_many_runs_there_are(holes):
    """Cells ``3 i`` and ``3 i + 1`` are filled by those behind the last of them; cells ``3 i + 2`` stay."""
    first = 3 * holes + 4
    plan = Moves.from_runs([(first + 3 * i, 3 * i, 2) for i in range(holes)])
    used = np.arange(6 * holes + 8) < 3 * holes
    goes = new_cells(plan, used)
    for i in range(holes):
        assert goes[first + 3 * i : first + 3 * i + 2].tolist() == [3 * i, 3 * i + 1]
        assert goes[3 * i + 2] == 3 * i + 2
