"""What is said of command lines of servers, and flags of engines given to ``kvsim plan``."""

import json

import pytest

from kvsim.advice.memory.check import check
from kvsim.advice.memory.command_line import read_command
from kvsim.costs.memory_plan import plan
from kvsim.errors import UserError
from tests.kvsim.cli.answers import complaint, succeeded
from tests.worlds import command

LLAMA = "llama-server -m Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"
VLLM = "vllm serve meta-llama/Llama-3.1-8B-Instruct"


def on_4090(line, **given):
    return check(line, device="rtx4090", **given)


def said(found, part):
    return [line for line in (*found.gives, *found.misleading, *found.changes, *found.assumed) if part in line]


# Reading


def keys_of(line, context=131072, memory=None):
    return read_command(line).scenario_keys(context, memory)


def test_a_llama_server_has_the_cells_slots_and_types_that_are_typed():
    keys = keys_of(f"{LLAMA} -c 8192 -np 4 -ctk q8_0 -fa off --no-cache-prompt -sps 0.3")
    assert keys == {
        **{"server__scheduler": "llama-server", "server__slots": 4, "cache__unified": False, "cache__cells": 8192},
        **{"cache__type_k": "q8_0", "cache__kernel": "masked", "cache__policy": "llama.cpp-b6975"},
        **{"server__cache_prompt": False, "server__slot_prompt_similarity": 0.3},
    }


def test_what_a_llama_server_is_not_told_is_its_own_or_left_to_the_device():
    keys = keys_of("llama-server -hf ggml-org/gemma-3-4b-it-GGUF:Q4_K_M -np -1 -c 0")
    assert (keys["server__slots"], keys["cache__unified"], "cache__cells" in keys) == (4, True, False)


def test_ollama_starts_a_llama_server_with_a_cache_for_each_request():
    keys = keys_of("OLLAMA_NUM_PARALLEL=3 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve", memory=24 << 30)
    assert (keys["server__slots"], keys["cache__unified"], keys["cache__cells"]) == (3, False, 3 * 32768)
    assert (keys["cache__type_k"], keys["cache__type_v"]) == ("q8_0", "q8_0")


def test_a_vllm_is_read_and_the_rest_left_to_the_device():
    assert keys_of(f"{VLLM} --max_num_seqs=64 --kv-cache-dtype fp8 --no-enable-prefix-caching") == {
        **{"server__scheduler": "vllm", "cache__policy": "vllm", "server__slots": 64, "cache__prefix_cache": False},
        **{"cache__type_k": "fp8", "cache__type_v": "fp8"},
    }
    with pytest.raises(UserError, match="--kv-cache-dtype 'q4'; auto and fp8 are accepted"):
        keys_of(f"{VLLM} --kv-cache-dtype q4")


def test_a_command_is_read_with_what_starts_it_and_its_variables():
    line = read_command(
        f"sudo LLAMA_ARG_N_PARALLEL=3 LLAMA_ARG_CTX_SIZE=9 docker run x /app/{LLAMA} -c=1024 -ctk q8_0 \\\n -kvu"
    )
    assert dict(line.flags) == {
        "--parallel": "3",
        "--ctx-size": "1024",
        "--model": "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        "--cache-type-k": "q8_0",
        "--kv-unified": "",
    }
    line = read_command("python3 -m vllm.entrypoints.openai.api_server --model x/y --max_model_len 32K -tp 2")
    assert (line.program, line.title) == ("vllm", "x/y")
    assert line.plan_arguments(None, None)["ctx"] == 32768
    assert line.plan_arguments(None, None)["tensor_parallel"] == 2
    assert read_command("OLLAMA_NUM_PARALLEL=4").program == "ollama"


@pytest.mark.parametrize(
    ("line", "model", "weights"),
    [
        (LLAMA, "llama-3.1-8b", "q4_k_m"),
        ("llama-server -hf bartowski/Qwen2.5-32B-Instruct-GGUF:Q6_K", "qwen2.5-32b", "q6_k"),
        ("llama-server -hf ggml-org/gpt-oss-20b-GGUF -hff gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b", "mxfp4"),
        ("ollama run llama3.1:8b", "llama-3.1-8b", "q4_k_m"),
        ("ollama run qwen3:14b-q8_0", "qwen3-14b", "q8_0"),
        (f"{VLLM} --quantization fp8", "llama-3.1-8b", "fp8"),
        (VLLM, "llama-3.1-8b", None),
    ],
)
def test_the_model_and_its_weights_are_those_that_the_command_names(line, model, weights):
    found = check(line, memory="80GiB")
    assert (found.made.shape.name, found.made.settings.weights) == (model, weights)


