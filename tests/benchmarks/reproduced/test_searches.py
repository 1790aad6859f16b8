"""The direction of what docs/reproduced.md says of searches for regions, on a small version."""

import pytest

from benchmarks.reproduced.searches import lost


@pytest.mark.slow
def test_buddies_lose_inside_and_worst_fit_and_slabs_outside():
    best, worst, buddy, slab = (
        lost("burstgpt", search, seed=1, requests=150) for search in ("best-fit", "worst-fit", "buddy", "slab")
    )
    assert best.internal == worst.internal == 0
    assert 0 < slab.internal < 1 / 8 < buddy.internal < 1 / 2
    assert buddy.external < best.external < worst.external < slab.external
    assert buddy.throughput < slab.throughput < best.throughput
