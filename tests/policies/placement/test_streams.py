"""Rows in one stream or each in its own, with and without a window: as when each step is asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CacheConfig, Chunk, available
from policies.layouts.llamacpp import mid_2025
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy
from tests.policies.placement.harness import Twins
from tests.policies.placement.stories import SEEDS, SEQUENCES, begun, live, story

FOUR = {"cells": 4096, "sequences": 4, "n_ubatch": 32, "window": 30, "max_tokens": 400}
NAMES = ("llama.cpp-b6975", "streams", "sliding-window")


@st.composite
def caches(draw):
    """One or two groups, small enough that all is in use, in one stream or several."""
    streams = draw(st.sampled_from([1, 1, SEQUENCES]))
    size = draw(st.sampled_from([100, 230, 700])) // (1 if streams == 1 else 2)
    n_ubatch, window = draw(st.sampled_from([4, 16, 64])), draw(st.sampled_from([2, 5, 30]))
    specs = [CacheSpec(size, draw(st.sampled_from([1, 32])))]
    if draw(st.booleans()):
        most = window * (SEQUENCES if streams == 1 else 1) + n_ubatch
        specs.append(CacheSpec(max(min(size, most) + draw(st.integers(-3, 8)), 5), 32, window=window))
    config = CacheConfig(cells=size * streams, n_ubatch=n_ubatch, sequences=SEQUENCES)
    kernel = draw(st.sampled_from(["tiled", "tiled", "masked"]))
    return lambda: MultiStreamPolicy("drawn", config, specs, n_streams=streams, kernel=kernel)


@pytest.mark.slow
@given(caches(), SEEDS)
@settings(max_examples=75, deadline=None)
def test_rows_take_the_cells_that_steps_take_that_are_asked_for(make, seed):
    live(make, story(seed, tokens=40), most=150)


@pytest.mark.parametrize(("n_ubatch", "passes"), [(1, [2, 2, 1]), (2, [3, 2]), (3, [4, 1]), (4, [5]), (5, [5])])
def test_consecutive_streams_share_passes_as_far_as_a_pass_has_room(n_ubatch, passes):
    """A micro-batch of single tokens is one longer than the limit (``split_equal``); a prompt beside them fills it."""
    config = CacheConfig(cells=7 * 64, n_ubatch=n_ubatch, sequences=7)
    twins = Twins(lambda: MultiStreamPolicy("apart", config, [CacheSpec(64, 1)], n_streams=7, kernel="tiled"))
    for seq in range(5):
        assert twins.step([Chunk(seq, 0, 3)])
    assert twins.join(range(5)) == list(range(5))
    assert twins.step()
    assert [len(work.rows) for work in twins.rule.passes] == passes
    assert twins.step([Chunk(5, 0, 4), Chunk(6, 0, 1)])
    assert twins.step([Chunk(6, 1, 2), Chunk(5, 4, 2)])
    assert twins.step()


@pytest.mark.slow
@given(st.booleans(), st.sampled_from([0.05, 0.3]), SEEDS)
@settings(max_examples=12, deadline=None)
def test_compaction_comes_before_the_same_steps(contiguous, threshold, seed):
    config = CacheConfig(cells=3000, n_ubatch=200, sequences=SEQUENCES)
    caches = [CacheSpec(3000, 32)]
    options = {"threshold": threshold, "max_nodes": 1024, "contiguous": contiguous}
    live(lambda: mid_2025("mid", config, caches, **options), story(seed, tokens=600, events=16), most=1400)


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_presets_of_long_sequences_go_on_as_when_they_are_asked(name, unified):
    """Prompts beside rows and decode steps, until windows have been passed several times."""
    config = CacheConfig(cells=4800, sequences=4, n_ubatch=128, window=100, unified=unified, max_tokens=900)
    twins = Twins(lambda: available()[name](config))
    for seq in range(4):
        assert twins.step([Chunk(seq, 0, 170 + 90 * seq)])
        assert twins.join([seq]) == [seq]
        for _ in range(60):
            assert twins.step()
    for cache in twins.both():
        cache.free(1)
    del twins.lengths[1]
    assert twins.step([Chunk(1, 0, 300)])
    assert 1 not in twins.rule.by_seq
    assert twins.join([1]) == [1]
    for _ in range(150):
        assert twins.step()


@pytest.mark.parametrize("beside", [(), (Chunk(3, 0, 50),)], ids=["alone", "beside a prompt"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["llama.cpp-b6975", "sliding-window"])
def test_a_context_shift_is_told_with_the_next_step(name, unified, beside):
    twins = begun(name, (20, 29, 12), unified=unified, **FOUR)
    for cache in twins.both():
        cache.free(1, 4, 14)
        cache.shift(1, 14, None, -10)
    twins.lengths[1] -= 10
    assert 1 not in twins.rule.by_seq
    assert twins.join([1]) == [1]
    assert twins.rule.by_seq[1].length == twins.lengths[1]
    owed = twins.ruled.arenas[0][twins.ruled.stream_of(1)].pending.rotations
    assert (owed != 0).sum() == 15
    assert twins.step(beside)
    assert twins.ruled.arenas[0][twins.ruled.stream_of(1)].pending.rotations is None


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_that_are_cut_go_on_as_rows(unified):
    twins = begun("sliding-window", (40, 50, 20), unified=unified, **FOUR)
    for _ in range(5):
        for cache in twins.both():
            cache.free(1, twins.lengths[1] - 7)
        twins.lengths[1] -= 7
        twins.compare()
        assert twins.join([1]) == [1]
        for _ in range(12):
            assert twins.step()


def test_a_sequence_that_shares_cells_is_no_row():
    twins = begun("llama.cpp-b6975", (40, 50, 20), **FOUR)
    for cache in twins.both():
        cache.copy(0, 3)
    twins.lengths[3] = 40
    assert twins.join(range(4)) == [1, 2]
    assert twins.step()
    assert twins.step([Chunk(3, 40, 5)])
