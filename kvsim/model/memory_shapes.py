"""Shapes of models by their names, for memory planning, and the same models as the keys of a config.json.

They come from a shipped table of well-known models, from a ``config.json`` of the transformers library, or from the
header of a GGUF file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvsim.errors import UserError, did_you_mean
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.config_shapes import read_config, shape_of_config, shipped_configs, text_part
from kvsim.model.engine_shapes import MODEL_NAMES, SHAPES, gguf_path, is_engine_model
from kvsim.model.gguf_file import read_header
from kvsim.model.gguf_shapes import shape_of_gguf
from kvsim.model.recorded_names import model_and_weights
from kvsim.model.storage_types import SERVED_TYPES

_OF_GGUF = ("llama", "qwen2", "qwen3", "phi3")
"""Architectures of GGUF files whose headers say all that a config.json must; ``model_type`` has the same names."""


def model_names() -> list[str]:
    """Names of the models in the shipped table."""
    return list(shipped_configs())


def memory_shape(model: str) -> MemoryShape:
    """The shape of a shipped model, of ``smollm2``, of a ``config.json`` (or its folder) or of a GGUF file.

    The models of kvsim's own engine, ``tiny`` and ``small``, are accepted too, and repositories that publish a shipped
    model for engines on GPUs, whose names may say the type of its weights (``Qwen/Qwen2.5-72B-Instruct-AWQ``). Raises
    ``UserError``.
    """
    # Without its publisher or its folder.
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if model in SHAPES:
        return shape_of_config(_own_config(model), model, "built in")
    if is_engine_model(model):
        path = gguf_path(model)
        assert path is not None
        return shape_of_gguf(path, path.stem if model.endswith(".gguf") else model)
    if name.endswith(".json"):
        return _shape_of_file(Path(model))
    if name in shipped_configs():
        return _shipped(name)
    try:
        if (Path(model) / "config.json").is_file():
            return _shape_of_file(Path(model) / "config.json")
    except (OSError, ValueError):
        pass
    if published := _published(model):
        known, kind = published
        shape = memory_shape(known)
        return replace(shape, default_type=kind) if kind else shape
    hint = did_you_mean(name, [*MODEL_NAMES, *model_names()])
    raise UserError(
        f"no model called {model!r:.80}; {f'{hint} There' if hint else 'there'} are {', '.join(MODEL_NAMES)}, those of "
        "kvsim plan --list, and any config.json or FILE.gguf"
    )


@cache
def _shipped(name: str) -> MemoryShape:
    """A shipped model's; a search for settings asks for it thousands of times."""
    entry = dict(shipped_configs()[name])
    return shape_of_config(entry, name, entry.pop("source"))


def shape_name(model: str) -> str:
    """The name of the shape that ``memory_shape`` finds for a model, without reading its file.

    Of a config.json that is its folder's name, of other files their own without the ending, of a name with a publisher
    the part after it, in lower case.
    """
    path = Path(model)
    if path.name == "config.json":
        return path.resolve().parent.name or path.name
    if path.suffix in (".json", ".gguf"):
        return path.stem
    if path.name.lower() in shipped_configs():
        return path.name.lower()
    if path.is_dir():
        return path.resolve().name
    published = _published(model)
    return published[0] if published else model


def own_type(shape: MemoryShape) -> str:
    """The type of the weights of a shape as it is published first: of a shipped model without a type in its name."""
    return memory_shape(shape.name).default_type if shape.name in shipped_configs() else shape.default_type


def _published(model: str) -> tuple[str, str | None] | None:
    """The shipped model that a repository publishes for engines on GPUs, and the type of its weights if its name says.

    None for others, GGUF files among them.
    """
    known, kind = model_and_weights(model)
    return (known, kind) if known and known not in MODEL_NAMES and kind in (None, *SERVED_TYPES) else None


def config_fields(model: str) -> dict[str, Any]:
    """The keys of a config.json that describe a model, named or given in any way that ``memory_shape`` takes.

    The keys of a config.json are returned as they are there (those of the text part, if the model has others); of a
    GGUF file and of kvsim's own models there are those that ``memory_shape`` knows. Raises ``UserError``.
    """
    shape = memory_shape(model)
    if model in SHAPES:
        return _own_config(model)
    if is_engine_model(model):
        return _config_of_gguf(shape)
    name = shape.name
    if name in shipped_configs():
        return {key: value for key, value in shipped_configs()[name].items() if key != "source"}
    return text_part(read_config(Path(shape.source)))


def _shape_of_file(path: Path) -> MemoryShape:
    return shape_of_config(read_config(path), shape_name(str(path)), str(path))


def _own_config(name: str) -> dict[str, Any]:
    """One of kvsim's own models as the keys of a config.json."""
    s = SHAPES[name]
    return {
        "model_type": "llama",
        "torch_dtype": "float32",
        "num_hidden_layers": s.n_layers,
        "hidden_size": s.d_model,
        "num_attention_heads": s.n_heads,
        "num_key_value_heads": s.n_kv_heads,
        "head_dim": s.d_head,
        "intermediate_size": s.d_ff,
        "vocab_size": s.vocabulary,
    }


def _config_of_gguf(shape: MemoryShape) -> dict[str, Any]:
    """The keys for a dense model whose layers are all alike. Raises ``UserError`` for others."""
    path, (group, *others) = Path(shape.source), shape.groups
    arch = str(read_header(path, vocabulary=False).fields.get("general.architecture"))
    if arch not in _OF_GGUF or shape.n_experts:
        what = f"architecture {arch!r:.40}{' with experts' if arch in _OF_GGUF else ''}"
        raise UserError(f"{path}: {what}: give the config.json of the model instead; accepted: {', '.join(_OF_GGUF)}")
    if others or group.kind != "full":
        raise UserError(f"{path}: its layers differ; give the config.json of the model instead")
    return {
        "model_type": arch,
        "num_hidden_layers": group.layers,
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": group.k_row // group.k_head,
        "head_dim": group.k_head,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocabulary,
        **({"max_position_embeddings": shape.context} if shape.context else {}),
    }
