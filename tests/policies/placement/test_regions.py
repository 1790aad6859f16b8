"""Regions that rows fill: the same cells, reads and copies as when each step is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, available
from policies.cells.region_search import SEARCHES
from tests.policies.placement.stories import SEEDS, begun, live, story

NAMES = ("hf-reserved", "growing", "ring", "oracle")
CONFIGS = st.builds(
    CacheConfig,
    for_any_layout=st.just(True),
    cells=st.sampled_from([64, 130, 400]),
    n_ubatch=st.sampled_from([2, 8, 64]),
    max_tokens=st.sampled_from([16, 60]),
    window=st.sampled_from([3, 8, 21]),
    sinks=st.sampled_from([0, 2, 4]),
    search=st.sampled_from([None, *SEARCHES]),
)


@pytest.mark.slow
@given(st.sampled_from(NAMES), CONFIGS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_rows_fill_their_regions_as_if_each_step_were_asked_for(name, config, seed):
    preset = available()[name]
    live(lambda: preset(config), story(seed), most=150 if preset(config).unbounded else config.max_tokens)


def test_a_full_region_grows_within_the_step():
    twins = begun("growing", [15, 3], cells=128, n_ubatch=32, max_tokens=64)
    assert twins.step()
    assert not twins.rule.released
    assert twins.step()
    assert twins.rule.released
    assert twins.rule.passes[0].groups[0].moves.n_cells == 16
    assert twins.step()
    assert not twins.rule.passes[0].groups[0].prepares


def test_more_rows_than_a_pass_has_tokens_take_several_passes():
    twins = begun("ring", [6, 6, 6, 6, 6], cells=64, n_ubatch=32, window=4, sinks=2, max_tokens=8)
    shifts = 0
    for _ in range(20):
        assert twins.step()
        assert [work.tokens for work in twins.rule.passes] == [2, 2, 1]
        shifts += sum(work.groups[0].prepares for work in twins.rule.passes)
    assert shifts > 0
    twins.ruled.free(0), twins.asked.free(0)
    twins.ruled.free(1), twins.asked.free(1)
    twins.ruled.free(2), twins.asked.free(2)
    assert twins.step()
    assert [(work.tokens, work.rows) for work in twins.rule.passes] == [(2, twins.rule.rows)]
