"""A model as the keys of a config.json, which is what other programs take for a description of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.model.config_files import read_config, shipped_configs, text_part
from kvsim.model.engine_shapes import gguf_path
from kvsim.model.memory_shapes import MemoryShape, memory_shape

_OF_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
"""``model_type`` by a GGUF file's architecture, where its header says all that a config.json must."""


def config_fields(model: str) -> dict[str, Any]:
    """The keys of a config.json that describe a model, named or given in any way that ``memory_shape`` takes.

    The keys of a config.json are returned as they are there (those of the text part, if the model has others); of a
    GGUF file and of kvsim's own models there are those that ``memory_shape`` knows. Raises ``UserError``.
    """
    shape = memory_shape(model)
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if model.endswith(".gguf") or model == "smollm2":
        return _of_shape(shape, _type_of_gguf(model, shape))
    if name in shipped_configs() and not name.endswith(".json"):
        return {key: value for key, value in shipped_configs()[name].items() if key != "source"}
    path = Path(shape.source)
    return text_part(read_config(path)) if path.is_file() else _of_shape(shape, "llama")


def _type_of_gguf(model: str, shape: MemoryShape) -> str:
    """The ``model_type`` of a GGUF file. Raises ``UserError``."""
    from kvsim.model.gguf_file import read_header

    path = gguf_path(model)
    assert path is not None
    arch = str(read_header(path, vocabulary=False).fields.get("general.architecture"))
    if arch not in _OF_GGUF or shape.n_experts:
        what = f"architecture {arch!r:.40}{' with experts' if arch in _OF_GGUF else ''}"
        raise UserError(f"{path}: {what}: give the config.json of the model instead; accepted: {', '.join(_OF_GGUF)}")
    return _OF_GGUF[arch]


def _of_shape(shape: MemoryShape, model_type: str) -> dict[str, Any]:
    """The keys for a dense model whose layers are all alike. Raises ``UserError`` for others."""
    if len(shape.groups) != 1 or shape.groups[0].kind != "full":
        raise UserError(f"{shape.source}: its layers differ; give the config.json of the model instead")
    group = shape.groups[0]
    return {
        "model_type": model_type,
        "num_hidden_layers": group.layers,
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": group.k_row // group.k_head,
        "head_dim": group.k_head,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocabulary,
        **({"max_position_embeddings": shape.context} if shape.context else {}),
    }
