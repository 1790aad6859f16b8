"""GGUF files with the shapes of real models and random weights, made in their quantised blocks.

They take llama.cpp as long as the real ones, and need neither a download nor minutes of quantising. Each storage type
has one piece of random blocks, which is repeated through all of its matrices.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.errors import UserError, no_such

MODELS = Path(__file__).parents[2] / "kvsim" / "model" / "models.toml"
TYPES = {"q4_k_m": 15, "q8_0": 7, "f16": 1}
"""Storage types and their numbers in ``llama_ftype``."""
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""``model_type`` of a config.json, and what llama.cpp calls it."""

REPEATED = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")
"""Words of which kvsim's load has a llama-server make its answers: one token each."""
_DEVIATION = 0.02
"""Standard deviation of the weights, as models are initialised."""
_BYTE, _NIBBLE = math.sqrt((256**2 - 1) / 12), 7.5
"""The deviation of a random signed byte, the mean of four random bits."""
_OF_Q4_K = 258.0
"""The deviation of ``scale * q - 7.5 * min`` of a block of Q4_K: scale and min have six random bits, q has four."""
_OF_Q6_K = _BYTE * math.sqrt((64**2 - 1) / 12)
_SCALES = {
    "Q8_0": {0: 1 / _BYTE},
    "Q4_K": {0: 1 / _OF_Q4_K, 2: _NIBBLE / _OF_Q4_K},
    "Q6_K": {208: 1 / _OF_Q6_K},
}
"""Where a block has its half-precision scales (``ggml-common.h``), for weights of deviation 1."""
_PIECE = 10_007
"""Blocks in the repeated piece: a prime, so that no two rows of a matrix begin alike."""


class Tensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    """Outputs first; of experts, their number."""
    kind: str
    """A name of ``gguf.GGMLQuantizationType``."""


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


def tensors(config: dict[str, Any], weights: str) -> dict[str, Tensor]:
    """The tensors of a model in a type of ``TYPES``, with the types that llama-quantize gives them
    (``llama_tensor_get_type`` in ``llama-quant.cpp``, which has other rules for Falcon, 70B and eight experts)."""
    d, layers, vocabulary = (config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, head = config["num_attention_heads"], _head(config)
    q, kv, experts = heads * head, config["num_key_value_heads"] * head, config.get("num_experts", 0)
    width = config["moe_intermediate_size" if experts else "intermediate_size"]
    plain, more = {"q4_k_m": ("Q4_K", "Q6_K"), "q8_0": ("Q8_0", "Q8_0"), "f16": ("F16", "F16")}[weights]

    found = {"token_embd.weight": Tensor((vocabulary, d), plain), "output_norm.weight": Tensor((d,), "F32")}
    if config.get("tie_word_embeddings"):
        found["token_embd.weight"] = Tensor((vocabulary, d), more)
    else:
        found["output.weight"] = Tensor((vocabulary, d), more)
    for i in range(layers):
        wider = more if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else plain
        own = {
            "attn_norm": Tensor((d,), "F32"),
            "ffn_norm": Tensor((d,), "F32"),
            "attn_q": Tensor((q, d), plain),
            "attn_k": Tensor((kv, d), plain),
            "attn_v": Tensor((kv, d), wider),
            "attn_output": Tensor((d, q), plain),
        }
        if config["model_type"] != "llama":
            own |= {"attn_q_norm": Tensor((head,), "F32"), "attn_k_norm": Tensor((head,), "F32")}
        many, suffix = ((experts,), "_exps") if experts else ((), "")
        own |= {f"ffn_{part}{suffix}": Tensor((*many, width, d), plain) for part in ("gate", "up")}
        own[f"ffn_down{suffix}"] = Tensor((*many, d, width), wider)
        if experts:
            own["ffn_gate_inp"] = Tensor((experts, d), "F32")
        found |= {f"blk.{i}.{name}.weight": tensor for name, tensor in own.items()}
    return found


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    if tensor.shape[-1] % block:
        raise UserError(f"{tensor.kind} has blocks of {block} numbers; rows of {tensor.shape[-1]} are none of them")
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
    """Write the file. Raises ``UserError`` for a shape that the type cannot have."""
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
        norm = len(tensor.shape) == 1
        writer.write_tensor_data(
            np.ones(tensor.shape, np.float32) if norm else np.resize(pieces[tensor.kind], sizes[name])
        )
    writer.close()


def _head(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_fields(writer: Any, config: dict[str, Any], weights: str) -> None:
    writer.add_file_type(TYPES[weights])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head(config))
    writer.add_value_length(_head(config))
    writer.add_rope_dimension_count(_head(config))
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
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
