"""Models by the names that recordings give them."""

import pytest

from kvsim.errors import UserError
from kvsim.model.recorded_names import model_and_weights, recorded_model


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("NousResearch/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("tiny", "tiny"),
    ],
)
def test_models_are_known_by_their_publishers_names(title, name):
    assert recorded_model(title) == name


def test_an_unknown_model_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="did you mean 'qwen3-32b'"):
        recorded_model("Qwen/Qwen3-33B")


@pytest.mark.parametrize(
    ("title", "model", "weights"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "fp8"),
        ("amd/Llama-3.1-8B-Instruct-FP8-KV", "llama-3.1-8b", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b", "int4"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "llama-3.1-8b", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "qwen2.5-72b", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b", "int8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("nvidia/Llama-3.1-405B-Instruct-FP4", "llama-3.1-405b", "nvfp4"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama-3.1-8b", "q4_k_m"),
        # Of a publisher whose checkpoint is known here, and of others.
        ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b-fp8", None),
        ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b", "fp8"),
    ],
)
def test_a_title_says_model_and_weights(title, model, weights):
    assert model_and_weights(title) == (model, weights)