# llama-server


def test_the_context_is_the_total_of_all_slots():
    """65,536 / 12 is 5,461, which llama.cpp rounds up to 5,632."""
    found = on_4090(f"{LLAMA} -c 65536 -np 12", users=12, tokens=6300)
    assert found.made == plan(
        "llama-3.1-8b", ctx=5632, parallel=12, weights="q4_k_m", engine="llamacpp", device="rtx4090"
    )
    assert said(found, "up to 5,632 tokens of its own")
    assert said(found, "-c 65536 is the total of 12 slots")
    assert said(found, "a request of 6,300 tokens does not fit")
    assert said(found, "-c 76800: 6,400 tokens for each slot, which fits")
    assert not said(on_4090(f"{LLAMA} -c 65536 -np 12 -kvu"), "is the total")
    assert said(on_4090(f"{LLAMA} -c 65536 -np 12 -kvu"), "up to 65,536 tokens of one cache of 65,536")
    assert not said(on_4090(f"{LLAMA} -c 65536 -np 12", tokens=5632), "does not fit")


def test_without_a_context_llama_server_takes_what_fits():
    found = on_4090("llama-server -hf bartowski/Qwen2.5-32B-Instruct-GGUF")
    assert found.made.fits("llamacpp", found.made.memory)
    assert said(found, f"without -c it takes what fits of the model's {found.made.shape.context:,} tokens")
    assert found.made.settings.kv_unified
    assert not on_4090("llama-server -hf bartowski/Qwen2.5-32B-Instruct-GGUF --fit off").starts


def test_a_quantised_v_needs_flash_attention():
    found = on_4090(f"{LLAMA} -c 8192 -np 1 -fa off -ctk q8_0 -ctv q8_0")
    assert not found.starts
    assert "it does not start: a V in q8_0 needs flash attention, which is off" in found.gives
    assert "-fa on" in found.changes
    assert on_4090(f"{LLAMA} -c 8192 -np 1 -ctk q8_0 -ctv q8_0").starts
    assert on_4090(f"{LLAMA} -c 8192 -np 1 -fa off -ctk q8_0").starts


def test_cuda_has_attention_for_k_and_v_alike_only():
    for types, warned in (("-ctk q8_0", 1), ("-ctk q5_1 -ctv q5_1", 1), ("-ctk q8_0 -ctv q8_0", 0), ("", 0)):
        assert len(said(on_4090(f"{LLAMA} -c 8192 -np 1 {types}"), "GGML_CUDA_FA_ALL_QUANTS")) == warned
    assert "-ctk q8_0 -ctv q8_0: both alike" in on_4090(f"{LLAMA} -c 8192 -np 1 -ctk q8_0").changes
    assert not said(check(f"{LLAMA} -c 8192 -np 1 -ctk q8_0", device="m4-max"), "GGML_CUDA_FA_ALL_QUANTS")


def test_a_host_cache_too_small_for_a_prompt_is_named():
    """A token's K and V are 128 KiB: 6,300 tokens are 787.50 MiB."""
    found = on_4090(f"{LLAMA} -c 65536 -np 4 -cram 512", tokens=6300)
    assert said(found, "--cache-ram 512 cannot hold one prompt of 6,300 tokens (787.50 MiB)")
    assert not said(on_4090(f"{LLAMA} -c 65536 -np 4 -cram 800", tokens=6300), "cannot hold")
    assert not said(on_4090(f"{LLAMA} -c 65536 -np 4 -cram 0", tokens=6300), "cannot hold")


def test_a_shared_cache_too_small_for_all_who_are_served_is_named():
    small = on_4090(f"{LLAMA} -c 1024", users=4, tokens=600)
    assert said(
        small, "one cache of 1,024 cells holds 1 request of 600 tokens, not 4: once it is full, llama-server ends"
    )
    assert not said(on_4090(f"{LLAMA} -c 4096", users=4, tokens=600), "once it is full")
    assert not said(on_4090(f"{LLAMA} -c 1024 -np 4", users=4, tokens=200), "once it is full")


