"""Numbers as tables print them."""

import pytest

from kvsim.cli.tables.formats import size


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0, "0 B"), (1_500, "1.5 kB"), (77_300_000, "77.3 MB"), (1.41e9, "1.41 GB"), (3.321e12, "3.32 TB")],
)
def test_sizes_are_in_the_unit_that_fits(value, printed):
    assert size(value) == printed
