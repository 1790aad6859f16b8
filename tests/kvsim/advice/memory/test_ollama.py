"""Ollama's variables: what comes nearest to options of llama-server, and what cannot be said."""

import pytest

from kvsim import load_scenario
from kvsim.advice.memory.engine_flags import llamacpp_flags
from kvsim.advice.memory.flag_effects import kv_bytes
from kvsim.advice.memory.ollama import ollama_settings
from kvsim.advice.memory.scenario_memory import plan_scenario
from kvsim.model.memory_shapes import memory_shape

LONGEST = 1500
KINDS = {"cache__type_k": "f16", "cache__type_v": "f16"}
TODAY = {"server": {"slots": 4}, "cache": {"policy": "llama.cpp-b6975", "cells": 8192, "unified": False}}


def asked(model="smollm2", longest=LONGEST, **changes):
    scenario = load_scenario(TODAY, **KINDS | changes)
    made = plan_scenario(scenario, memory_shape(model), "llamacpp")
    return ollama_settings(llamacpp_flags(scenario), made, longest), made


def test_caches_of_their_own_are_told_as_they_are():
    found, made = asked()
    assert found.typed == (
        "OLLAMA_NUM_PARALLEL=4 OLLAMA_CONTEXT_LENGTH=2048 OLLAMA_KV_CACHE_TYPE=f16 OLLAMA_FLASH_ATTENTION=1 "
        "ollama serve"
    )
    by_name = {each.name: each for each in found.effects}
    assert by_name["OLLAMA_CONTEXT_LENGTH"].bytes == kv_bytes(made)
    assert by_name["OLLAMA_CONTEXT_LENGTH"].does.startswith(
        "KV cache 180.00 MiB: 4 slots of 2,048 cells each, 22.50 KiB"
    )
    assert "default 1" in by_name["OLLAMA_NUM_PARALLEL"].does
    assert by_name["OLLAMA_FLASH_ATTENTION"].bytes == 0
    assert set(found.missing) == {"--batch-size"}
    assert found.to_dict()["variables"]["OLLAMA_CONTEXT_LENGTH"] == "2048"


def test_each_of_its_slots_has_room_for_the_longest_request():
    """In a shared cache of 4,096 cells a request may take 1,500, which four caches of 1,024 could not hold."""
    found, made = asked(cache__unified=True, cache__cells=4096)
    variables = found.to_dict()["variables"]
    assert variables["OLLAMA_CONTEXT_LENGTH"] == "1536"
    context = next(each for each in found.effects if each.name == "OLLAMA_CONTEXT_LENGTH")
    assert context.bytes == 1.5 * kv_bytes(made)
    assert found.missing["--kv-unified"].endswith("which takes 1.5 times the KV cache")
    roomy, _ = asked(cache__unified=True, longest=100)
    assert roomy.to_dict()["variables"]["OLLAMA_CONTEXT_LENGTH"] == "2048"
    assert "times" not in roomy.missing["--kv-unified"]


def test_no_slot_is_longer_than_the_model_was_made_for():
    shape = memory_shape("smollm2")
    found, _ = asked(cache__cells=4 * 4 * shape.context)
    assert found.to_dict()["variables"]["OLLAMA_CONTEXT_LENGTH"] == str(shape.context)


@pytest.mark.parametrize(
    ("k", "v", "kind", "why"),
    [
        ("q8_0", "q4_0", "q8_0", "K and V have one type: the wider one"),
        ("q4_0", "f16", "f16", "K and V have one type: the wider one"),
        ("q8_0", "q8_0", "q8_0", None),
        ("f32", "f32", "f32", "it documents f16, q8_0, q4_0 only, and hands f32 on to llama-server"),
    ],
)
def test_k_and_v_have_one_type(k, v, kind, why):
    found, _ = asked(cache__type_k=k, cache__type_v=v)
    assert found.to_dict()["variables"]["OLLAMA_KV_CACHE_TYPE"] == kind
    assert found.missing.get("--cache-type-k") == why


def test_what_no_variable_says_is_named():
    found, _ = asked(
        server__cache_ram=0,
        server__cache_reuse=64,
        server__slot_prompt_similarity=0.5,
        server__cache_idle_slots=False,
        server__context_shift=True,
    )
    assert "LLAMA_ARG_CACHE_RAM=0" in found.missing["--cache-ram"]
    assert "8.00 GiB" in found.missing["--cache-ram"]
    assert found.missing["--cache-reuse"] == "its llama-server reads LLAMA_ARG_CACHE_REUSE=64"
    assert found.missing["--no-cache-idle-slots"] == "its llama-server reads LLAMA_ARG_CACHE_IDLE_SLOTS=0"
    assert {"--slot-prompt-similarity", "--context-shift"} <= set(found.missing)
    assert all(option.startswith("--") for option in found.missing)


def test_windows_are_kept_small_unless_llama_server_is_told():
    scenario = load_scenario(TODAY, **KINDS)
    made = plan_scenario(scenario, memory_shape("gemma-3-27b"), "llamacpp")
    found = ollama_settings(llamacpp_flags(scenario, windows=True), made, LONGEST)
    assert found.missing["--swa-full"] == "its llama-server reads LLAMA_ARG_SWA_FULL=1"
    context = next(each for each in found.effects if each.name == "OLLAMA_CONTEXT_LENGTH")
    assert context.bytes < kv_bytes(made)


def test_scores_are_stored_without_flash_attention():
    found, _ = asked(cache__kernel="masked", cache__cells=65536)
    flash = found.effects[-1]
    assert flash.typed == "OLLAMA_FLASH_ATTENTION=0"
    assert flash.bytes > 0
