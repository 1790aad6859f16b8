"""llama.cpp's cells equal the policy's after every step of whole scenarios."""

import numpy as np
import pytest

from kvsim.scenario.scenario import load_scenario
from real_engine.llamacpp import POLICIES, Divergence
from tests.real_engine.llamacpp.conftest import WINDOW
from tests.real_engine.llamacpp.runs import backend_of, run
from tests.worlds import scenario

pytestmark = [pytest.mark.llama, pytest.mark.slow]

ERA_OF = {policy: era for era, names in POLICIES.items() for policy in names}
PLAIN = [policy for policy in ERA_OF if policy != "sliding-window"]
BUILTIN = {
    "chat": {"requests": 115, "cells": {"A": 2048, "B": 1024}, "slot_context": 512},
    "long-run": {"requests": 165, "cells": {"A": 3072, "B": 1536}, "slot_context": 1400},
}
STREAM = 256
"""Cells of each slot where slots have separate streams."""


def padding(era, kernel):
    """Number of cells of which llama.cpp makes multiples."""
    return 256 if era == "B" or kernel == "tiled" else 32


def builtin(name, era, kernel, *, unified=True, spare=0, **keys):
    """A built-in scenario with fewer, faster requests and fewer cells, ``spare`` of them in each stream."""
    its = BUILTIN[name]
    fast = {"workload__requests": its["requests"], "workload__rate": 20.0}
    made = load_scenario(name, **fast | {"cache__kernel": kernel} | keys)
    return load_scenario(
        made,
        cache__cells=its["cells"][era] if unified else (STREAM + spare) * made.server.slots,
        server__slot_context=its["slot_context"] if unified else STREAM,
        cache__unified=unified,
        cache__pad=padding(era, kernel),
    )


@pytest.mark.parametrize("kernel", ["masked", "tiled"])
@pytest.mark.parametrize("policy", PLAIN)
@pytest.mark.parametrize("name", BUILTIN)
def test_cells_agree_after_every_step_of_a_built_in_scenario(model, only, name, policy, kernel):
    era = ERA_OF[policy]
    only(era)
    backend = backend_of(model, builtin(name, era, kernel, unified=policy != "streams"), policy)
    seen = run(backend)
    assert backend.compared.steps > 350
    assert len(backend.texts) > 90
    if policy == "streams":
        # Each slot has its own cells, and no request is admitted that does not fit into them.
        assert backend.compared.streams > 1.2 * backend.compared.steps
    else:
        assert seen.counts.cache.failed_allocations > 10
        assert seen.counts.cache.batch_splits > 5
    assert (seen.counts.cache.compactions > 2) == (era == "A")


@pytest.mark.parametrize("kernel", ["masked", "tiled"])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "divided"])
@pytest.mark.parametrize("name", BUILTIN)
def test_cells_of_both_caches_agree_where_half_of_the_layers_have_a_window(windowed, name, unified, kernel):
    keys = {"cache__window": WINDOW, "server__slots": 8}
    asked = builtin(name, "B", kernel, unified=unified, spare=256, **keys)
    backend = backend_of(windowed, asked, "sliding-window")
    seen = run(backend)
    assert backend.compared.steps > 350
    assert len(backend.texts) >= 100
    window = backend.policy.inner.caches[1]
    assert window.window == WINDOW
    assert window.size < backend.policy.inner.caches[0].size
    # llama.cpp does not search the second cache if the first has no slot.
    assert backend.compared.streams > 1.6 * backend.compared.steps
    if unified:
        assert seen.counts.cache.failed_allocations > 2


SERVER_OF = {"A": "llama-server-b4875", "B": "llama-server"}
"""The server of each era; that of era A cuts prompts that are longer than a slot."""


def any_world(rng, era, policy):
    """A random scenario that llama.cpp supports: few cells, bursts, and all schedulers."""
    streams = policy == "streams"
    slots = int(rng.choice([1, 2, 5, 11, 16]))
    kernel = str(rng.choice(["masked", "tiled"]))
    pad = padding(era, kernel)
    cells = 256 * slots if streams else pad * int(rng.integers(512 // pad, 1024 // pad + 1))
    longest = cells // slots if streams else int(rng.integers(30, 200))
    n_batch = int(rng.choice([32, 100, 256]))
    return scenario(
        name="any",
        seed=int(rng.integers(1 << 30)),
        workload={
            "kind": "gamma",
            "rate": float(rng.choice([10.0, 60.0])),
            "cv": 3.0,
            "requests": 30,
            "prompt_tokens": {
                "kind": "lognormal",
                "mu": 3.5,
                "sigma": 1.2,
                "min": 1,
                "max": longest - 2 if era == "B" else 400,
            },
            "output_tokens": {"kind": "lognormal", "mu": 3.5, "sigma": 1.2, "min": 1, "max": 250},
        },
        model={"name": "tiny"},
        server={
            "scheduler": str(rng.choice(["llama-server", SERVER_OF[era], "vllm", "static"])),
            "slots": slots,
            "n_batch": n_batch,
            "n_ubatch": int(rng.choice([n_batch, 17])),
            "slot_context": longest,
            "context_shift": bool(rng.integers(2)),
            "n_keep": int(rng.integers(0, 20)),
            "keep_idle_slots": bool(rng.integers(2)),
        },
        cache={
            "cells": cells,
            "unified": not streams,
            "pad": pad,
            "kernel": kernel,
            "threshold": float(rng.choice([0.0, 0.1])),
        },
    )


@pytest.mark.parametrize("policy", PLAIN)
def test_cells_agree_after_every_step_of_random_scenarios(model, only, policy):
    """Some events are rare, so they are counted over all scenarios."""
    only(ERA_OF[policy])
    met = {"schedulers": set(), "failed": 0, "shifts": 0, "preemptions": 0, "steps": 0}
    for seed in range(10):
        world = any_world(np.random.default_rng(seed), ERA_OF[policy], policy)
        backend = backend_of(model, world, policy)
        try:
            seen = run(backend)
        except Divergence as e:
            raise AssertionError(f"world {seed}: {e}\n{world.to_toml()}") from e
        met["schedulers"].add(world.server.scheduler)
        met["failed"] += seen.counts.cache.failed_allocations
        met["shifts"] += seen.counts.context_shifts
        met["preemptions"] += seen.counts.preemptions
        met["steps"] += backend.compared.steps
    assert met["schedulers"] == {"llama-server", SERVER_OF[ERA_OF[policy]], "vllm", "static"}
    assert met["steps"] > 1000
    assert met["shifts"] > 10
    assert policy == "streams" or (met["failed"] > 20 and met["preemptions"] > 5)
