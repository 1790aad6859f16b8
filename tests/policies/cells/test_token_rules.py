"""Which tokens the rules of token eviction give up."""

import numpy as np
import pytest

from policies.cells.token_rules import HeavyBlocks, HeavyHitters, PromptHeavy, SinksAndRecent


def kept(rule, positions, prompt, weights=None):
    """The positions that remain; ``weights``: by position."""
    positions = np.array(positions)
    weights = np.ones(int(positions.max()) + 1) if weights is None else np.asarray(weights, dtype=float)
    gone = rule.evicted(positions, prompt, lambda asked: weights[asked])
    assert (np.diff(gone) > 0).all()
    return np.delete(positions, gone).tolist()


@pytest.mark.parametrize(
    "rule",
    [SinksAndRecent(8, 2), HeavyHitters(8), PromptHeavy(8), HeavyBlocks(8, 4)],
    ids=lambda rule: type(rule).__name__,
)
def test_nothing_goes_within_the_budget(rule):
    assert kept(rule, range(8), 8) == list(range(8))


def test_streaming_keeps_sinks_and_the_most_recent():
    assert kept(SinksAndRecent(6, 2), range(10), 0) == [0, 1, 6, 7, 8, 9]
    assert kept(SinksAndRecent(6, 2), [0, 1, 6, 7, 8, 9, 10], 0) == [0, 1, 7, 8, 9, 10]


def test_h2o_keeps_the_heaviest_beside_the_recent_half():
    weights = [9, 1, 1, 8, 1, 1, 1, 1, 0, 0]
    assert kept(HeavyHitters(4), range(10), 0, weights) == [0, 3, 8, 9]
    assert kept(HeavyHitters(4), [0, 3, 8, 9, 10], 0, [9, 0, 0, 8, 0, 0, 0, 0, 8.5, 0, 0]) == [0, 8, 9, 10]


def test_of_equals_the_oldest_goes():
    assert kept(HeavyHitters(4), range(6), 0) == [2, 3, 4, 5]


def test_snapkv_waits_for_the_end_of_the_prompt_and_keeps_the_answer():
    rule = PromptHeavy(40)
    assert kept(rule, range(60), 64) == list(range(60))
    weights = np.zeros(100)
    weights[10] = 1.0
    # The last 32 tokens of the prompt, and the heavy one with its three neighbours on each side and the last by chance.
    found = kept(rule, range(70), 64, weights)
    assert len(found) == 40 + 6
    assert set(found) >= {*range(32, 70), *range(7, 14)}
    assert kept(rule, [*found, *range(70, 90)], 64, weights) == [*found, *range(70, 90)]


def test_snapkv_keeps_all_that_it_observes_even_on_a_small_budget():
    assert kept(PromptHeavy(6), range(50), 50) == list(range(44, 50))


def test_whole_blocks_go_by_their_mean():
    weights = [5, 5, 5, 5, 9, 0, 0, 0, 3, 3, 3, 3, 0, 0, 0, 0]
    rule = HeavyBlocks(8, 4)
    assert kept(rule, range(16), 0, weights) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert kept(rule, range(11), 0, weights) == list(range(11))
    assert kept(rule, [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19], 0, [*weights, 9, 9, 9, 9]) == [
        0,
        1,
        2,
        3,
        *range(16, 20),
    ]


@pytest.mark.parametrize(
    ("rule", "most"),
    [(SinksAndRecent(64, 4), 96), (HeavyHitters(64), 96), (PromptHeavy(64), 200), (HeavyBlocks(64, 16), 111)],
    ids=lambda value: type(value).__name__,
)
def test_a_pass_is_placed_before_anything_goes(rule, most):
    assert rule.most_held(200, 300, 32) == most
    assert rule.most_held(20, 40, 32) == 40
