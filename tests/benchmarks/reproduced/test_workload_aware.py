"""The direction of what docs/reproduced.md says of workload-aware eviction, on a small version."""

import pytest

from benchmarks.reproduced.workload_aware import hit_rates


@pytest.mark.slow
def test_it_finds_more_than_lru_and_less_than_is_possible():
    found = hit_rates(1, blocks=(256,), workload__limit=1000)
    lru, aware, belady = (found.by_cache[eviction, 256] for eviction in ("lru", "workload-aware", "belady"))
    assert 1.02 * lru < aware < belady <= found.infinite
