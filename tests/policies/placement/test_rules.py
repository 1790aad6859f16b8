"""Which policies have no placement rule."""

import pytest

from policies import CacheConfig, available
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *[(name, {"kernel": "masked"}) for name in ("h2o", "ring")],
        *[(name, {"kernel": "gather"}) for name in ("llama.cpp-b6975", "contiguous", "prompt-decode-regions")],
        *[(name, {"kernel": "sliced"}) for name in ("contiguous", "prompt-decode-regions")],
        ("prompt-decode-regions", {"sort_batch": True}),
    ],
)
def test_there_is_no_rule_where_attention_reads_other_cells_or_the_batch_is_sorted(name, config):
    assert available()[name](CacheConfig(cells=64, **config)).placement_rule() is None


def test_there_is_no_rule_for_runs_in_a_window():
    specs = [CacheSpec(64), CacheSpec(64, window=4)]
    policy = MultiStreamPolicy("runs", CacheConfig(cells=64, sequences=2), specs, contiguous=True)
    assert policy.placement_rule() is None
