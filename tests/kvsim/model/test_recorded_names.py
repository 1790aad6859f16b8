"""Models by the names that recordings give them."""

import pytest

from kvsim.errors import UserError
from kvsim.model.recorded_names import recorded_model


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
