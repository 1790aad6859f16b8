"""Student's t against a table of its quantiles."""

import pytest

from kvsim.experiments.student import t_quantile


@pytest.mark.parametrize(
    ("level", "freedom", "quantile"),
    [(0.9, 1, 6.314), (0.95, 1, 12.706), (0.95, 5, 2.571), (0.95, 30, 2.042), (0.99, 10, 3.169), (0.95, 1e9, 1.960)],
)
def test_quantiles_are_those_of_the_printed_table(level, freedom, quantile):
    assert t_quantile(level, freedom) == pytest.approx(quantile, abs=5e-4)


def test_half_a_degree_of_freedom_lies_between_its_neighbours():
    assert t_quantile(0.95, 5) > t_quantile(0.95, 5.5) > t_quantile(0.95, 6)
