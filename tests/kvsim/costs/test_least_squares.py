"""Least squares without negative coefficients, on relative errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.least_squares import non_negative, predict_held_out, simple_fit, weighted, with_intervals

ROWS = np.array([[1.0, n] for n in range(1, 41)])
TRUE = ROWS @ [0.5, 0.02]


def test_coefficients_come_back_whatever_their_size():
    scaled = ROWS * [1e-6, 1e6]
    assert non_negative(scaled, TRUE) == pytest.approx([0.5e6, 0.02e-6])
    assert non_negative(np.hstack([ROWS, np.zeros((40, 1))]), TRUE) == pytest.approx([0.5, 0.02, 0.0])


def test_none_is_negative():
    assert non_negative(ROWS, 2.0 - 0.01 * ROWS[:, 1])[1] == 0.0


def test_relative_errors_count_alike():
    """Ten times the seconds on the second half: its errors in seconds would drown those of the first."""
    seconds = np.where(np.arange(40) < 20, TRUE, TRUE * 1.0)
    seconds[0] *= 1.2
    rows, aims = weighted(ROWS, seconds)
    assert rows @ [0.5, 0.02] == pytest.approx(np.ones(40), abs=0.1)
    assert aims[0] == pytest.approx(1.2, abs=0.1)


def test_a_disturbed_sample_counts_as_if_twice_as_slow():
    seconds = TRUE.copy()
    seconds[7] *= 8
    _, aims = weighted(ROWS, seconds)
    assert aims.max() == 2.0


def test_noise_does_not_bias_the_fit():
    rng = np.random.default_rng(3)
    rows = np.tile(ROWS, (50, 1))
    seconds = rows @ [0.5, 0.02] * rng.uniform(0.7, 1.3, len(rows))
    assert non_negative(*weighted(rows, seconds)) == pytest.approx([0.5, 0.02], rel=0.02)


def test_intervals_are_those_of_resampled_origins():
    rng = np.random.default_rng(3)
    member = np.arange(40) // 4
    pace = rng.uniform(0.9, 1.1, 10)[member]
    by_origin = with_intervals(ROWS, TRUE * pace, member, np.random.default_rng(0))
    for found, true in zip(by_origin, (0.5, 0.02), strict=True):
        assert found.low <= found.value <= found.high
        assert found.low < true < found.high
    exact = with_intervals(ROWS, TRUE, member, np.random.default_rng(0))
    assert all(found.high - found.low < 1e-6 for found in exact)


@pytest.mark.slow
@given(st.integers(0, 1000), st.floats(1e-6, 10), st.floats(1e-9, 1))
def test_intervals_hold_the_value(seed, base, slope):
    rng = np.random.default_rng(seed)
    seconds = ROWS @ [base, slope] * rng.uniform(0.8, 1.25, 40)
    for found in with_intervals(ROWS, seconds, np.arange(40) // 10, rng):
        assert 0 <= found.low <= found.value <= found.high


def test_few_samples_have_an_origin_each():
    found = simple_fit([[1, 2], [1, 4], [1, 8]], [1.2, 1.4, 1.8], np.random.default_rng(0))
    assert [each.value for each in found] == pytest.approx([1.0, 0.1])


def test_what_is_held_out_is_predicted_from_the_others():
    held = np.arange(40) % 3 == 0
    seconds = TRUE.copy()
    seconds[held] = 99.0
    assert predict_held_out(ROWS, seconds, held) == pytest.approx(TRUE[held])
