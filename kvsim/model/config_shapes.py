"""Shapes of models from the keys of a config.json of the transformers library: the shipped table, and files."""

from __future__ import annotations

import json
import tomllib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsim.errors import LIMITS, UserError
from kvsim.model import config_weights
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.families import FAMILIES, family_of
from kvsim.model.gguf_file import LARGEST_LAYERS
from kvsim.model.model_config import ModelConfig


@lru_cache(maxsize=1)
def shipped_configs() -> dict[str, dict[str, Any]]:
    """The shipped table: the keys of a config.json for each model, and their ``source``."""
    return tomllib.loads((files("kvsim.model") / "models.toml").read_text(encoding="utf-8"))


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a config.json. Raises ``UserError``."""
    if not path.is_file():
        raise UserError(f"{str(path)!r}: no such file; a config.json is expected")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise UserError(f"{str(path)!r}: not a config.json: {reason:.120}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: not a config.json: an object is expected, got {type(loaded).__name__}")
    return loaded


def text_part(fields: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that describe the text part, which is all of it but for multimodal models."""
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return fields
    outer = ("torch_dtype", "dtype", "quantization_config", "model_type")
    return {**{key: value for key, value in fields.items() if key in outer}, **text}


def shape_of_config(fields: dict[str, Any], name: str, source: str) -> MemoryShape:
    """The shape of a model by its config.json. Raises ``UserError``, which names ``source``."""
    fields = text_part(fields)
    kind = family_of(fields)
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{source}: model_type is {kind!r:.40}; its layers are not known here; accepted: {known}{LIMITS}"
        )
    try:
        config = model_config(fields, kind)
        groups = config.groups()
    except ValidationError as e:
        raise UserError(f"{source}: {_first_fault(e)}") from None
    except ValueError as e:
        raise UserError(f"{source}: {e}") from None
    parameters, default_type = config_weights.weights(config)
    matrices, experts, head = config_weights.by_use(config)
    return MemoryShape(
        name=name,
        source=source,
        groups=groups,
        n_layers=config.num_hidden_layers,
        llamacpp_windows=config.family.llamacpp_windows,
        takes_back=config.family.takes_back,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_ff=config.width,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        parameters=parameters,
        stored={},
        default_type=default_type,
        matrices=matrices,
        experts=experts,
        head=head,
        repeated=config_weights.repeated(config),
        n_experts=config.n_experts,
        experts_per_token=(config.num_experts_per_tok or 1) if config.n_experts else 0,
        qk_norm=config.family.qk_norm,
        whole_qk_norm=config.family.whole_qk_norm,
        only=config.family.only,
        vllm_until=config.family.vllm_until,
        tensors=config_weights.tensors(config),
    )


def model_config(fields: dict[str, Any], kind: str) -> ModelConfig:
    """The keys of a config.json of a family, checked. Raises ``ValueError``."""
    family = FAMILIES[kind]
    named, layers = {**dict(family.defaults), **fields}, fields.get("num_hidden_layers", 0)
    if family.adapt is not None and isinstance(layers, int) and 0 <= layers <= LARGEST_LAYERS:
        try:
            named |= family.adapt(named)
        except (TypeError, AttributeError, ArithmeticError, KeyError):
            ModelConfig.model_validate({**named, "model_type": kind})
            raise ValueError(f"keys of {kind} that are not as its config.json has them") from None
    return ModelConfig.model_validate({**named, "model_type": kind})


def _first_fault(error: ValidationError) -> str:
    """What is wrong with the first key that is, in words."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    said = first["msg"][0].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f", got {first['input']!r:.40}"
    return f"{'.'.join(map(str, first['loc']))}: {said}{given}"
