"""The step loop: however many steps it takes at a time, and whoever places them, a run is the same to the last bit."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import DETAILS, Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy, cost_model
from kvsim.simulation.step_loop import delays_until
from policies import available
from policies.layouts.arena_placement import ArenaPlacement
from policies.layouts.unified import UnifiedPolicy
from tests.chats import chats
from tests.kvsim.simulation.random_runs import PROFILE, outcome, scenarios

ALL, ONE, NONE = 1 << 62, 1, 0
"""Steps at a time: as many as there are, one by one, and each placed chunk by chunk."""
SCHEDULERS = ("llama-server", "llama-server-fair", "llama-server-b4875", "vllm", "vllm", "static")
WITHOUT_RULE: tuple[str, ...] = ()
"""Presets that place every step chunk by chunk."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=scenarios(schedulers=SCHEDULERS), detail=st.sampled_from(DETAILS))
def test_any_number_of_steps_at_a_time_gives_the_same_run(name, scenario, detail):
    together = outcome(scenario, name, most_steps=ALL, detail=detail)
    assert outcome(scenario, name, most_steps=ONE, detail=detail) == together
    assert outcome(scenario, name, most_steps=NONE, detail=detail) == together


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paged", "vllm", "contiguous", "llama.cpp-b6975", "ring", "streams"])
@pytest.mark.parametrize("scheduler", ["vllm", "llama-server"])
def test_chats_are_the_same_run_however_their_steps_are_taken(name, scheduler):
    """A quick one of the above, for every change."""
    scenario = load_scenario("chat", workload__requests=25, server__scheduler=scheduler, cache__cells=1500)
    together = outcome(scenario, name, most_steps=ALL)
    assert outcome(scenario, name, most_steps=ONE) == together
    assert outcome(scenario, name, most_steps=NONE) == together


@pytest.mark.slow
def test_a_sequence_that_is_put_back_to_wait_leaves_both_caches_of_a_sliding_window():
    world = load_scenario(
        "chat",
        workload__requests=40,
        workload__rate=100.0,
        server__scheduler="static",
        server__slots=4,
        server__slot_context=200,
        cache__cells=320,
        cache__window=16,
        cache__unified=True,
    )
    together = outcome(world, "sliding-window")
    assert outcome(world, "sliding-window", most_steps=NONE) == together
    assert together[0].preemptions > 5


@pytest.mark.parametrize("most_steps", [ONE, NONE])
def test_the_span_falls_where_another_sequence_gives_up_the_highest_block(most_steps):
    """With steps composed ahead, the blocks of a request that has ended go while rows are written."""

    def tokens(mu, most):
        return {"kind": "lognormal", "mu": mu, "sigma": 1.0 if most == 100 else 0.8, "min": 1, "max": most}

    workload = {"kind": "poisson", "requests": 4, "rate": 2.0}
    workload |= {"prompt_tokens": tokens(3.5, 100), "output_tokens": tokens(4.5, 200)}
    server = {"scheduler": "vllm", "slots": 3, "n_batch": 400, "n_ubatch": 4, "slot_context": 160}
    cache = {"cells": 192, "block_size": 4, "window": 48, "prefix_cache": False, "free_order": "0.22.1"}
    sections = {"workload": workload, "server": {**server, "async_scheduling": True}, "cache": cache}
    world = load_scenario({"name": "random", "seed": 7, **sections})
    together = outcome(world, "paged-window", detail="cache")
    assert outcome(world, "paged-window", most_steps=most_steps, detail="cache") == together


CROWDED = (
    *("contiguous", "fill-holes", "full-compaction", "adaptive", "threshold-compaction", "idle-compaction"),
    *("llama.cpp-b4666", "llama.cpp-b6975", "streams", "sliding-window", "hybrid", "prompt-decode-regions"),
    *("paged", "vllm", "paged-window", "growing", "ring"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROWDED)
def test_a_crowded_cache_is_the_same_run(name):
    """Batches that are cut, moves, windows and failures for 100 requests, under the preset's own scheduler."""
    scenario = load_scenario("chat", workload__requests=100)
    assert outcome(scenario, name, most_steps=NONE, detail="cache") == outcome(scenario, name, detail="cache")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in available() if name not in WITHOUT_RULE])