def test_flags_that_are_unknown_or_do_nothing_are_named():
    found = on_4090(f"{LLAMA} -c 8192 -np 1 --ctx-siz 5 --defrag-thold 0.1 --temp 0.7 --nonsense -1")
    assert said(found, "--ctx-siz: no flag of llama-server that is known here; did you mean '--ctx-size'?")
    assert said(found, "--defrag-thold: ignored since b6975")
    assert said(found, "--nonsense: no flag of llama-server")
    assert not said(found, "--temp")


def test_what_does_not_fit_comes_with_what_does():
    found = on_4090(f"{LLAMA} -c 262144 -np 12", users=12)
    longest = found.made.largest_context(found.made.memory) // 256 * 256
    assert not found.starts
    assert f"-c {12 * longest}: 12 slots of {longest:,} tokens fit" in found.changes
    assert check(f"{LLAMA} -c {12 * longest} -np 12", device="rtx4090").made.fits("llamacpp", found.made.memory)
    assert "weights, 19 of 32 layers and the head" in {p.name for p in on_4090(f"{LLAMA} -c 8192 -ngl 20").made.parts}
    assert on_4090(f"{LLAMA} -c 8192 -ngl 99").made == on_4090(f"{LLAMA} -c 8192").made
    assert said(on_4090(f"{LLAMA} -c 300000 -np 1"), "300,032 tokens for a slot: the model has 131,072")
    assert said(
        on_4090(f"{LLAMA} -c 8192 -np 4", users=12), "-np 12 -c 24576: a slot of 2,048 tokens for each of 12 users"
    )


# Ollama


def test_ollamas_context_is_for_each_request():
    line = (
        "OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_NUM_PARALLEL=4 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_NUM_PARALEL=3 ollama serve"
    )
    found = on_4090(line, model="qwen3-8b")
    s = found.made.settings
    assert (s.ctx, s.parallel, s.type_k, s.type_v, s.kv_unified) == (8192, 4, "q8_0", "q8_0", False)
    assert said(found, "the cache has 32,768 cells, 4 times as much memory")
    assert said(found, "did you mean 'OLLAMA_NUM_PARALLEL'?")
    assert said(on_4090(f"OLLAMA_FLASH_ATTENTION=0 {line}", model="qwen3-8b"), "it does not start")


@pytest.mark.parametrize(("memory", "tokens"), [("12GiB", 4096), ("24GiB", 32768), ("48GiB", 131072)])
def test_ollamas_context_depends_on_the_memory_and_the_model(memory, tokens):
    assert check("ollama run llama3.1:8b", memory=memory).made.settings.ctx == tokens


# vLLM


def test_vllm_does_not_start_unless_one_request_fits():
    found = on_4090(f"{VLLM} --max-model-len 131072")
    assert not found.starts
    (told,) = said(found, "the longest of which one request fits")
    longest = int(told.split()[1].rstrip(":"))
    assert on_4090(f"{VLLM} --max-model-len {longest}").starts
    assert not on_4090(f"{VLLM} --max-model-len {longest + 16}").starts
    assert "--kv-cache-dtype fp8: K and V take half" in found.changes


def test_vllms_sequences_share_the_blocks():
    found = on_4090(f"{VLLM} --max-model-len 32k --max-num-seqs 64", users=12)
    blocks = (
        plan("llama-3.1-8b", engine="vllm", device="rtx4090", ctx=32000, parallel=64).vllm_blocks(found.made.memory) - 1
    )
    assert said(found, f"makes {blocks:,} blocks of 16: {blocks / 2000:.1f} requests of 32,000 tokens at once")
    assert said(found, f"12 requests at once have {blocks * 16 // 12:,} each on average")
    assert said(found, "--max-num-seqs 64 is no promise")
    assert said(
        check("vllm serve x --max-model-len 2048", model="llama-3.2-1b", memory="8GiB"), "it does not start: driver"
    )


# The command


