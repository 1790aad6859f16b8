"""Correctness of the engine: under every policy the text equals a recomputation without a cache."""

from functools import cache

import numpy as np
import pytest

from kvsim.model.engine_shapes import SHAPES, STORAGES
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from policies import Chunk, Group, Moves, available
from real_engine import Engine, Transformer
from tests.real_engine.recomputed import FixedTimeEngine, best_without_cache, generate_without_cache, swap_two_cells
from tests.worlds import scenario

MODEL = Transformer.random(SHAPES["tiny"], seed=5)
WORLD = scenario(
    seed=5,
    workload={
        "kind": "poisson",
        "rate": 300.0,
        "requests": 14,
        "prompt_tokens": {"kind": "lognormal", "mu": 2.5, "sigma": 0.6, "max": 40},
        "output_tokens": {"kind": "lognormal", "mu": 1.8, "sigma": 0.5, "max": 12},
    },
    server__scheduler="llama-server",
    server__slots=4,
    server__n_batch=24,
    server__n_ubatch=16,
    cache__cells=160,
)


def compacted_at_random(policy, rng):
    """Make the policy compact before a fifth of its steps; the moves come with the next micro-batch."""
    place, moved = policy.allocate, []

    def allocate(step, *, views=False):
        if rng.random() < 0.2:
            moved.append(policy.compact().n_cells)
        return place(step, views=views)

    policy.allocate = allocate
    return moved


def serve_for_real(policy, engine, world=WORLD):
    recorder = Recorder()
    drive(world, policy, engine, recorder, None)
    completed = [job for job in recorder.requests.jobs if job.status == "completed"]
    assert len(completed) >= 10
    return completed


@cache
def text_without_cache(prompt, n, groups):
    """What follows the prompt; most policies are asked for the same texts."""
    return generate_without_cache(MODEL, list(prompt), n, groups)


@cache
def answer_without_cache(text, prompt_tokens, groups):
    return best_without_cache(MODEL, list(text), prompt_tokens, groups)


def wrong_texts(jobs, engine, groups=()):
    wrong = 0
    for job in jobs:
        prompt = engine.prompt(job.request)
        said = engine.texts[job.request.id][len(prompt) : len(prompt) + job.generated]
        assert len(said) == job.generated
        wrong += said != text_without_cache(tuple(prompt), job.generated, tuple(groups) or (Group(0),))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["masked", "tiled", "gather", "sliced"])
