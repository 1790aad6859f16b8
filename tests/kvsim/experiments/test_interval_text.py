"""Intervals are printed with the digits that they have."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import from_to, plain, plus_minus


def interval(value, low, high):
    return Interval(value, low, high)


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (1234.5, 160.0, "1,230 ±160"),
        (1234.5, 1.61, "1,234.5 ±1.6"),
        (0.45678, 0.0123, "0.457 ±0.012"),
        (0.45678, 0.00996, "0.457 ±0.010"),
        (98765.0, 9.96, "98,765 ±10"),
        (98765.0, 99.6, "98,760 ±100"),
        (4.0e-5, 1.2e-6, "0.0000400 ±0.0000012"),
        (2.0, 0.0, "2"),
        (2.34567, math.inf, "2.346"),
    ],
)
def test_the_half_width_says_how_many_digits(value, half, text):
    assert plus_minus(interval(value, value - half, value + half)) == text


def test_an_interval_that_is_cut_off_shows_both_ends():
    assert plus_minus(interval(5.0, 0.0, 17.2)) == "5 (0 to 17)"
    assert plus_minus(interval(5.0, -7.2, 17.2)) == "5 (0 to 17)"
    assert plus_minus(interval(1614.0, 0.0, 3300.0)) == "1,600 (0 to 3,300)"
    assert plus_minus(interval(0.98, 0.9, 1.0)) == "0.980 (0.900 to 1.000)"
    assert plus_minus(interval(3.4, 0.0, 160.0)) == "3 (0 to 160)"


def test_units_and_scale():
    assert plus_minus(interval(0.4123, 0.4, 0.4246), 1e3, " ms") == "412 ms ±12"


def test_differences_may_be_negative():
    assert from_to(interval(5.0, -3.21, 13.21), 1.0) == "-3.2 to 13.2"
    assert from_to(interval(5.0, -160.0, 170.0), 1e3) == "-160,000 to 170,000"
    assert from_to(interval(0.0, 0.0, 0.0)) == "0"
    assert plus_minus(interval(-5.0, -6.0, -4.0), least=None) == "-5.0 ±1.0"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12345.6, "12,346"), (1.5, "1.5"), (0.00012345, "0.0001234"), (9999.96, "10,000"), (1e6, "1,000,000")],
)
def test_numbers_without_an_interval(value, text):
    assert plain(value) == text


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_no_exponent_and_nothing_below_zero(value, below, above):
    text = plus_minus(interval(value, value - below, value + above))
    assert "e" not in text
    assert "-" not in text
