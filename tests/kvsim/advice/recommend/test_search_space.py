"""What is searched: every policy, type and flag that the engine and the profile allow."""

import pytest

from kvsim import load_scenario, recommend
from kvsim.advice.memory.engine_flags import command_line, flags_dict
from kvsim.advice.recommend.candidates import NOW, measured_engine
from policies import available
from tests.kvsim.advice.recommend.worlds import PROFILE, SMALL, space_of


@pytest.mark.slow
def test_only_types_of_k_and_v_that_the_profile_measured_are_tried():
    for room in (10**9, 30_000_000):
        space = space_of("both", memory=room)
        assert {(c.settings["type_k"], c.settings["type_v"]) for c in space.candidates} == {("f32", "f32")}
    narrow = PROFILE.model_copy(update={"type_k": "q8_0", "type_v": "q8_0"})
    space = space_of("both", profile=narrow)
    assert {c.reason for c in space.candidates if c.engine == "vllm"} == {"engine"}
    assert {c.reason for c in space.candidates if c.engine == "llamacpp"} == {""}


@pytest.mark.slow
def test_every_policy_is_searched_or_left_out_with_a_reason():
    everything = space_of("any")
    searched = {family.keys["cache__policy"] for family in everything.families}
    covered = {"streams", "paged", "layer-groups", "uniform-pages"}
    assert searched | set(everything.policies_left_out) | covered >= set(available())
    assert not searched & set(everything.policies_left_out)
    windows = space_of(model="gemma-3-27b")
    assert {c.scenario.cache.window for c in windows.candidates if c.family == "sliding-window"} == {1024}


def test_a_vllm_that_runs_keeps_its_size_of_blocks():
    keys = {"server__scheduler": "vllm", "cache__policy": "vllm", "cache__block_size": 128, "cache__cells": 4096}
    running = {NOW: load_scenario({}, **keys)}
    assert {c.scenario.cache.block_size for c in space_of("vllm", fixed=running).candidates} == {128}
    assert {c.scenario.cache.block_size for c in space_of("vllm").candidates} == {16, 32}