def test_the_command_answers_in_lines_and_as_an_object():
    asked = ("check", f"{LLAMA} -c 65536 -np 12 -ctk q8_0", "--device", "rtx4090", "--users", "12")
    printed = succeeded(command(*asked))
    assert printed.startswith("llama-server: llama-3.1-8b on rtx4090, K and V as q8_0 and f16\n")
    assert "misleading: -c 65536 is the total of 12 slots" in printed
    found = json.loads(succeeded(command(*asked, "--json")))
    assert found["flags"]["--ctx-size"] == "65536"
    assert found["starts"] is True


MISTAKES = {
    "no program": (
        ("check", "ls -l", "--device", "rtx4090"),
        "'ls -l': no llama-server, vllm serve or ollama serve in it",
    ),
    "no end": (("check", "llama-server 'x", "--device", "rtx4090"), "No closing quotation"),
    "no memory": (("check", LLAMA), "--device or --memory: how much memory is there?"),
    "no model": (
        ("check", "llama-server -c 8192", "--device", "rtx4090"),
        "--model: llama-server is not told one there",
    ),
    "no number": (
        ("check", f"{LLAMA} -c many", "--device", "rtx4090"),
        "--ctx-size 'many': a whole number is expected",
    ),
    "no cache": (("check", f"{LLAMA} -cram much", "--device", "rtx4090"), "--cache-ram 'much': a whole number"),
    "no such model": (("check", "llama-server -m odd.gguf", "--device", "rtx4090"), "odd.gguf"),
    "no flag of plan": (("plan", "--model", "phi-4", "--ctxx", "5"), "--ctxx: no flag of "),
    "no value": (("plan", "--model", "phi-4", "--flash-attn", "off"), "'off' belongs to no option"),
    "of another": (("plan", "--model", "phi-4", "--engine", "vllm", "-np", "5"), "-np: no flag of vllm serve"),
    "twice": (("plan", "--model", "phi-4", "--ctx", "512", "-c", "512"), "--ctx: tokens of each sequence"),
}


@pytest.mark.parametrize(("arguments", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(arguments, answer):
    assert answer in complaint(command(*arguments))


# Flags of kvsim plan


def planned(*arguments):
    printed = json.loads(succeeded(command("plan", "--model", "llama-3.1-8b", *arguments, "--json")))
    return list(printed["engines"]), printed["settings"], printed["notes"]


def test_plan_takes_the_flags_of_the_engine():
    engines, s, notes = planned("--engine", "llamacpp", "-c", "65536", "-np", "12", "-ctk", "q8_0", "-ub", "256")
    assert engines == ["llamacpp"]
    assert (s["ctx"], s["parallel"], s["type_k"], s["type_v"], s["ubatch"]) == (5632, 12, "q8_0", "f16", 256)
    assert notes[0].startswith("-c 65536 is the total of 12 slots: 5,632 tokens for each")
    engines, s, _ = planned("--max-model-len", "16384", "--max-num-seqs", "8", "--kv-cache-dtype", "fp8")
    assert engines == ["vllm"]
    assert (s["ctx"], s["parallel"], s["type_k"]) == (16384, 8, "fp8")
    engines, s, _ = planned("--memory", "24GiB", "OLLAMA_NUM_PARALLEL=4", "OLLAMA_KV_CACHE_TYPE=q8_0")
    assert engines == ["llamacpp"]
    assert (s["ctx"], s["parallel"], s["type_v"]) == (32768, 4, "q8_0")
    engines, s, _ = planned("-ctk", "q8_0", "-ctv", "q8_0", "--ctx", "4096", "--parallel", "3")
    assert (s["ctx"], s["parallel"], s["type_k"]) == (4096, 3, "q8_0")


def test_plan_says_what_to_set_for_ollama():
    printed = succeeded(command("plan", "--model", "llama-3.1-8b", "--parallel", "4", "--cache-type-k", "q8_0"))
    line = "Ollama: OLLAMA_NUM_PARALLEL=4 OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_KV_CACHE_TYPE=f16 OLLAMA_FLASH_ATTENTION=1"
    assert line in " ".join(printed.split())


def test_an_unknown_type_of_weights_is_said():
    with pytest.raises(UserError, match="no type called 'q9'"):
        on_4090(LLAMA, weights="q9")
    assert said(on_4090("llama-server -m Qwen3-8B-UD-Q4_K_XL.gguf"), "q4_k_xl is not known here: weights in q4_k_m")