@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_text_equals_cacheless_recomputation(name, kernel):
    world = WORLD.model_copy(update={"cache": WORLD.cache.model_copy(update={"kernel": kernel})})
    policy = build_policy(world, name)
    engine = Engine(MODEL, policy.groups, policy.kernel, WORLD.seed)
    assert wrong_texts(serve_for_real(policy, engine), engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", available())
def test_every_policy_generates_the_cacheless_text_with_random_compaction(name):
    # The ring and the budgets must be too large to forget anything, the sliding window narrower than the texts.
    sizes = {"window": 64 if name == "ring" else 20, "budget": 64, "cells": 256}
    world = WORLD.model_copy(update={"cache": WORLD.cache.model_copy(update=sizes)})
    policy = build_policy(world, name)
    moved = compacted_at_random(policy, np.random.default_rng(3))
    engine = Engine(MODEL, policy.groups, policy.kernel, WORLD.seed)
    assert wrong_texts(serve_for_real(policy, engine), engine, policy.groups) == 0
    if name in ("fill-holes", "full-compaction", "adaptive", "threshold-compaction", "idle-compaction"):
        assert sum(moved) > 0, "nothing was tested"


def test_a_move_that_is_not_carried_out_garbles_the_text():
    policy = build_policy(WORLD, "full-compaction")
    compacted_at_random(policy, np.random.default_rng(3))
    engine = Engine(MODEL, policy.groups, policy.kernel, WORLD.seed)
    engine._apply = lambda moves, group: None
    assert wrong_texts(serve_for_real(policy, engine), engine) > 0


def test_a_policy_that_names_wrong_cells_garbles_the_text():
    """The control: the comparison must be able to fail."""
    policy = build_policy(WORLD, "paged")
    engine = Engine(MODEL, policy.groups, policy.kernel, WORLD.seed)
    swap_two_cells(policy)
    assert wrong_texts(serve_for_real(policy, engine), engine) > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_moves_copy_keys_and_values_even_where_runs_overlap(storage):
    engine = Engine(MODEL, [Group(12)], "gather", seed=0, type_k=storage, type_v=storage)
    rng = np.random.default_rng(1)
    stores = (*engine.keys, *engine.values)
    for kept in stores:
        kept.write(slice(0, 12), rng.standard_normal((4, 12, 32)).astype(np.float32))
    before = [kept.read(slice(0, 12)).copy() for kept in stores]
    engine.move(Moves.from_runs([(3, 1, 5), (10, 6, 2)]))
    for kept, was in zip(stores, before, strict=True):
        now = kept.read(slice(0, 12))
        for cell, came_from in {1: 3, 2: 4, 3: 5, 4: 6, 5: 7, 6: 10, 7: 11, 0: 0, 11: 11}.items():
            assert (now[:, cell] == was[:, came_from]).all()


def test_kernels_agree_on_the_same_cells():
    """All kernels give the same logits but for rounding."""
    logits = {}
    for kernel in ("masked", "tiled", "gather", "sliced"):
        world = WORLD.model_copy(update={"cache": WORLD.cache.model_copy(update={"kernel": kernel})})
        policy = build_policy(world, "contiguous")
        engine = Engine(MODEL, policy.groups, kernel, seed=0)
        rng = np.random.default_rng(2)
        for step in ([Chunk(0, 0, 12)], [Chunk(0, 12, 1), Chunk(1, 0, 9)], [Chunk(0, 13, 1), Chunk(1, 9, 1)]):
            for batch in policy.allocate(step, views=True):
                last = engine.run(rng.integers(0, 1024, batch.n_tokens), batch)
        logits[kernel] = last
    for kernel in ("tiled", "gather", "sliced"):
        assert np.allclose(logits["masked"], logits[kernel], atol=1e-4)


SESSIONS = scenario(
    seed=6,
    workload={
        "kind": "sessions",
        "sessions": 8,
        "rate": 400.0,
        "turns": {"kind": "fixed", "value": 4},
        "system_prompts": 2,
        "system_tokens": {"kind": "fixed", "value": 19},
        "user_tokens": {"kind": "fixed", "value": 5},
        "output_tokens": {"kind": "lognormal", "mu": 1.8, "sigma": 0.4, "max": 12},
        "think_s": 0.002,
    },
    server__slots=5,
    server__n_batch=24,
    server__n_ubatch=16,
    cache={"policy": "paged", "cells": 200, "block_size": 4},
)


def serve_sessions(**keys):
    """Run the sessions on the engine; return the recorder and the number of wrong answers."""
    world = load_scenario(SESSIONS, **keys)
    policy = build_policy(world)
    engine = FixedTimeEngine(MODEL, policy.groups, policy.kernel, world.seed)
    recorder = Recorder()
    drive(world, policy, engine, recorder, None)
    assert len(recorder.requests.jobs) == 32
    wrong = 0
    for job in recorder.requests.jobs:
        assert job.status == "completed", job.error
        text = engine.prompt(job.request) + engine.texts[job.request.id][job.request.prompt_tokens :]
        assert text[: len(engine.texts[job.request.id])] == engine.texts[job.request.id]
        wrong += engine.best[job.request.id] != answer_without_cache(
            tuple(text), job.request.prompt_tokens, tuple(policy.groups)
        )
    return recorder, wrong


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu", "sieve", "workload-aware", "belady"])
def test_shared_blocks_hold_the_right_tokens(eviction):
    recorder, wrong = serve_sessions(server__scheduler="vllm", cache__eviction=eviction, cache__cells=120)
    assert wrong == 0
    assert recorder.counts.prefix.found > 0
    assert recorder.counts.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["none", "on-resume", "predictive"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_blocks_come_back_whole_from_the_host_tier(preemption, prefetch):
    recorder, wrong = serve_sessions(
        server__scheduler="vllm",
        server__preemption=preemption,
        server__prefetch=prefetch,
        cache__cells=120,
        cache__host_cells=400,
    )
    assert wrong == 0
    assert min(recorder.counts.host.cells_out, recorder.counts.host.cells_in, recorder.counts.preemptions) > 0
    assert (recorder.counts.host.cells_prefetched > 0) == (prefetch != "none")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paged", "contiguous", "llama.cpp-b6975", "full-compaction", "sliding-window"])
def test_a_kept_slot_continues_from_the_longest_common_prefix(policy):
    recorder, wrong = serve_sessions(cache__policy=policy, cache__cells=600, cache__window=64)
    assert wrong == 0
    assert recorder.counts.prefix.found > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paged", "paged-window", "contiguous", "growing"])
@pytest.mark.parametrize("scheduler", ["vllm", "static"])
def test_every_scheduler_generates_the_cacheless_text(scheduler, policy):
    cells = 320 if policy == "growing" else 200
    _, wrong = serve_sessions(server__scheduler=scheduler, cache__policy=policy, cache__cells=cells, cache__window=30)
    assert wrong == 0


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_fill_writes_every_cell(kind):
    engine = Engine(Transformer.random(SHAPES["tiny"], 1), (Group(70),), "sliced", seed=0, type_k=kind, type_v=kind)
    engine.fill()
    for kept in (*engine.keys, *engine.values):
        for array in kept.arrays:
            assert (array.reshape(array.shape[0], array.shape[1], -1) != 0).any(axis=2).all()
