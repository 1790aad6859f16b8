"""Types of tensors in quantised files, against published files and llama.cpp's own table of sizes."""

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvsim.model.gguf_quantization import gguf_types
from kvsim.model.memory_shapes import memory_shape, model_names
from kvsim.model.storage_types import GGUF_BLOCKS

GIB = 1 << 30

FILES = {
    ("gpt-oss-20b", "mxfp4"): (11.27, {"q8_0": 98, "mxfp4": 72}),
    ("gpt-oss-120b", "mxfp4"): (59.02, {"q8_0": 146, "mxfp4": 108}),
    ("gpt-oss-20b", "q4_k_m"): (10.81, {"q5_0": 61, "q8_0": 13, "q4_k": 24, "mxfp4": 72}),
    ("mistral-7b-v0.1", "q4_k_m"): (4.07, {"q4_k": 193, "q6_k": 33}),
    ("qwen2.5-3b", "q4_k_m"): (1.79, {"q4_k": 216, "q6_k": 37}),
    ("qwen3-1.7b", "q4_k_m"): (1.03, {"q4_k": 168, "q6_k": 29}),
    ("smollm2-1.7b", "q4_k_m"): (1005.01 / 1024, {"q4_k": 144, "q6_k": 25}),
    ("qwen3-30b-a3b", "q4_k_m"): (17.28, {"q4_k": 289, "q6_k": 49}),
    ("gemma-2-2b", "q4_k_m"): (1.59, {"q4_k": 156, "q6_k": 27}),
    ("llama-3.2-3b", "q5_k_m"): (2.16, {"q5_k": 168, "q6_k": 29}),
    ("qwen2.5-14b", "q5_k_m"): (9.78, {"q5_k": 289, "q6_k": 49}),
    ("llama-3.2-1b", "q5_k_m"): (861.81 / 1024, {"q5_k": 96, "q6_k": 17}),
    ("qwen3-14b", "q6_k"): (11.28, {"q6_k": 282}),
}
"""GiB, and matrices by type, that llama.cpp logged when it loaded published files of these models (``file size`` and
``- type``; Qwen3 30B: llama.cpp issue 14235; the others in logs of public repositories). Qwen2.5 14B is DeepSeek R1's
distillation of it, Mistral's v0.2."""

SIZES = {
    ("qwen2.5-7b", "q3_k_m"): 3.54,
    ("qwen2.5-32b", "q4_k_m"): 18.48,
    ("qwen3-8b", "q4_k_m"): 4.68,
    ("gemma-3-27b", "iq4_xs"): 13.747,
}
"""GiB of published files, of which the logs have no table of tensors."""

LLAMA_3_1_8B = {
    "iq1_s": 2.0042,
    "iq1_m": 2.1460,
    "iq2_xxs": 2.3824,
    "iq2_xs": 2.5882,
    "iq2_s": 2.7403,
    "iq2_m": 2.9294,
    "iq3_xxs": 3.2548,
    "iq3_xs": 3.4977,
    "iq3_s": 3.6606,
    "iq3_m": 3.7628,
    "q2_k_s": 2.9697,
    "q2_k": 3.1593,
    "q3_k_s": 3.6429,
    "q3_k_l": 4.2979,
    "q4_k_s": 4.6672,
    "q4_k_m": 4.8944,
    "q5_k_s": 5.5704,
    "q5_k_m": 5.7036,
    "q6_k": 6.5633,
    "q8_0": 8.5008,
    "f16": 16.0005,
}
"""Bits per weight by ``tools/quantize/README.md`` of llama.cpp, but for those of iq4, made without a matrix there."""


def size(model, kind):
    return sum(bytes_ for _, bytes_ in gguf_types(memory_shape(model), kind).values())


@pytest.mark.parametrize(("model", "kind"), FILES, ids="-".join)
def test_tensors_have_the_types_of_published_files(model, kind):
    gib, tables = FILES[model, kind]
    found = gguf_types(memory_shape(model), kind)
    assert {stored: n for stored, (n, _) in found.items() if n} == tables
    assert size(model, kind) / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(("model", "kind"), SIZES, ids="-".join)
def test_files_have_the_size_of_published_ones(model, kind):
    assert size(model, kind) / GIB == pytest.approx(SIZES[model, kind], abs=0.005)


@pytest.mark.parametrize("kind", LLAMA_3_1_8B)
def test_every_mixture_takes_the_bits_that_llamacpp_states(kind):
    numbers = sum(memory_shape("llama-3.1-8b").parameters.values())
    assert 8 * size("llama-3.1-8b", kind) / numbers == pytest.approx(LLAMA_3_1_8B[kind], abs=0.0001)


def test_eight_experts_and_seventy_billions_are_exceptions():
    """Mixtral's K and V are q8_0 and its attention's outputs q5_k; the V of 70B is q5_k where others' is q4_k."""
    mixtral = gguf_types(memory_shape("mixtral-8x7b"), "q4_k_m")
    assert (mixtral["q8_0"][0], mixtral["q5_k"][0]) == (64, 32)
    assert gguf_types(memory_shape("llama-3.1-70b"), "q4_k_m")["q5_k"][0] == 40
    assert "q5_k" not in gguf_types(memory_shape("qwen2.5-32b"), "q4_k_m")


@pytest.mark.parametrize("model", model_names())
def test_all_that_is_large_is_a_matrix(model):
    shape = memory_shape(model)
    matrices = sum(tensor.numbers * len(tensor.layers) for tensor in shape.tensors)
    assert 0 < shape.n_parameters - matrices < 0.003 * shape.n_parameters


def test_blocks_are_those_of_the_gguf_package():
    assert {name: GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] for name in GGUF_BLOCKS} == GGUF_BLOCKS
