"""Blocks that rows take and give up: the same blocks and reads as when each step is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, Content, SequencePlan, available
from policies.paging.blocks import PRIVATE
from tests.policies.placement.stories import SEEDS, live, story

NAMES = ("paged", "vllm", "chunked", "paged-window", "vattention", "no-evict", "expected-length", "radix-tree")
CONFIGS = st.builds(
    CacheConfig,
    for_any_layout=st.just(True),
    cells=st.sampled_from([64, 130, 400]),
    n_ubatch=st.sampled_from([2, 8, 64]),
    max_tokens=st.sampled_from([16, 60]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    chunk_size=st.sampled_from([2, 8]),
    page_tokens=st.sampled_from([2, 8]),
    window=st.sampled_from([3, 8, 21]),
    prefix_cache=st.booleans(),
    eviction=st.sampled_from(["lru", "fifo", "lfu", "sieve", "workload-aware"]),
    host_cells=st.sampled_from([0, 0, 64]),
)


@pytest.mark.slow
@given(st.sampled_from(NAMES), CONFIGS, SEEDS)
@settings(max_examples=75, deadline=None)
def test_rows_take_the_blocks_that_single_steps_take(name, config, seed):
    live(lambda: available()[name](config), story(seed), most=config.max_tokens)


def test_what_only_one_sequence_says_is_cached_without_a_key_until_it_is_to_return():
    policy = available()["vllm"](CacheConfig(cells=64, block_size=4))
    content = Content.of_two((7, 0, 6), (8, 0, 6))
    policy.open(0, SequencePlan(6, 12, 11, content))
    policy.allocate([Chunk(0, 0, 8)])
    block = policy.tables[0].blocks[0]
    assert policy.pool.keys[block] == PRIVATE
    assert policy.cached_tokens(content, 9) == 0
    policy.will_return(0)
    policy.free(0)
    assert policy.cached_tokens(content, 9) == 8
