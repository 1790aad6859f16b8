"""Models as the keys of a config.json of the transformers library: the shipped table, and files."""

from __future__ import annotations

import json
import tomllib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvsim.errors import UserError


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
