"""Figures of streams that are not kept, against the same figures of all values."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.simulation.distribution import ACCURACY, EXACT, HIGHEST, LOWEST, Distribution, TimeMean

QS = [0.0, 0.001, 0.25, 0.5, 0.9, 0.95, 0.99, 0.9999, 1.0]
SAMPLES = {
    "exponential": lambda rng, n: rng.exponential(0.3, n),
    "lognormal, wide": lambda rng, n: np.clip(rng.lognormal(0.0, 6.0, n), LOWEST, HIGHEST),
    "mostly 0": lambda rng, n: np.where(rng.random(n) < 0.7, 0.0, rng.random(n)),
    "one value": lambda rng, n: np.full(n, 0.1),
    "two values far apart": lambda rng, n: np.where(rng.random(n) < 0.5, 1e-8, 1e8),
    "few": lambda rng, n: rng.integers(0, 5, n) * 0.25,
}


def fed(values, cuts=(), exact=EXACT):
    """The values, split at the cuts; every other piece one by one."""
    distribution = Distribution(exact)
    for k, part in enumerate(np.split(np.asarray(values, dtype=float), sorted(cuts))):
        if k % 2:
            distribution.extend(part)
        else:
            for value in part.tolist():
                distribution.add(value)
    return distribution


@pytest.mark.parametrize("draw", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("n", [1, 2, 100, 4096, 4097, 50_000])
def test_few_values_are_exact(draw, n):
    values = draw(np.random.default_rng(n), n)
    distribution = fed(values, [n // 3, n // 2])
    assert distribution.exact
    assert len(distribution) == n
    assert distribution.quantiles(QS) == np.quantile(values, QS).tolist()
    assert distribution.mean == pytest.approx(values.mean(), rel=1e-12)


@pytest.mark.parametrize("draw", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("n", [101, 4096, 5000, 200_000])
def test_many_values_are_within_the_stated_error(draw, n):
    values = draw(np.random.default_rng(n), n)
    distribution = fed(values, [n // 3, n // 2], exact=100)
    assert not distribution.exact
    truth, ours = np.quantile(values, QS), np.array(distribution.quantiles(QS))
    # A little more than stated: where a bin ends is itself rounded.
    assert (np.abs(ours - truth) <= truth * ACCURACY * (1 + 1e-9)).all()
    assert (ours[0], ours[-1]) == (values.min(), values.max())
    assert distribution.mean == pytest.approx(values.mean(), rel=1e-12)


def test_the_stated_error_is_no_larger_than_it_must_be():
    """The control: the bins are as wide as they say, so that a smaller error is not reached."""
    values = np.exp(np.random.default_rng(1).uniform(-5, 5, 9999))
    ours = np.array(fed(values, exact=0).quantiles(np.linspace(0, 1, 9999)))
    errors = np.abs(ours / np.sort(values) - 1)
    assert 0.95 * ACCURACY < errors.max() <= ACCURACY * (1 + 1e-9)


def test_the_last_exact_value_and_the_next():
    values = np.random.default_rng(1).random(EXACT + 1)
    distribution = fed(values, [0, EXACT])
    assert not distribution.exact
    kept = fed(values[:EXACT], [0])
    assert kept.exact
    assert kept.quantiles(QS) == np.quantile(values[:EXACT], QS).tolist()
    kept.add(values[-1])
    assert not kept.exact
    assert kept.quantiles(QS) == distribution.quantiles(QS)
    assert kept.quantiles(QS) == pytest.approx(np.quantile(values, QS).tolist(), rel=ACCURACY)


def test_values_beyond_the_bins_count_at_the_ends():
    values = [1e-300, 1e-12, 5e-324, 1.0, 1e12, 1e300]
    distribution = fed(values, exact=0)
    low, median, high = distribution.quantiles([0.0, 0.4, 1.0])
    assert (low, high) == (5e-324, 1e300)
    assert 0 < median < 2 * LOWEST
    assert HIGHEST / 2 < distribution.quantiles([0.8])[0] < 1.01 * HIGHEST
    assert fed([1e-30] * 9, exact=0).quantiles([0.5]) == [1e-30]


@pytest.mark.parametrize("exact", [0, EXACT])
def test_no_values_have_no_figures(exact):
    distribution = Distribution(exact)
    distribution.extend(np.zeros(0))
    assert len(distribution) == 0
    assert distribution.exact
    assert distribution.mean is None
    with pytest.raises(ValueError, match="no values"):
        distribution.quantiles([0.5])
    distribution.add(0.0)
    assert (distribution.mean, distribution.quantiles([0.5])) == (0.0, [0.0])
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="range"):
            distribution.quantiles([q])


@pytest.mark.parametrize("bad", [-1e-9, math.inf, math.nan])
def test_what_is_no_duration_is_refused(bad):
    with pytest.raises(ValueError, match="negative, infinite or not a number"):
        fed([1.0, bad]).mean  # noqa: B018
    with pytest.raises(ValueError, match="negative, infinite or not a number"):
        fed([1.0, bad]).quantiles([0.5])
    with pytest.raises(ValueError, match="negative, infinite or not a number"):
        fed([1.0, bad, *[1.0] * 5000])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 99),
    n=st.integers(1, 20_000),
    cuts=st.lists(st.integers(0, 20_000), max_size=6),
    looks=st.lists(st.integers(1, 20_000), max_size=3),
    exact=st.sampled_from([0, 10, 4096, 5000, 10_000, EXACT]),
)
def test_how_values_are_split_and_when_they_are_looked_at_makes_no_difference(seed, n, cuts, looks, exact):
    values = np.random.default_rng(seed).lognormal(0.0, 2.0, n)
    whole, split = Distribution(exact), Distribution(exact)
    whole.extend(values)
    for k, part in enumerate(np.split(values, sorted([*cuts, *looks]))):
        if k % 2:
            split.extend(part)
        else:
            for value in part.tolist():
                split.add(value)
        if len(split) in looks:
            assert split.mean == fed(values[: len(split)], exact=exact).mean
            split.quantiles(QS)
    assert (split.mean, split.quantiles(QS)) == (whole.mean, whole.quantiles(QS))
    assert (len(split), split.exact) == (len(whole), whole.exact)


def test_the_mean_of_many_values_does_not_drift():
    distribution, values = Distribution(1000), np.full(4096 * 500, 0.1)
    distribution.add(1e9)
    distribution.extend(values)
    exact = (Fraction(1e9) + len(values) * Fraction(0.1)) / (len(values) + 1)
    assert distribution.mean == pytest.approx(float(exact), rel=1e-15)


@pytest.mark.slow
def test_memory_has_a_bound():
    values = np.random.default_rng(1).exponential(1.0, 1 << 18)
    tracemalloc.start()
    try:
        distribution, times = Distribution(), TimeMean(["a"])
        held = []
        for k in range(8):
            distribution.extend(values)
            times.extend(k * len(values) + np.arange(len(values)), [values])
            held.append(tracemalloc.get_traced_memory()[0])
        distribution.quantiles(QS)
    finally:
        tracemalloc.stop()
    assert max(held) < 8 * EXACT + 3e6
    assert held[-1] < 3e6


def time_mean(starts, columns, begin):
    """From the whole table: a state for each time, the last of those that begin at once; times from ``begin`` on."""
    kept = [i for i in range(len(starts)) if i + 1 == len(starts) or starts[i + 1] != starts[i]]
    times = np.maximum(np.asarray(starts, dtype=float)[kept], begin)
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return [float(np.average(np.asarray(column)[kept][:-1], weights=np.diff(times))) for column in columns]


def test_a_mean_over_time_spelled_out():
    means = TimeMean(["a", "b"])
    assert means.means() is None
    means.hold(1.0, (10.0, 7))
    assert means.means() is None
    means.hold(2.0, (99.0, 99))
    means.hold(2.0, (20.0, 0))
    assert means.means() == {"a": 10.0, "b": 7.0}
    means.extend(np.array([4.0, 5.0]), [np.array([0, 70]), np.array([1.0, 8.0])])
    assert means.means() == {"a": (10 + 40 + 0) / 4, "b": (7 + 0 + 1) / 4}


def test_before_the_beginning_nothing_counts():
    means = TimeMean(["a"])
    means.hold(0.0, (100.0,))
    means.hold(1.0, (10.0,))
    means.begin(3.0)
    assert means.means() is None
    means.hold(4.0, (30.0,))
    assert means.means() == {"a": 10.0}
    means.hold(7.0, (0.0,))
    assert means.means() == {"a": (10.0 + 90.0) / 4}


def test_a_beginning_before_everything_changes_nothing():
    means = TimeMean(["a"])
    means.hold(2.0, (1.0,))
    means.hold(4.0, (2.0,))
    means.begin(2.0)
    assert means.means() == {"a": 1.0}


def test_a_beginning_that_is_told_too_late_is_refused():
    means = TimeMean(["a"])
    means.hold(2.0, (1.0,))
    means.hold(4.0, (2.0,))
    with pytest.raises(ValueError, match=r"cannot begin at 3\.0 s: a state from 4\.0 s on is known"):
        means.begin(3.0)


@pytest.mark.parametrize("back", [1.9, math.nan])
def test_times_that_go_back_are_refused(back):
    means = TimeMean(["a"])
    means.hold(2.0, (1.0,))
    means.hold(back, (1.0,))
    with pytest.raises(ValueError, match="earlier than the one before"):
        means.means()


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 99),
    n=st.integers(0, 9000) | st.integers(0, 6),
    cuts=st.lists(st.integers(0, 9000) | st.integers(0, 6), max_size=6),
    gap=st.sampled_from([0.0, 1e-6, 1.0]),
    begun=st.none() | st.floats(-1, 9000),
)
def test_means_over_time_are_those_of_the_whole_table(seed, n, cuts, gap, begun):
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.integers(0, 3, n) * gap)
    columns = [rng.random(n), rng.integers(0, 2000, n)]
    means = TimeMean(["share", "cells"])
    told = n if begun is None else int(np.searchsorted(starts, begun, side="right"))
    for k, rows in enumerate(np.split(np.arange(n), sorted([*cuts, told]))):
        if begun is not None and len(rows) and rows[0] == told:
            means.begin(begun)
        if k % 2:
            means.extend(starts[rows], [column[rows] for column in columns])
        else:
            for i in rows.tolist():
                means.hold(float(starts[i]), (float(columns[0][i]), int(columns[1][i])))
    if begun is not None and told == n:
        means.begin(begun)
    expected = time_mean(starts, columns, -math.inf if begun is None else begun)
    ours = means.means()
    if expected is None:
        assert ours is None
    else:
        assert ours == {
            "share": pytest.approx(expected[0], rel=1e-12),
            "cells": pytest.approx(expected[1], rel=1e-12),
        }


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 20_000), cuts=st.lists(st.integers(0, 20_000), max_size=6))
def test_how_states_are_split_makes_no_difference(n, cuts):
    rng = np.random.default_rng(n)
    starts, column = np.cumsum(rng.exponential(1.0, n)), rng.random(n)
    whole, split = TimeMean(["a"]), TimeMean(["a"])
    whole.extend(starts, [column])
    for rows in np.split(np.arange(n), sorted(cuts)):
        split.extend(starts[rows], [column[rows]])
        split.means()
    assert split.means() == whole.means()
