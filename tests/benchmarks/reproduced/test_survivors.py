"""What is counted of the tokens that rules of eviction keep."""

import numpy as np
import pytest

from benchmarks.reproduced.survivors import grouped, overlap, run_length, survivors
from policies.cells.token_rules import HeavyHitters, PromptHeavy

N = 200


def paid_to(*positions, queries=slice(None)):
    """Every query pays all tokens a little, and some queries pay these positions much."""
    paid = np.full((N, N), 0.001, dtype=np.float32)
    for position in positions:
        paid[queries, position] = 1
    return paid


def test_h2o_keeps_what_all_queries_look_at_and_snapkv_what_the_last_do():
    early, late = paid_to(50, 51, 90, queries=slice(0, 100)), paid_to(50, 90, queries=slice(-32, None))
    # Of a budget of 14, 7 are the latest; of equal scores the later survive.
    assert survivors(HeavyHitters, early, 14).tolist() == [50, 51, 90, *range(189, 193)]
    assert set(survivors(PromptHeavy, late, 46)) >= {*range(47, 54), *range(87, 94)}
    assert not {50, 90} & set(survivors(PromptHeavy, early, 46))


def test_runs_are_positions_in_a_row():
    assert run_length(np.array([4, 5, 6, 9, 20, 21])) == 2
    assert run_length(np.array([4])) == 1


def test_overlap_is_the_share_that_others_keep_as_well():
    assert overlap([np.array([1, 2, 3, 4]), np.array([3, 4, 5, 6])]) == 0.5
    assert np.isnan(overlap([np.array([1])]))


def test_layers_are_added_up_by_group():
    layers = [np.full((2, 2), float(i)) for i in range(4)]
    assert [group[0, 0] for group in grouped(layers, 1)] == [6]
    assert sorted(group[0, 0] for group in grouped(layers, 2)) == pytest.approx([2, 4])
