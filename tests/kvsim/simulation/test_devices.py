"""Runs on devices: two regimes of passes, what is inferred, and many steps at a time under both."""

import pytest

from kvsim import run
from kvsim.costs.profile import INFERRED_ATTENTION, INFERRED_MOVES
from kvsim.scenario.scenario import load_scenario

pytestmark = pytest.mark.slow

ALL, NONE = 1 << 62, 0
"""Steps at a time: as many as there are, and each placed chunk by chunk."""


def crowded(**changes):
    """Conversations on a device whose cells are too few, so that requests are preempted and cells moved."""
    few = {"cache__cells": 9600, "server__slot_context": 4096, "workload__requests": 40}
    return load_scenario("gpu-chat", **few | changes)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["vllm", "llama-server", "static"])
@pytest.mark.parametrize("policy", ["vllm", "ring", "growing", "full-compaction", "contiguous", "chunked"])
def test_steps_taken_together_on_a_device_are_those_placed_chunk_by_chunk(policy, scheduler):
    scenario = crowded(workload__requests=16, server__scheduler=scheduler, server__async_scheduling=False)
    together, alone = summaries(scenario, policy)
    assert together == alone
    assert together["completed"] > 0


def test_steps_taken_together_are_those_composed_ahead_one_by_one():
    together, alone = summaries(crowded(), "vllm")
    assert together == alone
    assert together["preemptions"] > 0


def summaries(scenario, policy):
    """The summaries of a run that takes many steps at a time, and of one that places each chunk by chunk."""
    return [run(scenario, policy, detail="requests", most_steps=most).summary | {"wall_s": 0} for most in (ALL, NONE)]


def test_every_second_still_has_one_cause():
    result = run(crowded(workload__requests=20), "full-compaction", detail="tables")
    causes = result.causes
    spent = causes.drop(columns=["id", "arrival_s", "e2e_s"]).sum(axis=1)
    assert spent.to_numpy() == pytest.approx(causes["e2e_s"].to_numpy(), rel=1e-9)


def test_the_engines_own_layout_is_measured_and_others_are_inferred():
    assert run(crowded(), "vllm", detail="requests").summary["inferred"] == {}
    moved = run(crowded(workload__requests=20), "full-compaction", detail="requests").summary["inferred"]
    assert moved == {"attention": INFERRED_ATTENTION, "moves": INFERRED_MOVES}
    assert run("chat", "full-compaction", detail="requests").summary["inferred"] == {}


def test_a_compaction_costs_what_copies_at_the_memory_bandwidth_do():
    from kvsim.costs.cost_model import CostModel
    from kvsim.costs.device_profiles import find_device_profile

    cell_bytes = 32 * 2 * 1024 * 2  # Layers, K and V, numbers, bytes.
    costs = CostModel(find_device_profile("llama-3.1-8b", "rtx4090"))
    assert costs.move_runs(3, 1000) == pytest.approx(1000 * 2 * cell_bytes / 1008e9)


def test_a_prompt_beside_decodes_makes_their_cells_dearer():
    from kvsim.costs.device_profiles import find_device_profile
    from kvsim.costs.pass_price import PassPrice
    from policies import Group
    from tests.kvsim.costs.passes import cell_s

    price = PassPrice(find_device_profile("llama-3.1-8b", "rtx4090"), "gather", (Group(0),))
    assert cell_s(price, 32, prompt=512, each=1000) > 1.5 * cell_s(price, 32, each=1000)
