"""What a model is in the keys of a config.json, however it is given."""

import json

import pytest

from kvsim.errors import UserError
from kvsim.model.config_shapes import shape_of_config
from kvsim.model.memory_shapes import config_fields, memory_shape, model_names
from tests.gguf_files import Small

LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
OTHERS = {"intermediate_size": 96, "vocab_size": 100, "head_dim": 32, "max_position_embeddings": 256}
LLAMA = {"model_type": "llama", **LAYERS, **OTHERS}


@pytest.mark.parametrize("name", model_names())
def test_the_keys_of_a_shipped_model_have_its_shape_and_no_more(name):
    fields = config_fields(name)
    assert "source" not in fields
    assert shape_of_config(fields, name, memory_shape(name).source) == memory_shape(name)


def test_a_config_json_is_returned_as_it_is_by_file_and_by_folder(tmp_path):
    written = {**LLAMA, "quantization_config": {"quant_method": "fp8"}, "own": 1}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert config_fields(str(tmp_path / "config.json")) == config_fields(str(tmp_path)) == written


def test_of_a_multimodal_model_the_text_part_is_returned(tmp_path):
    text = {"model_type": "gemma3_text", **LAYERS, **OTHERS, "sliding_window": 512}
    written = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert config_fields(str(tmp_path)) == {**text, "torch_dtype": "bfloat16"}


def test_the_keys_of_a_gguf_file_are_those_of_its_header(tmp_path):
    path = Small().write(tmp_path / "small.gguf")
    fields, shape = config_fields(str(path)), memory_shape(str(path))
    again = shape_of_config(fields, shape.name, shape.source)
    for key in ("groups", "d_model", "n_heads", "d_ff", "vocabulary", "context"):
        assert getattr(again, key) == getattr(shape, key), key
    assert fields["model_type"] == "llama"


def test_own_models_have_keys_too():
    assert config_fields("tiny")["num_hidden_layers"] == memory_shape("tiny").n_layers


def test_a_gguf_file_that_says_too_little_is_refused_in_a_line(tmp_path):
    own = {"block_count": 12, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
    own |= {"attention.key_length": 32, "attention.value_length": 32, "feed_forward_length": 96}
    fields = {f"gemma3.{key}": value for key, value in (own | {"attention.sliding_window": 512}).items()}
    path = Small(fields={"general.architecture": "gemma3", **fields}).write(tmp_path / "gemma.gguf")
    with pytest.raises(UserError, match=r"gemma3.*give the config\.json of the model instead; accepted: llama") as said:
        config_fields(str(path))
    assert "\n" not in str(said.value)
