"""How many weights a model has by its config.json, in which matrices, and in which types they are published."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kvsim.model import layer_parts
from kvsim.model.cache_groups import PassWeights
from kvsim.model.gguf_tensors import GgufTensor
from kvsim.model.model_config import ModelConfig

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def parts(c: ModelConfig) -> Iterator[tuple[int, layer_parts.Part]]:
    """The parts of all layers, each with its layer."""
    full = layer_parts.attention(c) if c.kv_lora_rank is None else layer_parts.latent(c)
    own = None
    if c.num_mem_blocks:
        full, own = layer_parts.shared_block(c), layer_parts.adapters(c)
    kept = layer_parts.STATES[c.family.state](c)[0] if c.family.state else None
    chooses = layer_parts.indexer(c) if c.indexer_types else None
    indexers, residuals = c.indexer_types_of_layers(), c.attn_res_block_size > 0
    network_of = {
        "dense": layer_parts.dense(c, c.intermediate_size),
        "experts": layer_parts.sparse(c) if c.n_experts else None,
    }
    for layer, (mixer, network) in enumerate(zip(c.mixer_of_layers(), c.network_of_layers(), strict=True)):
        found = [
            chooses if indexers[layer] == "full" else None,
            full if mixer not in ("state", "none") else None,
            own if mixer == "parallel" else None,
            kept if mixer in ("state", "parallel") else None,
            network_of["dense"] if network in ("dense", "both") else None,
            network_of["experts"] if network in ("experts", "both") else None,
            layer_parts.hyper_connections(c) if c.hc_mult else None,
            layer_parts.first_values(c) if c.value_rank and layer else None,
            layer_parts.side_streams(c) if c.altup_num_inputs else None,
            layer_parts.Part((), (c.family.norms + 4 * residuals) * c.hidden_size),
        ]
        yield from ((layer, part) for part in found if part is not None)


def repeated(c: ModelConfig) -> int:
    """Weights that later layers use again, since they share a block."""
    if not c.num_mem_blocks:
        return 0
    return max(0, c.mixer_of_layers().count("parallel") - c.num_mem_blocks) * layer_parts.shared_block(c).numbers


def count(c: ModelConfig) -> tuple[int, int]:
    """Number of weights outside and inside the matrices of experts (transformers, ``modeling_*.py``)."""
    d = c.hidden_size
    numbers = c.vocab_size * d * (1 if c.tied else 2) + d * (c.family.outer_norms + 2 * (c.attn_res_block_size > 0))
    numbers += (c.hc_mult * d + 1) * c.hc_mult + 1 if c.hc_mult else 0
    numbers += layer_parts.side_inputs(c).numbers if c.altup_num_inputs else 0
    of_layers = [part for _, part in parts(c)]
    experts = sum(part.of_experts for part in of_layers)
    return numbers + sum(part.numbers for part in of_layers) - experts - repeated(c), experts


def tensors(c: ModelConfig) -> tuple[GgufTensor, ...]:
    """The matrices that a GGUF file of it would have."""
    # Of the types in which experts are published, llama-quantize keeps this one; it cannot read others.
    kept = "mxfp4" if type_of_experts(c) == "mxfp4" else None
    found = [GgufTensor("token_embd", c.hidden_size, c.vocab_size)]
    if not c.tied:
        found.append(GgufTensor("output", c.hidden_size, c.vocab_size))
    if c.altup_num_inputs:
        found += layer_parts.side_inputs(c).matrices
    layers: dict[layer_parts.Part, list[int]] = {}
    for layer, part in parts(c):
        layers.setdefault(part, []).append(layer)
    for part, where in layers.items():
        if c.num_mem_blocks and part == layer_parts.shared_block(c):
            where = where[: c.num_mem_blocks]
        for m in part.matrices:
            found.append(replace(m, layers=tuple(where), stored=kept if m.experts else None))
    return tuple(found)


def by_use(c: ModelConfig) -> tuple[PassWeights, PassWeights, PassWeights]:
    """The weights outside experts, in experts and in the head (``MemoryShape``)."""
    numbers, experts = count(c)
    table = c.vocab_size * c.hidden_size
    looked_up = table * (1 if c.tied else 2)
    if c.altup_num_inputs:
        inputs = layer_parts.side_inputs(c).matrices[0]
        looked_up += inputs.row * inputs.rows
    narrow = type_of_experts(c)
    kept = (0, 0) if narrow else kept_numbers(c.quantization_config or {}, tensors(c))
    return (
        PassWeights(numbers - looked_up, kept=kept[0]),
        PassWeights(experts, narrow or "default", kept=kept[1]),
        PassWeights(table),
    )


def type_of_experts(c: ModelConfig) -> str | None:
    """The type of the matrices of experts where they alone are converted (``modules_to_not_convert``, ``ignore``),
    as in gpt-oss, Kimi K2.5 and K3; None otherwise."""
    told = c.quantization_config or {}
    if not c.n_experts:
        return None
    if told.get("quant_method") == "mxfp4":
        return "mxfp4"
    if told.get("format") == "mxfp4-pack-quantized" and c.model_type == "kimi_linear":
        return "mxfp4"
    packed = told.get("quant_method") == "compressed-tensors" and c.model_type == "kimi_k2"
    return "int4_g32" if packed else None


def weights(c: ModelConfig) -> tuple[dict[str, int], str]:
    """Number of weights by storage type, and the type of those that users may choose (``MemoryShape``)."""
    numbers, experts = count(c)
    stated = c.torch_dtype or c.dtype
    default = _DTYPES.get(stated or "bfloat16", "")
    told = c.quantization_config or {}
    method = told.get("quant_method")
    if narrow := type_of_experts(c):
        return {"default": numbers, narrow: experts}, default
    if method not in (None, "mxfp4"):
        default = stored_type(told) or f"quant_method {method!r:.40}"
    elif method is None and not default:
        default = f"torch_dtype {stated!r:.40}"
    return {"default": numbers + experts}, default


_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
"""Keys that name what is not converted: AWQ, FBGEMM and transformers, compressed-tensors, AutoFP8, ModelOpt."""
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "other": "self_attn.latent",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in a layer of transformers, by kinds of tensors; those of a latent have one name."""


