"""GGUF files of random weights have the sizes of real ones, and are read as models."""

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest

from benchmarks.gpu import random_gguf, random_tensors
from kvsim.errors import UserError
from kvsim.model.config_shapes import shape_of_config
from kvsim.model.gguf_file import read_header
from kvsim.model.gguf_quantization import gguf_types
from kvsim.model.memory_shapes import memory_shape
from tests.worlds import command

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
HYBRIDS = {
    "granite": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "shared_intermediate_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "granite without experts": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "shared_intermediate_size": 512,
        "tie_word_embeddings": True,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3},
    "lfm2 with experts": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
    },
    "qwen3 next": {
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "latents": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
        "num_key_value_heads": 4,
    },
}
HYBRIDS["latents with an index"] = HYBRIDS["latents"] | {
    "model_type": "deepseek_v32",
    "index_n_heads": 4,
    "index_head_dim": 64,
}
HYBRIDS["latents that are expanded"] = {
    "model_type": "minicpm3",
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "num_key_value_heads": 4,
}
"""Tiny models with the layers of today's, of four layers each."""
HYBRIDS = {name: DENSE | {"num_hidden_layers": 4} | own for name, own in HYBRIDS.items()}


def total(tensors):
    return sum(map(random_gguf.size, tensors.values()))


@pytest.mark.parametrize(
    ("model", "gib"),
    [("llama-3.1-8b", 4.58), ("qwen3-14b", 8.38), ("qwen3-32b", 18.40), ("qwen3-30b-a3b", 17.28)],
)
def test_sizes_are_those_that_llama_bench_prints_of_the_real_files(model, gib):
    tensors = random_tensors.tensors(random_gguf.config(model), "q4_k_m")
    assert round(total(tensors) / 2**30, 2) == gib


@pytest.mark.parametrize(
    "model",
    [
        "llama-3.1-8b",
        "llama-3.2-1b",
        "qwen3-14b",
        "qwen3-30b-a3b",
        "granite-4.0-h-tiny",
        "granite-4.0-h-micro",
        "lfm2-1.2b",
        "lfm2-8b-a1b",
        "nemotron-h-8b",
        "qwen3-next-80b-a3b",
        "deepseek-v2-lite",
    ],
)
@pytest.mark.parametrize("weights", ["f16", "q4_k_m"])
def test_all_parameters_of_the_model_are_there_in_the_types_that_plan_expects(model, weights):
    tensors, shape = random_tensors.tensors(random_gguf.config(model), weights), memory_shape(model)
    assert sum(math.prod(tensor.shape) for tensor in tensors.values()) == shape.n_parameters
    assert total(tensors) == sum(size for _, size in gguf_types(shape, weights).values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16"])
def test_random_blocks_are_sane_weights(kind):
    blocks = random_gguf.random_blocks(kind, 4000, np.random.default_rng(1))
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean()) < 0.001


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, *HYBRIDS.values()], ids=["dense", "experts", *HYBRIDS])
@pytest.mark.parametrize("weights", random_gguf.TYPES)
def test_a_file_is_read_as_its_model(shape, weights, tmp_path):
    path = tmp_path / "tiny.gguf"
    random_gguf.write(path, shape, weights)
    header, tensors = read_header(path), random_tensors.tensors(shape, weights)
    assert {name: gguf.GGMLQuantizationType(t.kind).name for name, t in header.tensors.items()} == {
        name: tensor.kind for name, tensor in tensors.items()
    }
    start = min(info.offset for info in header.tensors.values())
    assert 0 <= path.stat().st_size - start - total(tensors) < 32 * len(tensors)
    assert len(header.fields["tokenizer.ggml.tokens"]) == len({*header.fields["tokenizer.ggml.tokens"]}) == 1024
    read, told = memory_shape(str(path)), shape_of_config(shape, "tiny", "config")
    assert sum(read.stored.values()) == total(tensors)
    assert (read.n_experts, read.experts_per_token) == (told.n_experts, told.experts_per_token)
    assert [replace(group, v_head=0) for group in read.groups] == [replace(group, v_head=0) for group in told.groups]


def test_plan_takes_the_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    random_gguf.write(path, DENSE, "q4_k_m")
    done = command("plan", "--model", str(path), "--ctx", "1024")
    assert done.returncode == 0, done.stderr
    assert "weights, q4_k" in done.stdout
    assert "weights, q6_k" in done.stdout


def test_what_cannot_be_made_is_said_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"no model called 'llama-8'; did you mean"):
        random_gguf.config("llama-8")
    with pytest.raises(UserError, match=r"model_type 'gemma2'; accepted: llama, qwen3, qwen3_moe, "):
        random_gguf.config("gemma-2-2b")
    with pytest.raises(UserError, match="vocab_size is 100; 273 or more are accepted"):
        random_gguf.write(tmp_path / "a.gguf", DENSE | {"vocab_size": 100}, "q4_k_m")
