"""What attention reads under each kernel, of cells that lie apart."""

import numpy as np
import pytest

from policies import Chunk
from policies.cells.reads import TILE, reads_of

CELLS = np.array([0, 1, 5, TILE + 3, 3 * TILE, 2])
"""In the order of positions; the first two tiles follow each other."""


@pytest.mark.parametrize(
    ("kernel", "scanned", "useful", "runs", "span"),
    [
        ("masked", 999, 6, 1, 999),
        ("tiled", 3 * TILE, 6, 2, 3 * TILE),
        ("gather", 6, 6, 4, 6),
        ("sliced", 3 * TILE + 1, 6, 1, 3 * TILE + 1),
    ],
)
def test_each_kernel_scans_what_its_loop_goes_through(kernel, scanned, useful, runs, span):
    reads = reads_of(kernel, [Chunk(0, 4, 2)], lambda _: CELLS, 999)
    assert [array.tolist() for array in reads[:4]] == [[2], [scanned], [useful], [runs]]
    assert reads.span == span
