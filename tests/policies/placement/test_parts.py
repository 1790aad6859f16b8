"""Two-level pages by rows: the same blocks, reads and prefixes as when each step is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, Content, SequencePlan, available
from policies.layouts.two_level import LayerGroup, PageKind, TwoLevelPolicy
from tests.policies.placement.harness import Twins
from tests.policies.placement.stories import SEEDS, live, story

NAMES = ("two-level-pages", "layer-groups", "uniform-pages")
CONFIGS = st.builds(
    CacheConfig,
    cells=st.sampled_from([80, 200, 400]),
    block_size=st.sampled_from([1, 4, 8]),
    n_ubatch=st.sampled_from([3, 16, 64]),
    max_tokens=st.just(90),
    window=st.sampled_from([1, 6, 20]),
    full_layers=st.sampled_from([1, 2, 3]),
    window_layers=st.sampled_from([1, 2, 5]),
    prefix_cache=st.booleans(),
)


def alike(prompt, most, final):
    """A plan of a sequence that says what all others say."""
    return SequencePlan(prompt, most, final, Content([(0, 0, 100)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(config=CONFIGS, seed=SEEDS, shared=st.booleans(), reserves=st.booleans())
@settings(max_examples=15, deadline=None)
def test_rows_take_blocks_as_if_each_step_were_asked_for(name, config, seed, shared, reserves):
    plan = alike if shared else SequencePlan
    live(lambda: available()[name](config), story(seed), most=90, plan=plan, reserves=reserves, check=same_pages)


def same_pages(twins):
    """The same blocks are cached, and each page has the same owner."""
    one, other = twins.both()
    assert [part.pool.keys for part in one.parts] == [part.pool.keys for part in other.parts]
    assert (list(one.pages.owner), list(one.pages.idle)) == (list(other.pages.owner), list(other.pages.idle))
    assert [kind.order() for kind in one.pages.kinds] == [kind.order() for kind in other.pages.kinds]


def test_rows_give_up_blocks_behind_several_windows():
    config = CacheConfig(100, block_size=4, max_tokens=200, n_ubatch=8)
    kinds = [PageKind((LayerGroup(1, 4),)), PageKind((LayerGroup(1, 8), LayerGroup(2, 3)))]
    twins = Twins(lambda: TwoLevelPolicy("mine", config, kinds))
    for seq in range(3):
        twins.step([Chunk(seq, 0, 3 + seq)])
    twins.join(range(3))
    for _ in range(60):
        assert twins.step()
        assert len(twins.rule.passes) == 1
    assert twins.ruled.usage().stored < 40


@pytest.mark.parametrize("window", [None, 6])
def test_rows_of_one_kind_of_page_are_those_of_a_paged_cache(window):
    """Also where steps are composed ahead, so that blocks are cached and given up a step later."""
    config = CacheConfig(400, block_size=4, max_tokens=200, n_ubatch=64, window=6)
    paged = available()["paged-window" if window else "paged"](config)
    policies = paged, TwoLevelPolicy("mine", config, [PageKind((LayerGroup(1, window),))])
    for policy in policies:
        policy.compose_ahead(2)
        for seq in range(3):
            policy.open(seq, SequencePlan(5 + seq, 200, 200, Content([(seq, 0, 200)])))
            policy.allocate([Chunk(seq, 0, 5 + seq)])
            assert policy.placement_rule().join(seq, 200, seq)
    tables = [(paged.tables[seq], policies[1].parts[0].tables[seq]) for seq in range(3)]
    for _ in range(50):
        reads = []
        for policy in policies:
            rule = policy.placement_rule()
            assert rule.take_step()
            group = rule.passes[0].groups[0]
            reads.append((group.single_scanned, group.single_most, group.runs, group.span))
        assert reads[0] == reads[1]
        for one, other in tables:
            assert (one.n_keyed, one.skipped, len(one.blocks)) == (other.n_keyed, other.skipped, len(other.blocks))
