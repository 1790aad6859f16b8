"""Many decode steps in one event: the same cells, counts, failures and times as one by one."""

import json
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.costs.profile import load_profile
from kvsim.errors import Livelock, UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import build_policy, cost_model, drive, run
from policies import Chunk, Policy, SequencePlan, available
from policies.cells.arena import Arena
from policies.fast_forward.tiles import TileMap
from policies.layouts.unified import UnifiedPolicy
from tests.worlds import command

PROFILE = load_profile("default")
COUNTS = [name for name in vars(Recorder()) if isinstance(vars(Recorder())[name], int) and not name.startswith("_")]


@st.composite
def scenarios(draw):
    prompt = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5])), "sigma": 1.0, "min": 1, "max": 100}
    output = {"kind": "lognormal", "mu": draw(st.sampled_from([2.0, 3.5, 4.5])), "sigma": 0.8, "min": 1, "max": 200}
    workload = {"prompt_tokens": prompt, "output_tokens": output, "requests": draw(st.integers(1, 12))}
    kind = draw(st.sampled_from(["poisson", "gamma", "batch", "closed-loop"]))
    extra = {
        "poisson": {"rate": draw(st.sampled_from([2.0, 30.0]))},
        "gamma": {"rate": 10.0, "cv": 3.0},
        "batch": {},
        "closed-loop": {"users": 3, "think_s": draw(st.sampled_from([0.0, 0.5]))},
    }
    return load_scenario(
        {
            "name": "leaps",
            "seed": draw(st.integers(0, 1000)),
            "workload": {"kind": kind, **workload, **extra[kind]},
            "server": {
                "scheduler": draw(st.sampled_from(["llama-server", "vllm", "static"])),
                "slots": draw(st.integers(1, 5)),
                "n_batch": draw(st.sampled_from([8, 64])),
                "n_ubatch": draw(st.sampled_from([4, 32])),
                "slot_context": draw(st.sampled_from([64, 160])),
                "context_shift": draw(st.booleans()),
                "keep_idle_slots": draw(st.booleans()),
                "n_keep": 4,
            },
            "cache": {
                "cells": draw(st.sampled_from([192, 320, 800])),
                "block_size": draw(st.sampled_from([1, 4, 16])),
                "window": draw(st.sampled_from([16, 48])),
                "threshold": draw(st.sampled_from([0.05, 0.4])),
                "kernel": draw(st.sampled_from([None, None, None, "gather", "sliced", "masked", "tiled", "tiled"])),
                "unified": draw(st.booleans()),
                "sort_batch": draw(st.booleans()),
                "prefix_cache": draw(st.booleans()),
            },
        }
    )


def outcome(scenario, name, fast_forward):
    """Everything that a run leaves behind; or why it ended."""
    costs = cost_model(scenario, PROFILE)
    try:
        policy, recorder = build_policy(scenario, name, costs), Recorder()
        backend = SimulatedBackend(costs, policy.kernel, policy.groups)
        result, _ = drive(scenario, policy, backend, recorder, "default", fast_forward=fast_forward)
    except UserError as e:
        return str(e), None, None
    except Livelock as e:
        return str(e).split(" s: ")[-1], None, None
    counts = {count: getattr(recorder, count) for count in COUNTS}
    cells = [(policy.occupancy(g).position.tolist(), policy.occupancy(g).owners) for g in range(len(policy.groups))]
    return (counts, cells, policy.usage(), costs.warnings()), result, policy


def alike(a, b):
    pd.testing.assert_frame_equal(a, b, check_exact=False, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_leaping_changes_nothing(name, scenario):
    leaped, a, _ = outcome(scenario, name, fast_forward=True)
    stepped, b, _ = outcome(scenario, name, fast_forward=False)
    assert leaped == stepped
    if a is not None:
        alike(a.requests, b.requests)
        alike(a.cache, b.cache)
        alike(a.passes, b.passes)


LEAPERS = ("contiguous", "fill-holes", "full-compaction", "paged", "ring", "adaptive", "threshold-compaction")
LEAPERS += (
    "hf-reserved",
    "growing",
    "oracle",
    "vllm",
    "chunked",
    "idle-compaction",
    "llama.cpp-2024",
    "llama.cpp-today",
    "streams",
    "sliding-window",
    "split-regions",
)


@pytest.mark.parametrize("scheduler", ["llama-server", "vllm", "static"])
@pytest.mark.parametrize("name", LEAPERS)
def test_most_steps_are_leaped_over(name, scheduler):
    """The control: there are fast-forwards at all, and nearly all decode steps are in one."""
    scenario = load_scenario("chat", workload__requests=20, server__scheduler=scheduler, cache__cells=8192)
    policy = build_policy(scenario, name)
    placed = []
    allocate = policy.allocate
    policy.allocate = lambda step, **options: (placed.append(step), allocate(step, **options))[1]
    costs = cost_model(scenario, PROFILE)
    result, _ = drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), Recorder(), "default")
    # A threshold that is just exceeded asks for a compaction at every step; where several sequences decode, each of
    # these moves something.
    assert len(placed) < len(result.passes) / (3 if name != "threshold-compaction" else 2)