def stored_type(told: Mapping[str, Any]) -> str | None:
    """The type of ``--weights`` that a ``quantization_config`` means; None if it is not known here."""
    method = told.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if told.get("weight_block_size") else "fp8"
    if method in ("awq", "gptq"):
        return _of_integers(told.get("bits"), told.get("group_size"))
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(told.get("quant_algo")))
    groups = told.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, dict) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
        if weights.get("type") != "float":
            return _of_integers(weights.get("num_bits"), weights.get("group_size"))
        if weights.get("num_bits") == 8:
            return "fp8_block" if weights.get("strategy") == "block" else "fp8"
        return "nvfp4" if weights.get("num_bits") == 4 else None
    return None


def _of_integers(bits: Any, group: Any) -> str | None:
    return {4: "int4_g32" if group == 32 else "int4", 8: "int8"}.get(bits)


def kept_numbers(told: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> tuple[int, int]:
    """Weights of layers outside and inside experts that a ``quantization_config`` leaves in 16 bits.

    Names are compared as those who read them do: ``re:`` begins a regular expression (compressed-tensors), ``*`` stands
    for anything (ModelOpt), other names mean a module and all within it (vLLM, ``is_layer_skipped``).
    """
    entries = [str(entry) for key in _LISTS for entry in told.get(key) or () if "vis" not in str(entry)]
    patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    globs = [entry for entry in entries if "*" in entry and not entry.startswith("re:")]
    named = {entry[max(entry.find("layers."), 0) :] for entry in entries}

    def kept(kind: str, layer: int, experts: bool) -> bool:
        module = _MODULES[kind]
        module = module.replace("mlp.", "mlp.experts.0.") if experts else module
        name = f"model.layers.{layer}.{module}"
        parts = name.split(".")[1:]
        within = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
        found = not named.isdisjoint(within) or any(pattern.match(name) for pattern in patterns)
        return found or any(fnmatchcase(name, glob) for glob in globs)

    numbers = [0, 0]
    if entries:
        for tensor in tensors:
            if tensor.kind in _MODULES:
                layers = sum(kept(tensor.kind, layer, tensor.experts) for layer in tensor.layers)
                numbers[tensor.experts] += layers * tensor.numbers
    return numbers[0], numbers[1]
