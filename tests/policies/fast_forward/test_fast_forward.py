"""Many decode steps in one event: cells, counts, failures and times are those of single steps."""

import json
from dataclasses import fields
from functools import partial
from itertools import cycle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.run import build_policy, cost_model, drive, run
from policies import Chunk, SequencePlan, available
from policies.cells.arena import Arena
from policies.fast_forward.tiles import TileMap, TileSteps
from policies.layouts.unified import UnifiedPolicy
from tests.policies.fast_forward.harness import PROFILE, assert_alike, outcome, scenarios
from tests.worlds import command

PLANNING = (
    "contiguous",
    "fill-holes",
    "full-compaction",
    "paged",
    "ring",
    "adaptive",
    "threshold-compaction",
    "hf-reserved",
    "growing",
    "oracle",
    "vllm",
    "chunked",
    "vattention",
    "idle-compaction",
    "llama.cpp-b4666",
    "llama.cpp-b6975",
    "streams",
    "sliding-window",
    "prompt-decode-regions",
)
"""Policies that plan decode steps ahead."""
SCHEDULERS = ("llama-server", "llama-server-b4875", "vllm", "static")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios())
def test_fast_forwarding_changes_nothing(name, scenario):
    together, a = outcome(scenario, name, fast_forward=True)
    stepped, b = outcome(scenario, name, fast_forward=False)
    assert together == stepped
    if a is not None:
        assert_alike(a, b)


class AnyFreeCells(UnifiedPolicy):
    """Searches in another way than the class whose plans it would inherit: the highest free cells first."""

    contiguous = False

    def _find_cells(self, chunks):
        n = sum(chunk.n for chunk in chunks)
        free = np.flatnonzero(self.arena.first_owners() < 0)
        return None if len(free) < n else free[-n:]


class PlansInherited(AnyFreeCells):
    """Declares that the plans hold, which they do not."""

    can_fast_forward = True


def test_a_subclass_inherits_no_plans_that_it_does_not_declare():
    assert build_policy(load_scenario("chat"), "contiguous").can_fast_forward
    assert not AnyFreeCells.can_fast_forward
    assert all(build_policy(load_scenario("chat"), name).can_fast_forward for name in PLANNING)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_search_of_ones_own_is_taken_step_by_step(scheduler):
    scenario = load_scenario("chat", workload__requests=30, server__scheduler=scheduler)
    together, stepped = (outcome(scenario, partial(AnyFreeCells, "mine"), fast_forward=f) for f in (True, False))
    assert together[0] == stepped[0]
    assert_alike(together[1], stepped[1])
    if scheduler == "static":
        return  # All free cells are one extent all along: from which end they are taken does not show.
    # The control: taken for plans of its own, those of the class above are another policy's.
    wrong, right = (outcome(scenario, partial(PlansInherited, "mine"), fast_forward=f)[1] for f in (True, False))
    assert_alike(right, stepped[1])
    with pytest.raises(AssertionError):
        assert_alike(wrong, right)


@pytest.mark.parametrize(("name", "scheduler"), list(zip(PLANNING, cycle(SCHEDULERS), strict=False)))
def test_most_steps_are_planned_ahead(name, scheduler):
    """The control: there are fast-forwards at all, and nearly all decode steps are in one."""
    scenario = load_scenario("chat", workload__requests=20, server__scheduler=scheduler, cache__cells=8192)
    policy = build_policy(scenario, name)
    placed = []
    allocate = policy.allocate
    policy.allocate = lambda step, **options: (placed.append(step), allocate(step, **options))[1]
    costs = cost_model(scenario, PROFILE)
    result, _ = drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), Recorder(), PROFILE)
    # A threshold that is just exceeded asks for a compaction at every step; where several sequences decode, each of
    # these moves something.
    assert len(placed) < len(result.passes) / (3 if name != "threshold-compaction" else 2)


def test_the_command_line_can_be_asked_to_step():
    planned_ahead, stepped = (
        json.loads(command("run", "chat", "--requests", "20", "--json", *more).stdout)
        for more in ([], ["--no-fast-forward"])
    )
    assert planned_ahead["e2e_s"] == pytest.approx(stepped["e2e_s"], rel=1e-12)
    assert planned_ahead["cache"] == pytest.approx(stepped["cache"], rel=1e-12)
    assert planned_ahead["forward_passes"] == stepped["forward_passes"]


def test_a_run_can_be_asked_to_step():
    scenario = load_scenario("chat", workload__requests=20)
    a, b = (run(scenario, "paged", fast_forward=fast_forward).summary for fast_forward in (True, False))
    assert a["forward_passes"] == b["forward_passes"]
    assert a["e2e_s"]["p99"] == pytest.approx(b["e2e_s"]["p99"], rel=1e-12)