def test_the_command_line_can_be_asked_to_step():
    leaped, stepped = (
        json.loads(command("run", "chat", "--requests", "20", "--json", *more).stdout)
        for more in ([], ["--no-fast-forward"])
    )
    assert leaped["e2e_s"] == pytest.approx(stepped["e2e_s"], rel=1e-12)
    assert leaped["cache"] == pytest.approx(stepped["cache"], rel=1e-12)
    assert leaped["forward_passes"] == stepped["forward_passes"]


def test_a_run_can_be_asked_to_step():
    scenario = load_scenario("chat", workload__requests=20)
    a, b = (run(scenario, "paged", fast_forward=fast_forward).summary for fast_forward in (True, False))
    assert a["forward_passes"] == b["forward_passes"]
    assert a["e2e_s"]["p99"] == pytest.approx(b["e2e_s"]["p99"], rel=1e-12)


@pytest.mark.parametrize("name", LEAPERS)
def test_foresight_changes_nothing_until_it_is_taken(name):
    policy = build_policy(load_scenario("chat", cache__threshold=0.9), name)
    for seq in range(3):
        policy.open(seq, SequencePlan(20, 200, 150))
        policy.allocate([Chunk(seq, 0, 20)])
    step = [Chunk(seq, 20, 1) for seq in range(3)]
    policy.allocate(step)
    step = [chunk._replace(start=21) for chunk in step]
    before = (policy.usage(), policy.occupancy().position.tolist())
    planned = policy.plan_decode_steps(step, 10)
    assert planned is not None
    assert (policy.usage(), policy.occupancy().position.tolist()) == before
    usages = planned.take_steps(planned.steps, True)
    for field in fields(usages):
        values = getattr(usages, field.name)
        assert len(values) == planned.steps <= 10
        assert values[-1] == getattr(policy.usage(), field.name)
    assert usages.stored[0] == before[0].stored + 3


WAYS = {
    "several passes": ("streams", {}),
    "a window's cells overwritten": ("sliding-window", {"window": 16}),
    "windows in streams": ("sliding-window", {"window": 16, "unified": False}),
    "from hole to hole": ("contiguous", {}),
    "any free cells": ("llama.cpp-today", {}),
    "downwards": ("split-regions", {"sort_batch": True}),
    "tiles": ("contiguous", {"kernel": "tiled"}),
    "tiles that are moved": ("adaptive", {"kernel": "tiled"}),
}


@pytest.mark.parametrize("scheduler", ["llama-server", "vllm"])
@pytest.mark.parametrize("way", WAYS)
def test_leaps_go_every_way(way, scheduler):
    """Long answers in a cache that is well used: cells, counts and tables as step by step, and there are
    fast-forwards."""
    name, cache = WAYS[way]
    lengths = {"kind": "lognormal", "sigma": 0.9, "min": 1}
    workload = {
        "kind": "poisson",
        "rate": 3.0,
        "requests": 60,
        "prompt_tokens": {**lengths, "mu": 3.5, "max": 120},
        "output_tokens": {**lengths, "mu": 4.5, "max": 300},
    }
    server = {"scheduler": scheduler, "slots": 6, "n_batch": 128, "n_ubatch": 128, "slot_context": 512}
    server |= {"keep_idle_slots": False}
    scenario = load_scenario(
        {"name": "ways", "workload": workload, "server": server, "cache": {"cells": 3072, **cache}}
    )
    leaped, a, policy = outcome(scenario, name, fast_forward=True)
    stepped, b, _ = outcome(scenario, name, fast_forward=False)
    assert leaped == stepped
    assert a is not None
    assert isinstance(policy, Policy)
    for table in ("requests", "cache", "passes"):
        alike(getattr(a, table), getattr(b, table))
    policy, placed, taken = build_policy(scenario, name, cost_model(scenario, PROFILE)), [], []
    allocate, extend = policy.allocate, policy.plan_decode_steps

    def follow(step, n):
        fast_forward = extend(step, n)
        return fast_forward and fast_forward._replace(
            take_steps=lambda k, look: (taken.append(k), fast_forward.take_steps(k, look))[1]
        )

    policy.allocate = lambda step, **options: (placed.append(step), allocate(step, **options))[1]
    policy.plan_decode_steps = follow
    costs = cost_model(scenario, PROFILE)
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), Recorder(), "default")
    assert sum(taken) > len(placed)


