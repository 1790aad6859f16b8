"""Token eviction by rows: the same cells, reads, evictions and copies as when each step is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, available
from policies.cells.token_ranks import DrawnAttention
from policies.presets.papers.token_eviction import PRESETS
from tests.policies.placement.stories import SEEDS, begun, live, story

NAMES = [preset.name for preset in PRESETS]
CONFIGS = st.builds(
    CacheConfig,
    cells=st.sampled_from([60, 120, 400]),
    block_size=st.sampled_from([1, 4, 8]),
    n_ubatch=st.sampled_from([3, 16, 64]),
    max_tokens=st.just(90),
    budget=st.sampled_from([1, 8, 13, 24]),
    budget_groups=st.sampled_from([1, 2]),
    threshold=st.sampled_from([0.05, 0.3]),
    seed=st.integers(0, 3),
)


class Measured:
    """Attention that is the same as what is drawn, but of which only scores are known."""

    def __init__(self, drawn):
        self.drawn = drawn

    def scores(self, group, seq, positions):
        return self.drawn.scores(group, seq, positions)

    def forget(self, seq):
        self.drawn.forget(seq)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(config=CONFIGS, seed=SEEDS, reserves=st.booleans())
@settings(max_examples=20, deadline=None)
def test_rows_evict_and_place_as_if_each_step_were_asked_for(name, config, seed, reserves):
    live(lambda: available()[name](config), story(seed), most=90, reserves=reserves)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(config=CONFIGS, seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_lightest_tokens_are_found_without_ranking_all(name, config, seed):
    """Of attention that only says scores, all tokens are ranked whenever one is to go."""

    def measure(twins):
        twins.asked.attention = Measured(twins.asked.attention)

    live(lambda: available()[name](config), story(seed), most=90, prepare=measure)


def test_a_long_sequence_evicts_as_it_goes_on():
    twins = begun("h2o", [40, 3], cells=400, block_size=4, n_ubatch=64, max_tokens=400, budget=16)
    for _ in range(200):
        assert twins.step()
    assert [len(row.held[0].cells) for row in twins.rule.rows] == [17, 17]


def test_factors_never_fall_with_the_distance():
    """What was computed earlier would be no bound."""
    for drawn in (DrawnAttention.by_all_queries(0), DrawnAttention.by_last_queries(0)):
        factors = drawn.by_distance(50_000)
        assert (factors[1:] >= factors[:-1]).all()
