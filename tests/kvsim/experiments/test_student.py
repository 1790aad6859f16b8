"""Quantiles of Student's t distribution against scipy's."""

import pytest
from scipy.special import stdtrit

from kvsim.experiments.student import t_quantile


@pytest.mark.parametrize("freedom", [1, 1.3, 2, 3, 4.5, 10, 29.9, 49.9, 50, 99.5, 399, 1e4, 1e5])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.9, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(level, freedom):
    assert t_quantile(level, freedom) == pytest.approx(stdtrit(freedom, (1 + level) / 2), rel=1e-11)