@pytest.mark.parametrize("name", PLANNING)
def test_a_plan_changes_nothing_until_it_is_taken(name):
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
    "several passes, all cells": ("streams", {"kernel": "masked"}),
    "a window's cells overwritten": ("sliding-window", {"window": 16}),
    "windows in streams": ("sliding-window", {"window": 16, "unified": False}),
    "one cache of windows": ("sliding-window", {"window": 16, "unified": True}),
    "one cache of windows, all cells": ("sliding-window", {"window": 16, "unified": True, "kernel": "masked"}),
    "windows in streams, all cells": ("sliding-window", {"window": 16, "unified": False, "kernel": "masked"}),
    "from hole to hole": ("contiguous", {}),
    "any free cells": ("llama.cpp-b6975", {}),
    "any free cells, all read": ("llama.cpp-b6975", {"kernel": "masked"}),
    "downwards": ("prompt-decode-regions", {"sort_batch": True}),
    "tiles": ("contiguous", {"kernel": "tiled"}),
    "tiles that are moved": ("adaptive", {"kernel": "tiled"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["llama-server", "llama-server-b4875", "vllm"])
@pytest.mark.parametrize("way", WAYS)
def test_fast_forwards_along_every_kind_of_cells(way, scheduler):
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
    together, a = outcome(scenario, name, fast_forward=True)
    stepped, b = outcome(scenario, name, fast_forward=False)
    assert together == stepped
    assert a is not None
    assert_alike(a, b)
    policy, placed, taken = build_policy(scenario, name, cost_model(scenario, PROFILE)), [], []
    allocate, plan = policy.allocate, policy.plan_decode_steps

    def follow(step, n):
        planned = plan(step, n)
        return planned and planned._replace(
            take_steps=lambda k, look: (taken.append(k), planned.take_steps(k, look))[1]
        )

    policy.allocate = lambda step, **options: (placed.append(step), allocate(step, **options))[1]
    policy.plan_decode_steps = follow
    costs = cost_model(scenario, PROFILE)
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), Recorder(), PROFILE)
    assert sum(taken) > len(placed)


def test_every_array_of_a_plan_is_cut():
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
            PROFILE,
            fast_forward=fast_forward,
        )
        states.append(policy.trigger)
    assert states[0] == states[1]


def test_steps_pass_over_holes_too_short_for_them():
    """From high up each search begins anew from 0, and finds nothing before where the last one ended: a fast-forward
    goes on there, and not where a hole is wide enough."""
    planned_ahead, stepped, held = (
        build_policy(load_scenario("chat", cache__cells=4096), "contiguous") for _ in range(3)
    )
    for policy in (planned_ahead, stepped, held):
        for start in range(100):
            policy.allocate([Chunk(seq, start, 1) for seq in range(3)])
        policy.free(1)
    held.free(0, 0, 30)
    held.arena.head = 100
    step = [Chunk(0, 100, 1), Chunk(2, 100, 1)]
    planned = planned_ahead.plan_decode_steps(step, 60)
    assert planned is not None
    assert planned.steps == 60
    planned.take_steps(60, False)
    for more in range(60):
        stepped.allocate([chunk._replace(start=100 + more) for chunk in step])
    assert planned_ahead.occupancy().position.tolist() == stepped.occupancy().position.tolist()
    assert planned_ahead.occupancy().owners == stepped.occupancy().owners
    assert held.plan_decode_steps(step, 60) is None


@given(start=st.integers(0, 300), n=st.integers(1, 150), steps=st.integers(1, 90), prompt=st.integers(1, 400))
def test_tiles_entered_by_consecutive_cells_are_those_of_any_cells(start, n, steps, prompt):
    size = 64 * 300
    reads = []
    for kind in (range, np.arange):
        arena = Arena(size)
        arena.take(range(start, start + prompt), [Chunk(0, 0, prompt)])
        for seq in range(1, n):
            arena.take(range(size - seq, size - seq + 1), [Chunk(seq, 0, 1)])
        first = start + prompt
        planned = TileSteps(TileMap(arena), range(n), kind(first, first + n * steps))
        reads.append([column.tolist() for column in planned.reads()])
        assert planned.most_after(steps) == reads[-1][-1][-1]
    assert reads[0] == reads[1]


@pytest.mark.parametrize("down", [False, True])
def test_tiles_entered_in_steps_are_those_of_the_cells(down):
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
        ahead, afterwards = TileMap(arena), []
        planned = TileSteps(ahead, range(seqs), table.ravel())
        for k in range(steps):
            arena.take(table[k], [chunk._replace(start=chunk.start + k) for chunk in step])
            afterwards.append(TileMap(arena).reads(step))
        for k, (reads, *sums) in enumerate(zip(afterwards, *planned.reads(), strict=True)):
            scanned, useful, runs = (int(each.sum()) for each in (reads.scanned, reads.useful, reads.runs))
            assert [scanned, useful, runs, scanned, int(reads.scanned.max())] == [int(each) for each in sums], k
        planned.take(steps)
        assert [ahead.counts(seq) for seq in range(seqs)] == [TileMap(arena).counts(seq) for seq in range(seqs)]