def test_every_array_of_a_leap_is_cut():
    policy = build_policy(load_scenario("chat"), "oracle")
    policy.open(0, SequencePlan(20, 200, 150))
    policy.allocate([Chunk(0, 0, 20)])
    planned = policy.plan_decode_steps([Chunk(0, 20, 1)], 10)
    head = planned.first_steps(4)
    cut, whole = head.passes[0].groups[0], planned.passes[0].groups[0]
    for value, all_values in zip(cut, whole, strict=True):
        assert len(value) == 4
        assert value.tolist() == all_values[:4].tolist()


def test_a_trigger_learns_as_if_asked_step_by_step():
    states = []
    for fast_forward in (True, False):
        scenario = load_scenario("long-run", workload__requests=60)
        costs = cost_model(scenario, PROFILE)
        policy = build_policy(scenario, "adaptive", costs)
        assert isinstance(policy, UnifiedPolicy)
        drive(
            scenario,
            policy,
            SimulatedBackend(costs, policy.kernel, policy.groups),
            Recorder(),
            "default",
            fast_forward=fast_forward,
        )
        states.append(policy.trigger)
    assert states[0] == states[1]


def test_steps_leap_over_holes_too_short_for_them():
    """From high up each search begins anew from 0, and finds nothing before where the last one ended: a fast-forward
    goes on there, and not where a hole is wide enough."""
    leaped, stepped, held = (build_policy(load_scenario("chat", cache__cells=4096), "contiguous") for _ in range(3))
    for policy in (leaped, stepped, held):
        for start in range(100):
            policy.allocate([Chunk(seq, start, 1) for seq in range(3)])
        policy.free(1)
    held.free(0, 0, 30)
    held.arena.head = 100
    step = [Chunk(0, 100, 1), Chunk(2, 100, 1)]
    planned = leaped.plan_decode_steps(step, 60)
    assert planned is not None
    assert planned.steps == 60
    planned.take_steps(60, False)
    for more in range(60):
        stepped.allocate([chunk._replace(start=100 + more) for chunk in step])
    assert leaped.occupancy().position.tolist() == stepped.occupancy().position.tolist()
    assert leaped.occupancy().owners == stepped.occupancy().owners
    assert held.plan_decode_steps(step, 60) is None


@pytest.mark.parametrize("down", [False, True])
def test_tiles_entered_one_by_one_are_those_found_as_arrays(down, monkeypatch):
    """In a row and with gaps, up and down, beside tiles that hold something and far from them."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        size, seqs, steps = 64 * 40, int(rng.integers(1, 4)), int(rng.integers(2, 60))
        arena = Arena(size)
        cells = rng.permutation(size)[: int(rng.integers(40, 1500))]
        held, free = np.sort(cells[:30]), np.sort(cells[30:])
        steps = min(steps, len(free) // seqs)
        if steps < 1:
            continue
        for seq in range(seqs):
            arena.take(held[seq::seqs], [Chunk(seq, 0, len(held[seq::seqs]))])
        step = [Chunk(seq, len(held[seq::seqs]), 1) for seq in range(seqs)]
        table = (free[::-1] if down else free)[: steps * seqs].reshape(steps, seqs)
        found = []
        for few in (10**6, 0):
            monkeypatch.setattr("policies.fast_forward.tiles._FEW", few)
            found.append([np.asarray(column).tolist() for column in TileMap(arena).plan_steps(step, table)])
        assert found[0] == found[1]