@pytest.mark.slow
def test_flags_agree_with_the_scenario():
    for c in space_of("both", reuse=True).candidates:
        server, cache, flags = c.scenario.server, c.scenario.cache, flags_dict(c.flags)
        if c.engine == "vllm":
            prefix = "--enable-prefix-caching" if c.settings["prefix_cache"] else "--no-enable-prefix-caching"
            chunked = "--enable-chunked-prefill" if server.chunked_prefill else "--no-enable-chunked-prefill"
            assert flags == {
                "--max-model-len": str(c.scenario.slot_context),
                "--max-num-seqs": str(server.slots),
                "--max-num-batched-tokens": str(server.n_batch),
                "--block-size": str(cache.block_size),
                "--num-gpu-blocks-override": str(cache.cells // cache.block_size),
                prefix: True,
                chunked: True,
            }
            assert c.scenario.slot_context >= 700
        else:
            expected = {
                "--ctx-size": str(cache.cells),
                "--parallel": str(server.slots),
                "--batch-size": str(min(server.n_batch, cache.cells)),
                "--ubatch-size": str(server.n_ubatch),
                "--cache-type-k": "f32",
                "--cache-type-v": "f32",
            }
            if cache.policy == "llama.cpp-b4666":
                expected["--defrag-thold"] = f"{cache.threshold:g}"
                assert "b4666 to b4880" in " ".join(c.notes)
            else:
                expected |= {"--flash-attn": "on", "--cache-ram": str(server.cache_ram)}
                if cache.unified:
                    expected["--kv-unified"] = True
                if server.slot_prompt_similarity != 0.1:
                    expected["--slot-prompt-similarity"] = f"{server.slot_prompt_similarity:g}"
            assert flags == expected
            assert cache.cells % (256 * (1 if cache.unified else server.slots)) == 0


@pytest.mark.slow
def test_narrow_values_and_windows_have_their_flags():
    narrow = PROFILE.model_copy(update={"type_k": "q4_0", "type_v": "q4_0"})
    gemma = space_of(profile=narrow, model="gemma-3-27b", memory=18 * 2**30, weights="q4_k_m")
    fit = [c for c in gemma.candidates if not c.reason]
    assert fit
    assert all(("--flash-attn", "on") in c.flags for c in fit if "b4666" not in c.family)
    whole = {c.family for c in fit if "--swa-full" in command_line(c.flags)}
    assert whole
    assert "sliding-window" not in whole


@pytest.mark.slow
def test_the_host_cache_is_searched_where_prompts_share_text():
    for reuse, expected in ((True, {0, 8192}), (False, {0}), (None, {8192})):
        space = space_of(reuse=reuse)
        today = [c for c in space.candidates if c.scenario.server.scheduler == "llama-server"]
        assert {c.scenario.unified for c in today} == {True, False}
        assert {c.settings["cache_ram"] for c in today} == expected
        assert {c.settings["cache_ram"] for c in space.candidates if c not in today} == {None}
        assert len({c.label for c in space.candidates if "host cache on" in c.label}) * 2 <= len(space.candidates) * (
            2 if reuse is None else 1
        )


@pytest.mark.slow
def test_how_alike_prompts_of_a_slot_are_is_searched_where_prompts_share_text():
    base = load_scenario({}, server__slot_prompt_similarity=0.2)
    for reuse, expected in ((True, {0.2, 0.5, 0.9}), (False, {0.2}), (None, {0.2})):
        space = space_of(reuse=reuse, base=base)
        today = [c for c in space.candidates if c.scenario.server.scheduler == "llama-server"]
        assert {c.settings["slot_prompt_similarity"] for c in today} == expected
        assert {c.settings["slot_prompt_similarity"] for c in space.candidates if c not in today} == {None}


@pytest.mark.slow
def test_a_scenarios_own_host_cache_is_searched_too():
    space = space_of(reuse=True, base=load_scenario({}, server__cache_ram=512))
    assert {c.host_bytes for c in space.candidates} == {0, 512 * 2**20, 8 * 2**30}


@pytest.mark.parametrize(
    ("measured", "target"),
    [
        ("numpy", None),
        ("llama-server 0.5.0-dev", "llamacpp"),
        ("llama.cpp b8992", "llamacpp"),
        ("llama-cpp-python 0.3.36", "llamacpp"),
        ("vllm 0.32.0", "vllm"),
        ("vLLM 0.10.0", "vllm"),
    ],
)
def test_the_engine_of_a_profile_is_known_by_its_name(measured, target):
    assert measured_engine(PROFILE.model_copy(update={"engine": measured})) == target


@pytest.mark.slow
def test_the_profile_of_a_live_server_decides_what_is_searched(tmp_path):
    """Neither vLLM nor llama.cpp of early 2025 is what such a user runs."""
    live = PROFILE.model_copy(update={"engine": "llama-server 0.5.0-dev"})
    space = space_of(profile=live)
    assert "llama.cpp-b4666" not in {family.name for family in space.families}
    assert "llama-server 0.5.0-dev" in space.policies_left_out["llama.cpp-b4666"][1]
    (tmp_path / "mine.json").write_text(live.model_dump_json())
    asked = {"slo": "e2e_p95<60s", "requests": 30, "budget": SMALL._replace(screened=2, neighbours=0), "workers": 1}
    found = recommend("batch", profile=str(tmp_path / "mine.json"), **asked)
    assert found.engine == "llamacpp"
    assert {c.engine for c in found.space.candidates} == {"llamacpp"}
    assert any("llama.cpp alone was searched" in line for line in found.limits)
    assert recommend("batch", **asked).engine == "both"


@pytest.mark.slow
def test_fair_rules_have_no_program():
    fair = load_scenario("batch", server__scheduler="llama-server-fair")
    asked = {"slo": "e2e_p95<60s", "requests": 30, "budget": SMALL._replace(screened=2, neighbours=0), "workers": 1}
    for engine, said in (("llamacpp", True), ("vllm", False)):
        found = recommend(fair, engine=engine, **asked)
        assert any("no program has the scheduler llama-server-fair" in line for line in found.limits) == said