@pytest.mark.parametrize("detail", ["requests", "tables"])
def test_hardly_any_step_is_placed_chunk_by_chunk(name, detail):
    """The control: otherwise the above would compare single steps with themselves."""
    tokens = {"kind": "lognormal", "mu": 4.5, "sigma": 0.5, "min": 1, "max": 250}
    workload = {"kind": "poisson", "requests": 30, "rate": 20.0, "prompt_tokens": tokens, "output_tokens": tokens}
    server = {"scheduler": "vllm", "slots": 20, "n_batch": 400, "n_ubatch": 400, "slot_context": 512}
    cache = {"cells": 16_000, "window": 48, "unified": True}
    scenario = load_scenario({"workload": workload, "server": server, "cache": cache})
    costs = cost_model(scenario, PROFILE)
    policy, recorder = build_policy(scenario, name, costs), Recorder(detail=detail)
    policy.allocate = Mock(side_effect=policy.allocate)
    drive(scenario, policy, SimulatedBackend(costs, policy.kernel, policy.groups), recorder, PROFILE)
    assert recorder.counts.forward_passes > 500
    # A step with a prompt may be.
    assert policy.allocate.call_count < 0.15 * recorder.counts.forward_passes


class HighestFree(ArenaPlacement):
    """The highest free cells first."""

    contiguous = False

    def find(self, row_tokens, chunks):
        n = row_tokens + sum(chunk.n for chunk in chunks)
        free = np.flatnonzero(self.arena.first_owners() < 0)
        return None if len(free) < n else free[-n:]


class AnyFreeCells(UnifiedPolicy):
    """Searches in another way than the class whose rule it would inherit."""

    placing = HighestFree


class RuleInherited(AnyFreeCells):
    """Declares that the rule holds, which it does not."""

    has_placement_rule = True


def test_a_subclass_inherits_no_rule_that_it_does_not_declare():
    assert build_policy(load_scenario("chat"), "contiguous").has_placement_rule
    assert not AnyFreeCells.has_placement_rule


@pytest.mark.slow
def test_a_search_of_ones_own_is_asked_step_by_step():
    scenario = load_scenario("chat", workload__requests=30, server__scheduler="vllm")
    right = outcome(scenario, partial(AnyFreeCells, "mine"), most_steps=NONE)
    assert outcome(scenario, partial(AnyFreeCells, "mine")) == right
    # The control: with the rule of the class above it is another policy.
    assert outcome(scenario, partial(RuleInherited, "mine")) != right


WAYS = {
    "as it comes": {},
    "little room": {"server__cache_ram": 1},
    "no limit, and runs moved": {"server__cache_ram": -1, "server__cache_reuse": 4},
    "idle slots stay": {"server__cache_idle_slots": False, "server__slot_prompt_similarity": 0.5},
    "hardly any cells": {"cache__cells": 700, "server__slot_context": 600},
    "divided, and shifted": {"cache__unified": False, "server__context_shift": True, "server__slot_context": 256},
}
COPIED_OUT = [name for name in available() if build_policy(chats(), name).can_export]
"""Policies whose sequences go to the host as a whole."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [name if name in ("contiguous", "streams") else pytest.param(name, marks=pytest.mark.slow) for name in COPIED_OUT],
)
def test_sequences_that_go_to_the_host_and_back_do_so_in_the_same_steps(name, way):
    world = chats(workload__turns={"kind": "fixed", "value": 3}, cache__block_size=1, **WAYS[way])
    together = outcome(world, name)
    assert outcome(world, name, most_steps=ONE) == together
    assert outcome(world, name, most_steps=NONE) == together
    counts = together[0].host
    assert counts.saves >= 5
    assert counts.loads > (3 if way != "little room" else 0)


def test_the_policies_of_llama_cpp_copy_sequences_out():
    assert {"contiguous", "streams", "sliding-window", "llama.cpp-b4666", "llama.cpp-b6975"} <= {*COPIED_OUT}


@given(st.floats(0, 1e5), st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
@example(0.0002946070419514067, [0.05])
def test_a_clock_that_jumps_over_steps_shows_what_one_that_takes_each_does(now, steps):
    at_s = now
    for seconds in steps:
        at_s += seconds
    clock = now
    for delay in delays_until(now, at_s):
        clock += delay
    assert clock == at_s
