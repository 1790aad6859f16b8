"""Figures of streams that are not kept, against the same figures of all values."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.simulation.distribution import ACCURACY, EXACT, HIGHEST, LOWEST, Distribution

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


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
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
        distribution = Distribution()
        held = []
        for _ in range(8):
            distribution.extend(values)
            held.append(tracemalloc.get_traced_memory()[0])
        distribution.quantiles(QS)
    finally:
        tracemalloc.stop()
    assert max(held) < 8 * EXACT + 3e6
    assert held[-1] < 3e6
