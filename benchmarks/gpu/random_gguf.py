"""GGUF files with the shapes of real models and random weights, made in their quantised blocks.

They take llama.cpp as long as the real ones, and need neither a download nor minutes of quantising. Each storage type
has one piece of random blocks, which is repeated through all of its matrices.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.random_tensors import ARCHITECTURES, Tensor, fields, tensors
from kvsim.errors import UserError, no_such

MODELS = Path(__file__).parents[2] / "kvsim" / "model" / "models.toml"
TYPES = {"q4_k_m": 15, "q8_0": 7, "f16": 1}
"""Storage types and their numbers in ``llama_ftype``."""
REPEATED = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")
"""Words of which kvsim's load has a llama-server make its answers: one token each."""
_DEVIATION = 0.02
"""Standard deviation of the weights, as models are initialised."""
_BYTE, _NIBBLE = math.sqrt((256**2 - 1) / 12), 7.5
"""The deviation of a random signed byte, the mean of four random bits."""
_OF_Q4_K = 258.0
"""The deviation of ``scale * q - 7.5 * min`` of a block of Q4_K: scale and min have six random bits, q has four."""
_OF_Q5_K, _FIVE_BITS = 526.9, 15.5
"""Likewise of Q5_K, whose q has five."""
_OF_Q6_K = _BYTE * math.sqrt((64**2 - 1) / 12)
_SCALES = {
    "Q5_0": {0: 1 / math.sqrt((32**2 - 1) / 12)},
    "Q8_0": {0: 1 / _BYTE},
    "Q5_K": {0: 1 / _OF_Q5_K, 2: _FIVE_BITS / _OF_Q5_K},
    "Q4_K": {0: 1 / _OF_Q4_K, 2: _NIBBLE / _OF_Q4_K},
    "Q6_K": {208: 1 / _OF_Q6_K},
}
"""Where a block has its half-precision scales (``ggml-common.h``), for weights of deviation 1."""
_CONSTANT = {"norm.weight": 1.0, "ssm_a": -1.0, ".bias": 0.0}
"""Vectors that are not random, by the end of their names: a state whose diagonal is not negative grows."""
_PIECE = 10_007
"""Blocks in the repeated piece: a prime, so that no two rows of a matrix begin alike."""


def config(model: str) -> dict[str, Any]:
    """The keys of a config.json, of a name in models.toml or of a file. Raises ``UserError``."""
    known = tomllib.loads(MODELS.read_text("utf-8"))
    try:
        found: dict[str, Any] = json.loads(Path(model).read_text()) if model.endswith(".json") else known[model]
    except KeyError:
        raise UserError(no_such("model", model, known)) from None
    except (OSError, ValueError) as e:
        raise UserError(f"{model}: not a config.json: {e}") from None
    if found.get("model_type") not in ARCHITECTURES:
        raise UserError(f"{model}: model_type {found.get('model_type')!r}; accepted: {', '.join(ARCHITECTURES)}")
    return found


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return math.prod(tensor.shape) // block * bytes_of_block


def random_blocks(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` blocks of a type, uint8, shape (n, bytes of a block), whose weights have a deviation of 0.02."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind in ("F16", "F32"):
        numbers = (rng.standard_normal((n, 1)) * _DEVIATION).astype(np.float16 if kind == "F16" else np.float32)
        return numbers.view(np.uint8)
    found = rng.integers(0, 256, (n, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8)
    for at, scale in _SCALES[kind].items():
        found[:, at : at + 2] = np.array([scale * _DEVIATION], np.float16).view(np.uint8)
    return found


def write(path: Path, config: dict[str, Any], weights: str) -> None:
    """Write the file. Raises ``UserError`` for too small a vocabulary."""
    import gguf

    made = tensors(config, weights)
    sizes = {name: size(tensor) for name, tensor in made.items()}
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _add_fields(writer, config, weights)
    for name, tensor in made.items():
        kind = gguf.GGMLQuantizationType[tensor.kind]
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), sizes[name], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    pieces = {kind: random_blocks(kind, _PIECE, rng).ravel() for kind in {t.kind: None for t in made.values()}}
    for name, tensor in made.items():
        told = next((value for end, value in _CONSTANT.items() if name.endswith(end)), None)
        writer.write_tensor_data(
            np.resize(pieces[tensor.kind], sizes[name]) if told is None else np.full(tensor.shape, told, np.float32)
        )
    writer.close()


def _add_fields(writer: Any, config: dict[str, Any], weights: str) -> None:
    writer.add_file_type(TYPES[weights])
    for name, value in fields(config).items():
        getattr(writer, f"add_{name}")(value)
    # GPT-2's bytes, so that any text has tokens; the words that a load has servers repeat; then as many as are known.
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    words = ["<|end|>", *map(chr, sorted(shown)), *(chr(256 + i) for i in range(256 - len(shown)))]
    words += [f"Ġ{word}" for word in REPEATED]
    words += [f"word{i}" for i in range(config["vocab_size"] - len(words))]
    if len(words) != config["vocab_size"]:
        raise UserError(f"vocab_size is {config['vocab_size']}; {len(words)} or more are accepted")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")  # It looks for whole words first.
    writer.add_token_list(words)
    writer.add_token_types([3, *[1] * (len(words) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
