"""What options do to memory: every option that is printed has a phrase, with the bytes of the memory plan."""

from dataclasses import replace

import pytest

from kvsim import load_scenario
from kvsim.advice.memory.engine_flags import flags_dict, llamacpp_flags
from kvsim.advice.memory.flag_effects import Effect, effect_lines, effects, kv_bytes
from kvsim.advice.memory.scenario_memory import plan_scenario
from kvsim.advice.recommend.search_space import build_search_space
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import plan
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.memory_shapes import memory_shape

SUMMARY = TrafficSummary(100, 700, 500, 400, 200.0, True)
TODAY = {"server": {"scheduler": "llama-server", "slots": 4}, "cache": {"policy": "llama.cpp-b6975", "cells": 8192}}


def told(made, *flags, engine="llamacpp"):
    return {each.name: each for each in effects(engine, flags, made)}


def of_scenario(**changes):
    scenario = load_scenario(TODAY, **changes)
    made = plan_scenario(scenario, memory_shape("smollm2"), "llamacpp")
    return told(made, *llamacpp_flags(scenario, windows=True)), made


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "gemma-3-27b"])
def test_every_option_of_every_setting_has_a_phrase(model):
    space = build_search_space(load_scenario({}), SUMMARY, "both", load_profile("default"), memory_shape(model), None)
    for c in space.candidates[::7]:
        if c.reason:
            continue
        engine = "vllm" if c.engine == "vllm" else "llamacpp"
        lines = effects(engine, c.flags, space.plan(c, 10**10))
        assert [each.name for each in lines] == [name for name, _ in c.flags]
        assert all(each.does and "\n" not in each.does for each in lines)


def test_every_option_of_slots_has_a_phrase():
    stated = {
        "server__cache_reuse": 64,
        "server__slot_prompt_similarity": 0.5,
        "server__n_keep": 4,
        "server__cache_idle_slots": False,
        "server__cache_prompt": False,
        "server__context_shift": True,
    }
    given, _ = of_scenario(**stated)
    assert {"--cache-reuse", "--slot-prompt-similarity", "--keep", "--context-shift"} <= set(given)
    assert all(given[name].bytes == 0 for name in ("--cache-reuse", "--no-cache-prompt", "--no-cache-idle-slots"))


def test_the_cache_has_the_bytes_of_the_plan():
    """30 layers with 3 heads of K and V of 64 numbers, 2 bytes each."""
    given, made = of_scenario(cache__type_k="f16", cache__type_v="f16")
    assert given["--ctx-size"].bytes == 8192 * 30 * 2 * 3 * 64 * 2
    assert given["--ctx-size"].does == "KV cache 180.00 MiB: 8,192 cells of 22.50 KiB"
    assert given["--cache-type-k"].does == "K: 11.25 KiB of each cell"
    assert given["--parallel"].does.startswith(
        "4 slots of 2,048 cells each, a cache for each; output buffer 768.00 KiB"
    )
    buffers = sum(part.bytes for part in made.parts if part.name in ("compute buffer", "input buffer"))
    assert given["--ubatch-size"].bytes == buffers
    shared, _ = of_scenario(cache__unified=True)
    assert shared["--parallel"].does.startswith("4 slots in the same cells")
    assert "--kv-unified" in shared


@pytest.mark.slow
def test_flash_attention_saves_what_scores_take():
    on, made = of_scenario(cache__cells=65536)
    off, _ = of_scenario(cache__cells=65536, cache__kernel="masked")
    saved = replace(made, settings=replace(made.settings, flash_attn=False)).total("llamacpp") - made.total("llamacpp")
    assert saved > 0
    assert (on["--flash-attn"].bytes, off["--flash-attn"].bytes) == (-saved, saved)
    assert "never stored" in on["--flash-attn"].does
    assert "are stored" in off["--flash-attn"].does
    small, _ = of_scenario()
    assert small["--flash-attn"].bytes == 0
    assert "larger here" in small["--flash-attn"].does


@pytest.mark.parametrize(("limit", "size", "said"), [(0, 0, "no host memory"), (8192, 2**33, "up to 8.00 GiB of host")])
def test_a_host_cache_has_its_limit(limit, size, said):
    given, _ = of_scenario(server__cache_ram=limit)
    assert given["--cache-ram"].bytes == size
    assert given["--cache-ram"].does.startswith(said)


