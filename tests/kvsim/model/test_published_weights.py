"""Quantised checkpoints: their sizes as published, and what ``quantization_config`` leaves in 16 bits."""

import pytest

from kvsim.costs.memory_plan import plan
from kvsim.costs.memory_settings import PlanSettings, weight_parts
from kvsim.model.config_shapes import shape_of_config, shipped_configs
from kvsim.model.config_weights import stored_type
from kvsim.model.memory_shapes import config_fields, memory_shape
from tests.kvsim.model.test_memory_shapes import config

GB, GIB = 10**9, 1 << 30

PUBLISHED = {
    # Sums of the safetensors files that huggingface.co/NAME/tree/main lists, in units of 10 MB.
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": 5.73 * GB,
    "Qwen/Qwen2.5-32B-Instruct-AWQ": 19.33 * GB,
    "tclf90/qwen2.5-72b-instruct-gptq-int4": 41.6 * GB,
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": 9.08 * GB,
    "neuralmagic/Qwen2.5-14B-FP8-dynamic": 16.34 * GB,
    "RedHatAI/phi-4-FP8-dynamic": 15.69 * GB,
    "predibase/Qwen2.5-32B-Instruct-FP8": 34.34 * GB,
    # Its second file has the table of embeddings again, as the head; engines keep one.
    "Qwen/Qwen3-4B-FP8": 4.41 * GB,
    # Tables in the README.md.
    "TheBloke/Llama-2-7B-AWQ": 3.89 * GB,
    "TheBloke/Llama-2-13B-chat-AWQ": 7.25 * GB,
    "TheBloke/Llama-2-70B-AWQ": 36.61 * GB,
    # "Model loading took 15.6841 GiB": vLLM 0.8.5, issue 17327.
    "nytopop/Qwen3-30B-A3B.w4a16": 15.6841 * GIB,
}
"""Bytes of the weights by repository."""


def weight_bytes(shape, weights=None):
    return sum(part.bytes for part in weight_parts("vllm", shape, PlanSettings(weights=weights)))


@pytest.mark.parametrize("title", PUBLISHED)
def test_a_checkpoint_named_as_published_has_its_size(title):
    made = plan(title)
    assert made.engines == ("vllm",)
    assert sum(part.bytes for part in made.parts if part.kind == "weights") == pytest.approx(
        PUBLISHED[title], rel=0.005
    )


def test_what_meta_leaves_in_16_bits_of_405b_is_counted():
    """vLLM issue 6746 loads 57.752 GiB on each of 8 GPUs: the first upload, which had each KV head twice (SGLang's pull
    request 723 of those days corrects the number)."""
    fields = shipped_configs()["llama-3.1-405b-fp8"] | {"num_key_value_heads": 16}
    logged = 8 * 57.752 * GIB
    assert weight_bytes(shape_of_config(fields, "first upload", "test")) == pytest.approx(logged, rel=0.002)
    # All layers narrow, as others publish it, is a seventh less.
    assert weight_bytes(memory_shape("neuralmagic/Meta-Llama-3.1-405B-Instruct-FP8")) < 0.85 * logged


def test_the_folder_of_the_thread_is_taken_for_metas_checkpoint():
    assert memory_shape("/models/Meta-Llama-3.1-405B-Instruct-FP8").name == "llama-3.1-405b-fp8"
    assert config_fields("Qwen/Qwen3-4B-FP8") == config_fields("qwen3-4b")


ATTENTION = 2 * 64 * 64 + 2 * 64 * 32
"""Weights of the matrices of one layer's attention in ``config``."""


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({}, 0),
        ({"modules_to_not_convert": None}, 0),
        ({"modules_to_not_convert": ["self_attn", "lm_head"]}, 4 * ATTENTION),
        ({"ignore": ["re:.*self_attn.*", "lm_head"]}, 4 * ATTENTION),
        ({"exclude_modules": ["model.layers.1.self_attn*"]}, ATTENTION),
        ({"ignored_layers": ["model.layers.3", "model.layers.30"]}, ATTENTION + 3 * 64 * 96),
        (
            {"ignore": ["model.language_model.layers.0.mlp.down_proj", "vision_tower.layers.0.self_attn.q_proj"]},
            64 * 96,
        ),
    ],
)
def test_lists_of_what_is_not_converted_are_read_as_engines_read_them(tmp_path, told, kept):
    shape = memory_shape(config(tmp_path, quantization_config={"quant_method": "fp8", **told}))
    assert shape.matrices.kept == kept
    plain = memory_shape(config(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert weight_bytes(shape) == weight_bytes(plain) + kept
    assert shape.matrices.bytes("fp8") == plain.matrices.bytes("fp8") + kept
    assert shape.matrices.bytes("bf16") == plain.matrices.bytes("bf16")


def test_experts_may_be_left_as_they_are(tmp_path):
    sparse = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    told = {"quant_method": "fp8", "ignore": ["re:.*experts.*"]}
    shape = memory_shape(config(tmp_path, **sparse, quantization_config=told))
    assert (shape.matrices.kept, shape.experts.kept) == (0, shape.experts.numbers)


def grouped(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4_g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (grouped(type="float", num_bits=8, strategy="channel"), "fp8"),
        (grouped(type="float", num_bits=8, strategy="block"), "fp8_block"),
        (grouped(type="float", num_bits=4, group_size=16), "nvfp4"),
        (grouped(type="int", num_bits=4, group_size=128), "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, None),
        ({"quant_method": "quark"}, None),
    ],
)
def test_a_config_says_the_type_of_its_weights(told, kind):
    assert stored_type(told) == kind
