"""A policy of an engine brings the engine's scheduler, and on a device its sizes and times, unless one is named."""

import json

import pytest

import kvsim
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.set_up import NothingFits
from tests.worlds import command

TEAM = """
[workload]
kind = "sessions"
sessions = 6
turns = { kind = "fixed", value = 3 }
system_tokens = { kind = "fixed", value = 300 }
[model]
name = "llama-3.1-8b"
"""
OWN = {
    "llama.cpp-b4666": "llama-server-b4875",
    "llama.cpp-b6975": "llama-server",
    "streams": "llama-server",
    "sliding-window": "llama-server",
    "vllm": "vllm",
    "paged": "llama-server",
}


@pytest.mark.parametrize("start", [{}, {"cache__policy": "vllm"}, {"cache__policy": "llama.cpp-b4666"}])
def test_a_preset_brings_its_scheduler_unless_one_is_named(start):
    for policy, scheduler in OWN.items():
        assert load_scenario({}, **{**start, "cache__policy": policy}).server.scheduler == scheduler
        assert load_scenario({}, **start).under(policy).server.scheduler == scheduler
        for named in ("static", "llama-server"):
            assert load_scenario({}, **start, server__scheduler=named).under(policy).server.scheduler == named


def test_on_a_device_all_follows_the_engine():
    base = load_scenario("chat", model="llama-3.1-8b", device="rtx4090")
    llama, vllm = base.under("llama.cpp-b6975"), base.under("vllm")
    alone = load_scenario("chat", model="llama-3.1-8b", device="rtx4090", machine__engine="llamacpp")
    assert (llama.server, llama.cache.cells, llama.machine.profile) == (
        alone.server,
        alone.cache.cells,
        alone.machine.profile,
    )
    assert (vllm.server, vllm.cache, vllm.machine) == (base.server, base.cache, base.machine)
    assert llama.cache.cells != vllm.cache.cells


def test_another_engine_leaves_the_scenarios_own_behind():
    """Not the device's slots under the scenario's policy."""
    moved = load_scenario("agents", model="llama-3.1-8b", device="rtx4090", machine__engine="vllm")
    assert (moved.server.scheduler, moved.cache.policy, moved.server.slots) == ("vllm", "vllm", 256)
    table = {"model": {"name": "llama-3.1-8b"}, "machine": {"device": "rtx4090", "engine": "vllm"}}
    for section, key, name in (("cache", "policy", "streams"), ("server", "scheduler", "llama-server")):
        with pytest.raises(UserError, match=rf"machine.engine is 'vllm', and {section}.{key} is '{name}', of another"):
            load_scenario({**table, section: {key: name}})


@pytest.mark.slow
def test_a_comparison_of_engines_compares_engines(tmp_path):
    file = tmp_path / "team.toml"
    file.write_text(TEAM)
    policies = ["-p", "llama.cpp-b6975", "-p", "streams", "-p", "vllm"]
    done = command("compare", str(file), "--device", "rtx4090", *policies, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "\nscheduler llama-server, 49,152 cells, 4 slots: llama.cpp-b6975 (llama.cpp b6975), streams" in done.stdout
    assert "\nscheduler vllm, 44,176 cells, 256 slots: vllm (vLLM 0.33.0)\n" in done.stdout
    found = {run["policy"]: run for run in json.loads((tmp_path / "team" / "comparison.json").read_text())["policies"]}
    named = tmp_path / "named.toml"
    named.write_text(TEAM + '[server]\nscheduler = "llama-server"\n')
    for policy in ("llama.cpp-b6975", "streams"):
        alone = kvsim.run(load_scenario(named, device="rtx4090"), policy).summary
        assert alone["prefix"]["hit_rate"] == found[policy]["prefix"]["hit_rate"] > 0.1
        assert alone["tpot_s"] == found[policy]["tpot_s"]
    again = kvsim.compare(tmp_path / "team" / "scenario.toml", list(found), snapshots=False)
    assert [result.summary["e2e_s"] for result in again.results] == [run["e2e_s"] for run in found.values()]


NOTHING_FITS = {"workload": {"requests": 5, "prompt_tokens": {"kind": "fixed", "value": 600}}}
NOTHING_FITS["workload"]["output_tokens"] = {"kind": "fixed", "value": 50}


@pytest.mark.parametrize(
    ("policy", "keys", "what"),
    [
        ("llama.cpp-b6975", {"cache__unified": False}, {"server__slots": 33}),
        ("llama.cpp-b6975", {"cache__unified": False}, {"cache__unified": True}),
        ("streams", {}, {"server__slots": 33}),
        ("streams", {"cache__cells": 500}, {"cache__cells": 128 * 650}),
        ("vllm", {"cache__cells": 500}, {"cache__cells": 656 + 16}),
        ("contiguous", {"server__slot_context": 600}, {"server__slot_context": 651}),
    ],
)
def test_where_nothing_can_run_one_line_says_so_and_what_would_do(policy, keys, what):
    world = load_scenario(NOTHING_FITS, server__slots=128, **{"cache__cells": 22016, **keys})
    with pytest.raises(NothingFits, match=rf"no request can run under {policy}: the shortest prompt has 600 ") as told:
        kvsim.run(world, policy)
    ((key, value),) = what.items()
    assert key.replace("__", ".") in str(told.value)
    assert value is True or f"{value:,}" in str(told.value) or "more than 600" in str(told.value)
    assert kvsim.run(load_scenario(world, **what), policy).summary["failed"] == 0


def test_models_of_engines_keep_k_and_v_as_engines_do():
    """K and V are kept as the memory plan says; the NumPy engine's own models stay in f32."""
    assert load_scenario("chat").cache.type_k == "f32"
    world = load_scenario("chat", model="llama-3.1-8b")
    assert (world.cache.type_k, world.cache.type_v, world.cell_bytes) == ("f16", "f16", 131072)
    assert load_scenario("chat", model="llama-3.1-8b", cache__type_k="f32").cache.type_v == "f16"