def test_a_host_cache_without_a_limit_has_no_bytes():
    given, _ = of_scenario(server__cache_ram=-1)
    assert given["--cache-ram"].bytes is None
    assert "without a limit" in given["--cache-ram"].does


def test_layers_with_a_window_keep_every_token_if_asked():
    made = plan("gemma-3-27b", ctx=8192, swa_full=True, engine="llamacpp")
    small = plan("gemma-3-27b", ctx=8192, engine="llamacpp")
    more = told(made, ("--swa-full", ""), ("--ctx-size", "8192"))
    assert more["--swa-full"].bytes == kv_bytes(made) - kv_bytes(small) > 0
    assert more["--ctx-size"].does.endswith("KiB")
    assert told(small, ("--ctx-size", "8192"))["--ctx-size"].does.endswith(", fewer in layers with a window")


def test_vllm_has_blocks_of_the_plan():
    made = replace(plan("llama-3.1-8b", ctx=4096, parallel=8, batch=2048, engine="vllm"), memory=24 * 2**30)
    given = told(
        made,
        ("--max-model-len", "4096"),
        ("--max-num-batched-tokens", "2048"),
        ("--num-gpu-blocks-override", "100"),
        ("--gpu-memory-utilization", "0.9"),
        ("--tensor-parallel-size", "2"),
        engine="vllm",
    )
    block = 16 * 32 * 2 * 8 * 128 * 2
    assert given["--num-gpu-blocks-override"].bytes == 100 * block
    assert given["--max-model-len"].bytes == 256 * block
    assert given["--gpu-memory-utilization"].bytes == int(24 * 2**30 * 0.9)
    assert given["--max-num-batched-tokens"].bytes == sum(p.bytes for p in made.parts if p.kind == "buffers")
    assert "1/2" in given["--tensor-parallel-size"].does


def test_lines_stand_below_each_other_as_they_are_typed():
    lines = effect_lines(
        [Effect("--kv-unified", "", "one"), Effect("--parallel", "16", "two"), Effect("A", "1", "three")]
    )
    assert lines == ["--kv-unified   one", "--parallel 16  two", "A=1            three"]


def test_a_switch_is_true_in_json():
    assert Effect("--kv-unified", "", "one", 0).to_dict() == {
        "option": "--kv-unified",
        "value": True,
        "does": "one",
        "bytes": 0,
    }
    assert flags_dict((("--kv-unified", ""),)) == {"--kv-unified": True}


def test_layers_on_the_cpu_take_less_of_the_device():
    of = {"machine": {"device": "rtx3060", "weights": "q4_k_m", "n_gpu_layers": 20, "n_cpu_moe": 40}}
    scenario = load_scenario({"model": {"name": "qwen3-30b-a3b"}, **of})
    flags = llamacpp_flags(scenario)
    assert flags[:2] == (("--n-gpu-layers", "20"), ("--n-cpu-moe", "40"))
    made = plan_scenario(scenario, memory_shape("qwen3-30b-a3b"), "llamacpp", weights="q4_k_m")
    found = told(made, *flags)
    assert found["--n-gpu-layers"].bytes < 0
    assert found["--n-cpu-moe"].bytes < -(3 << 30)
    assert "the experts of the first layers in the computer's memory: ≈ " in found["--n-cpu-moe"].does


def test_what_drafts_takes_its_own_memory_or_it_is_said_why_not():
    drafts = {"speculation__acceptance": 0.5}
    ngrams, _ = of_scenario(speculation__method="ngram", **drafts)
    unnamed, _ = of_scenario(speculation__method="draft-model", speculation__share=0.1, **drafts)
    named, made = of_scenario(speculation__method="draft-model", speculation__model="qwen3-0.6b", **drafts)
    _, alone = of_scenario()
    assert (ngrams["--spec-type"].bytes, unnamed["--spec-type"].bytes) == (0, None)
    assert named["--spec-type"].bytes == made.total("llamacpp") - alone.total("llamacpp") > 2**30
    assert kv_bytes(made) == kv_bytes(alone)
