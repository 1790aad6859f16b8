"""Means over time of how full the cache was, against sums by hand and against the whole table."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.simulation.cache_states import CacheStates
from kvsim.simulation.run_tables import STATES
from policies import Usage
from policies.placement.rule import PlacementRule

CAPACITY = 64
EMPTY = Usage(CAPACITY, 0, 0, CAPACITY, 1, CAPACITY, 0)


def usage(stored, allocated, placeable=None, extents=1, largest=None, span=None):
    """A state of 64 cells; unless stated, one sequence could take all that is free, and nothing lies apart."""
    free = CAPACITY - allocated
    placeable = free if placeable is None else placeable
    return Usage(
        CAPACITY, stored, allocated, placeable, extents, placeable if largest is None else largest, span or stored
    )


def states_of(*rows, begin=None, keeps=False):
    """States from some times on; ``begin``: after how many of them means begin, and when."""
    states = CacheStates(keeps=keeps)
    for i, (at_s, state) in enumerate(rows):
        if begin is not None and begin[0] == i:
            states.begin(begin[1])
        states.hold(at_s, state)
    return states


def test_a_mean_over_time_spelled_out():
    """Half a second and one and a half; sums are exact, as all numbers are sums of a few powers of two."""
    found = states_of(
        (1.0, usage(16, 32, placeable=8, extents=4, largest=8, span=48)),
        (1.5, usage(32, 32, placeable=32, extents=2, largest=16, span=40)),
        (3.0, usage(64, 64)),
    ).means()
    assert found == {
        "utilization_mean": (0.5 * 0.25 + 1.5 * 0.5) / 2,
        "external_fragmentation_mean": (0.5 * 0.75 + 1.5 * 0.0) / 2,
        "internal_fragmentation_mean": (0.5 * 0.5 + 1.5 * 0.0) / 2,
        "stored_cells_mean": (0.5 * 16 + 1.5 * 32) / 2,
        "allocated_cells_mean": 32.0,
        "span_cells_mean": (0.5 * 48 + 1.5 * 40) / 2,
        "free_extents_mean": (0.5 * 4 + 1.5 * 2) / 2,
        "largest_free_extent_mean": (0.5 * 8 + 1.5 * 16) / 2,
    }


def test_shares_are_those_of_a_usage():
    state = usage(16, 32, placeable=8)
    means = states_of((0.0, state), (1.0, EMPTY)).means()
    for share in ("utilization", "external_fragmentation", "internal_fragmentation"):
        assert 0 < means[f"{share}_mean"] == getattr(state, share)


def test_an_empty_cache_and_a_full_one_have_no_fragmentation():
    for state in (EMPTY, usage(64, 64)):
        means = states_of((0.0, state), (1.0, EMPTY)).means()
        assert means["external_fragmentation_mean"] == means["internal_fragmentation_mean"] == 0


def stored(states):
    return states.means()["stored_cells_mean"]


def test_the_last_state_has_no_weight():
    assert stored(states_of((0.0, usage(8, 8)), (2.0, usage(64, 64)))) == 8.0
    assert stored(states_of((0.0, usage(8, 8)), (2.0, usage(64, 64)), (4.0, EMPTY))) == 36.0


def test_a_state_that_another_one_follows_at_once_has_no_weight():
    assert stored(states_of((0.0, usage(8, 8)), (2.0, usage(64, 64)), (2.0, usage(16, 16)), (4.0, EMPTY))) == 12.0


def test_without_time_there_are_no_means():
    none = dict.fromkeys(states_of((0.0, EMPTY), (1.0, EMPTY)).means())
    assert states_of().means() == none
    assert states_of((3.0, EMPTY)).means() == none
    assert states_of((3.0, EMPTY), (3.0, usage(8, 8))).means() == none


def test_before_the_beginning_nothing_counts():
    """The state that holds then counts from there on."""
    rows = (0.0, usage(8, 8)), (4.0, usage(32, 32)), (7.0, EMPTY)
    assert stored(states_of(*rows)) == (4 * 8 + 3 * 32) / 7
    assert stored(states_of(*rows, begin=(1, 3.0))) == (1 * 8 + 3 * 32) / 4
    assert stored(states_of(*rows, begin=(1, 4.0))) == 32.0


def test_a_beginning_before_everything_changes_nothing():
    rows = (2.0, usage(8, 8)), (4.0, usage(32, 32)), (5.0, EMPTY)
    assert states_of(*rows, begin=(0, 1.0)).means() == states_of(*rows).means()


class Looked(PlacementRule):
    """A rule without rows, in a cache that is in some state."""

    def __init__(self, state):
        super().__init__(1, 1)
        self._state = state
        self.look()

    def _row_for(self, seq):
        return None

    def take_step(self):
        return False

    def place(self, chunks):
        return []

    def look(self):
        self._note_usage(self._state)


def test_what_a_rule_has_looked_at_is_held_as_a_usage_would_be():
    first, second = usage(16, 32, placeable=24, extents=4, largest=8, span=48), usage(33, 34, extents=3)
    told, looked = CacheStates(keeps=True), CacheStates(keeps=True)
    for states in (told, looked):
        states.hold(0.0, EMPTY)
    for at_s, state in ((0.1, first), (0.7, second), (0.8, first)):
        told.hold(at_s, state)
        looked.hold_state(at_s, Looked(state))
    assert looked.means() == told.means()
    assert looked.kept().table().to_csv() == told.kept().table().to_csv()
    assert looked.kept().means_between(0.2, 0.75) == told.kept().means_between(0.2, 0.75)


# States that are kept

ROWS = (0.0, usage(8, 8)), (2.0, usage(32, 32)), (2.0, usage(16, 16)), (6.0, usage(64, 64))


@pytest.mark.parametrize(
    ("start_s", "end_s", "mean"),
    [
        (0.0, 6.0, (2 * 8 + 4 * 16) / 6),
        (1.0, 4.0, (1 * 8 + 2 * 16) / 3),
        (0.5, 1.5, 8.0),
        (2.0, 6.0, 16.0),
        (4.0, 8.0, (2 * 16 + 2 * 64) / 4),  # The last state holds on.
        (7.0, 9.0, 64.0),
        (-2.0, 2.0, 8.0),  # Before the first there is none, and no time.
    ],
)
def test_means_between_two_times_spelled_out(start_s, end_s, mean):
    found = states_of(*ROWS, keeps=True).kept().means_between(start_s, end_s)
    assert [*found] == [*STATES]
    assert found["stored"] == found["allocated"] == mean
    assert found["utilization"] == mean / CAPACITY


@pytest.mark.parametrize(("start_s", "end_s"), [(3.0, 3.0), (4.0, 3.0), (-3.0, -1.0)])
def test_where_no_time_passes_there_are_no_means(start_s, end_s):
    assert states_of(*ROWS, keeps=True).kept().means_between(start_s, end_s) is None


def test_the_beginning_does_not_matter_between_two_times():
    begun, plain = (states_of(*ROWS, begin=begin, keeps=True) for begin in ((1, 1.0), None))
    assert begun.means() != plain.means()
    assert begun.kept().means_between(0.0, 6.0) == plain.kept().means_between(0.0, 6.0)


def test_the_table_has_a_row_for_each_state_that_lasted():
    table = states_of(*ROWS, keeps=True).kept().table().frame
    assert table["time_s"].tolist() == [0.0, 2.0, 6.0]
    assert table["stored"].tolist() == [8, 16, 64]
    assert table["free"].tolist() == [56, 48, 0]
    assert table["utilization"].tolist() == [0.125, 0.25, 1.0]
    assert table["stored"].dtype.kind == table["free_extents"].dtype.kind == "i"


def test_nothing_is_kept_unless_asked_for():
    states = CacheStates(keeps=False)
    states.hold(0.0, EMPTY)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(2000):
            states.hold(float(i), EMPTY)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000
    with pytest.raises(AssertionError, match="states are kept"):
        states.kept().means_between(0.0, 1.0)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 99),
    n=st.integers(1, 9000) | st.integers(1, 6),
    gap=st.sampled_from([0.0, 1e-6, 1.0]),
    looks=st.lists(st.integers(0, 9000) | st.integers(0, 6), max_size=4),
)
def test_means_over_time_are_those_of_the_whole_table(seed, n, gap, looks):
    """However often they are asked for meanwhile."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.integers(0, 3, n) * gap)
    allocated = rng.integers(0, CAPACITY + 1, n)
    cells = rng.integers(0, allocated + 1)
    states = CacheStates(keeps=True)
    for i in range(n):
        states.hold(float(starts[i]), usage(int(cells[i]), int(allocated[i])))
        if i in looks:
            states.means()
            states.kept().table()
    means, lasted = states.means(), np.diff(starts)
    if lasted.sum() == 0:
        assert set(means.values()) == {None}
        return
    assert means["stored_cells_mean"] == pytest.approx(np.average(cells[:-1], weights=lasted), rel=1e-12)
    assert means["allocated_cells_mean"] == pytest.approx(np.average(allocated[:-1], weights=lasted), rel=1e-12)
    table = states.kept().table().frame
    weights = np.diff(table["time_s"])
    for share in ("utilization", "internal_fragmentation"):
        assert means[f"{share}_mean"] == pytest.approx(np.average(table[share][:-1], weights=weights), rel=1e-12)
    between = states.kept().means_between(float(starts[0]), float(starts[-1]))
    assert between["stored"] == pytest.approx(means["stored_cells_mean"], rel=1e-12)
