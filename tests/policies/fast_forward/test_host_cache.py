"""Runs in which sequences go to the host and come back, fast-forwarded and step by step, under every such policy."""

import pytest

from kvsim.simulation.run import build_policy
from policies import available
from tests.chats import chats
from tests.policies.fast_forward.harness import assert_alike, outcome

POLICIES = [name for name in available() if build_policy(chats(), name).can_copy_out]
WAYS = {
    "as it comes": {},
    "little room": {"server__cache_ram": 1},
    "no limit, and runs moved": {"server__cache_ram": -1, "server__cache_reuse": 4},
    "idle slots stay": {"server__cache_idle_slots": False, "server__slot_prompt_similarity": 0.5},
    "hardly any cells": {"cache__cells": 700, "server__slot_context": 600},
    "divided, and shifted": {"cache__unified": False, "server__context_shift": True, "server__slot_context": 256},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [name if name in ("contiguous", "streams") else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
def test_copies_of_sequences_are_those_of_single_steps(name, way):
    world = chats(workload__turns={"kind": "fixed", "value": 3}, cache__block_size=1, **WAYS[way])
    together, tables = outcome(world, name, fast_forward=True)
    stepped, others = outcome(world, name, fast_forward=False)
    assert together == stepped
    assert_alike(tables, others)
    assert outcome(world, name, fast_forward=True)[0] == together, "a run depends on its scenario alone"
    counts = together[0]
    assert counts["host_saves"] > 5
    assert counts["host_loads"] > (3 if way != "little room" else 0)


def test_the_policies_of_llama_cpp_are_among_them():
    assert {"contiguous", "streams", "sliding-window", "llama.cpp-b4666", "llama.cpp-b6975"} <= {*POLICIES}
