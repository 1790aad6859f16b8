"""GGUF files of random weights have the sizes of real ones, and are read as models."""

import math

import gguf
import numpy as np
import pytest

from benchmarks.gpu import random_gguf
from kvsim.errors import UserError
from kvsim.model.gguf_file import read_header
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


def total(tensors):
    return sum(map(random_gguf.size, tensors.values()))


@pytest.mark.parametrize(
    ("model", "gib"),
    [("llama-3.1-8b", 4.58), ("qwen3-14b", 8.38), ("qwen3-32b", 18.40), ("qwen3-30b-a3b", 17.28)],
)
def test_sizes_are_those_that_llama_bench_prints_of_the_real_files(model, gib):
    tensors = random_gguf.tensors(random_gguf.config(model), "q4_k_m")
    assert round(total(tensors) / 2**30, 2) == gib


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-14b", "qwen3-30b-a3b"])
def test_all_parameters_of_the_model_are_there(model):
    tensors = random_gguf.tensors(random_gguf.config(model), "f16")
    assert sum(math.prod(tensor.shape) for tensor in tensors.values()) == memory_shape(model).n_parameters


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "F16"])
def test_random_blocks_are_sane_weights(kind):
    blocks = random_gguf.random_blocks(kind, 4000, np.random.default_rng(1))
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean()) < 0.001


@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("weights", random_gguf.TYPES)
def test_a_file_is_read_as_its_model(shape, weights, tmp_path):
    path = tmp_path / "tiny.gguf"
    random_gguf.write(path, shape, weights)
    header, tensors = read_header(path), random_gguf.tensors(shape, weights)
    assert {name: gguf.GGMLQuantizationType(t.kind).name for name, t in header.tensors.items()} == {
        name: tensor.kind for name, tensor in tensors.items()
    }
    start = min(info.offset for info in header.tensors.values())
    assert 0 <= path.stat().st_size - start - total(tensors) < 32 * len(tensors)
    assert len(header.fields["tokenizer.ggml.tokens"]) == len({*header.fields["tokenizer.ggml.tokens"]}) == 1024
    read = memory_shape(str(path))
    assert sum(read.stored.values()) == total(tensors)
    assert (read.n_experts, read.experts_per_token) == ((8, 2) if "num_experts" in shape else (0, 0))


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
    with pytest.raises(UserError, match=r"model_type 'gemma2'; accepted: llama, qwen3, qwen3_moe"):
        random_gguf.config("gemma-2-2b")
    with pytest.raises(UserError, match="Q4_K has blocks of 256 numbers; rows of 96"):
        random_gguf.write(tmp_path / "a.gguf", DENSE | {"hidden_size": 96}, "q4_k_m")
    assert not (tmp_path / "a.gguf").exists()
