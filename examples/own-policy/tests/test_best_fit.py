"""What ``best-fit`` promises, on sixteen cells."""

import numpy as np
import pytest
from own_policy.best_fit import BestFit

from policies.api import API_VERSION, CacheConfig, Chunk, OutOfCells, Policy


def test_the_interface_is_the_one_that_this_was_written_for() -> None:
    assert API_VERSION == 2


def test_a_chunk_takes_the_smallest_extent_that_holds_it() -> None:
    policy = BestFit(CacheConfig(cells=16))
    for seq, n in enumerate([3, 2, 5, 1]):
        policy.allocate([Chunk(seq, 0, n)])
    policy.free(0)
    policy.free(2)  # Free are now cells 0 to 2, 5 to 9, and 11 to 15.
    (batch,) = policy.allocate([Chunk(4, 0, 2)])
    assert batch.cells.tolist() == [0, 1]
    (batch,) = policy.allocate([Chunk(5, 0, 4)])
    assert batch.cells.tolist() == [5, 6, 7, 8]
    assert policy.usage().largest_free_extent == policy.usage().placeable == 5


def test_what_fits_in_no_extent_changes_nothing() -> None:
    policy = BestFit(CacheConfig(cells=16))
    policy.allocate([Chunk(0, 0, 10)])
    with pytest.raises(OutOfCells, match="no free extent of 7 cells; 4 of 16 are free"):
        policy.allocate([Chunk(1, 0, 2), Chunk(2, 0, 7)])
    assert policy.sequences() == [0]


def test_usage_and_owners_are_those_of_the_cells_and_do_not_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's cache has hundreds of thousands of cells, and ``usage`` is asked for at every step."""
    policy, rng = BestFit(CacheConfig(cells=40)), np.random.default_rng(1)
    held = dict.fromkeys(range(4), 0)
    for _ in range(200):
        seq, n = int(rng.integers(4)), int(rng.integers(1, 6))
        try:
            policy.allocate([Chunk(seq, held[seq], n)])
            held[seq] += n
        except OutOfCells:
            held[seq] = int(rng.integers(held[seq] + 1))
            policy.free(seq, held[seq])
        expected = Policy.usage(policy), policy.occupancy().first_owner().tolist()
        with monkeypatch.context() as patch:
            patch.delattr(BestFit, "occupancy")
            assert (policy.usage(), policy.first_owners().tolist()) == expected
