"""Memory of models whose layers keep states, latents or windows, against what vLLM and llama.cpp made of them."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import random_gguf
from kvsim.costs.memory_plan import plan
from kvsim.costs.vllm_blocks import BlockGroups, state_bytes
from kvsim.errors import UserError
from tests.benchmarks.gpu.test_random_gguf import HYBRIDS

DATA = Path(__file__).parents[2] / "data" / "hybrid-memory"
VLLM = json.loads((DATA / "vllm-0.32.0.json").read_text())
LLAMACPP = json.loads((DATA / "llama.cpp-0.3.36.json").read_text())
MIB = 1 << 20


def test_enough_models_were_recorded():
    assert len({name.partition(" ")[0] for name in VLLM["models"]}) >= 25


@pytest.mark.parametrize("name", VLLM["models"])
def test_blocks_are_those_that_vllm_makes(name):
    recorded, model = VLLM["models"][name], name.partition(" ")[0]
    drafter = name.partition(" beside ")[2]
    made = plan(
        model,
        engine="vllm",
        ctx=VLLM["length"],
        parallel=VLLM["sequences"],
        batch=VLLM["batch"],
        vllm_version=VLLM["vllm"],
        prefix_caching="without" not in name,
        weights="bf16",
        drafter=drafter,
    )
    blocks = BlockGroups.of(made.shape, made.settings)
    if recorded["block_size"] is not None:
        assert blocks.block_size == recorded["block_size"]
    assert blocks.page_bytes == recorded["page_bytes"]
    assert bool(drafter) == any(part.of_drafter for part in made.parts)
    assert [state_bytes(group, made.settings) for group in made.shape.states] == (
        [recorded["state_bytes"]] if recorded["state_bytes"] else []
    )
    assert sum(blocks.tables) == len(recorded["groups"])
    assert blocks.of_request == sum(recorded["blocks_of_a_request"])
    assert VLLM["memory"] // blocks.block_bytes == recorded["blocks"]
    assert VLLM["memory"] // blocks.block_bytes / blocks.of_request == pytest.approx(recorded["concurrency"], rel=0.01)


@pytest.mark.parametrize("sequences", ["1", "64", "64+3"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_caches_and_states_are_those_that_llamacpp_logs(name, sequences, tmp_path):
    path, (n, *drafted) = tmp_path / "tiny.gguf", map(int, sequences.split("+"))
    random_gguf.write(path, HYBRIDS[name], "q8_0")
    drafts = {"drafter": "head", "draft_tokens": drafted[0]} if drafted else {}
    made = plan(str(path), engine="llamacpp", ctx=LLAMACPP["cells"] // n, parallel=n, **drafts)
    logged = LLAMACPP["models"][name][sequences]
    for what, begin in (("llama_kv_cache", "KV"), ("llama_memory_recurrent", "state")):
        parts = [part for part in made.parts if part.kind == "kv" and not part.of_drafter]
        size = sum(part.bytes for part in parts if part.name.startswith(begin))
        assert size / MIB == pytest.approx(logged.get(what, 0), abs=0.0051)


def test_a_plan_says_what_states_do_to_blocks():
    made = plan("qwen3-next-80b-a3b", memory="80GiB", weights="q4_k_m", vllm_version="0.32.0")
    said = " ".join(made.notes)
    assert "llama.cpp: a state of 75.38 MiB a sequence, whatever its length" in said
    assert "vLLM: a state of 37.69 MiB a sequence, whatever its length" in said
    assert "vLLM sets blocks of 544 tokens" in said
    assert "the shortest prompt holds 4 blocks, 51.00 MiB" in said
    assert made.to_dict()["engines"]["vllm"]["block_size"] == 544
    wider = plan("qwen3-next-80b-a3b", engine="vllm", mamba_ssm_cache_dtype="float32", vllm_version="0.32.0")
    assert "a state of 73.69 MiB a sequence" in " ".join(wider.notes)


def test_blocks_of_sparse_attention_have_keys_of_the_indexer():
    """``DeepseekV32Indexer`` of vLLM 0.33: 128 numbers of 8 bits and a scale in 32, beside 576 numbers in 16."""
    made = plan("deepseek-v3.2", ctx=1024, parallel=2)
    blocks = BlockGroups.of(made.shape, made.settings)
    assert blocks.block_bytes == 16 * 61 * (2 * 576 + 132)
    assert (blocks.tables, blocks.of_request) == ((1,), 64)
    assert "132 bytes of a token in 61 layers" in " ".join(made.notes)
    keys = [part.bytes for part in made.parts if part.name == "KV, keys of an indexer, 61 layers"]
    assert keys == [61 * 2048 * 2 * 128]
    with pytest.raises(UserError, match=r"fp8 latents of deepseek-v3\.2 depends on the GPU"):
        plan("deepseek-v3.2", engine="vllm", type_k="fp8", type_v="fp8")


def test_more_sequences_than_blocks_do_not_start():
    made = plan("nemotron-h-8b", engine="vllm", memory="24GiB", parallel=1024, ctx=512)
    blocks = made.vllm_blocks(24 << 30)
    assert 0 < blocks < 1024
    assert any(f"{blocks:,} blocks hold" in note and "--max-num-seqs 1024" in note for note in made.notes)


def test_an_engine_that_does_not_serve_a_model_is_left_out():
    made = plan("minimax-text-01")
    assert made.engines == ("llamacpp",)
    assert any("vLLM 0.23.0 was the last that served it" in note for note in made.notes)
    with pytest.raises(UserError, match=r"bamba-9b: vLLM 0\.23\.0 was the last"):
        plan("bamba-9b", engine="vllm")


def test_a_wrong_type_of_states_is_one_line():
    with pytest.raises(UserError, match="--mamba-cache-dtype: no type called 'f8'"):
        plan("granite-4.0-h-tiny", mamba_cache_dtype="f8")


def test_llamacpp_keeps_a_state_for_each_token_that_a_head_drafts():
    """``n_rs_seq``, where it is not for nothing."""

    def states(model, **drafts):
        parts = plan(model, engine="llamacpp", parallel=2, **drafts).parts
        return sum(part.bytes for part in parts if part.name.startswith("state"))

    assert states("qwen3.5-27b", drafter="head", draft_tokens=4) == 5 * states("qwen3.5-27b")
    assert states("qwen3.5-27b", drafter="llama-3.2-1b") == states("qwen3.5-27b")
    assert states("qwen3-next-80b-a3b", drafter="head") == states("qwen3-next-80b-a3b")


def test_a_drafting_head_takes_attention():
    with pytest.raises(UserError, match="falcon-mamba-7b has no attention"):
        _ = plan("falcon-mamba-7b", drafter="head").parts
