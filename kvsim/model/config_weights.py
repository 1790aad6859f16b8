"""How many weights a model has by its config.json, in which matrices, and in which types they are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvsim.model.cache_groups import PassWeights
from kvsim.model.gguf_tensors import GgufTensor
from kvsim.model.layer_parts import (
    STATES,
    Part,
    adapters,
    attention,
    dense,
    first_values,
    hyper_connections,
    indexer,
    latent,
    shared_block,
    side_inputs,
    side_streams,
    sparse,
)
from kvsim.model.model_config import ModelConfig
from kvsim.model.published_weights import kept_numbers, stored_type

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def parts(c: ModelConfig) -> Iterator[tuple[int, Part]]:
    """The parts of all layers, each with its layer."""
    full = attention(c) if c.kv_lora_rank is None else latent(c)
    own = None
    if c.num_mem_blocks:
        full, own = shared_block(c), adapters(c)
    kept = STATES[c.family.state](c)[0] if c.family.state else None
    chooses = indexer(c) if c.indexer_types else None
    indexers, residuals = c.indexer_types_of_layers(), c.attn_res_block_size > 0
    network_of = {"dense": dense(c, c.intermediate_size), "experts": sparse(c) if c.n_experts else None}
    for layer, (mixer, network) in enumerate(zip(c.mixer_of_layers(), c.network_of_layers(), strict=True)):
        found = [
            chooses if indexers[layer] == "full" else None,
            full if mixer not in ("state", "none") else None,
            own if mixer == "parallel" else None,
            kept if mixer in ("state", "parallel") else None,
            network_of["dense"] if network in ("dense", "both") else None,
            network_of["experts"] if network in ("experts", "both") else None,
            hyper_connections(c) if c.hc_mult else None,
            first_values(c) if c.value_rank and layer else None,
            side_streams(c) if c.altup_num_inputs else None,
            Part((), (c.family.norms + 4 * residuals) * c.hidden_size),
        ]
        yield from ((layer, part) for part in found if part is not None)


def repeated(c: ModelConfig) -> int:
    """Weights that later layers use again, since they share a block."""
    if not c.num_mem_blocks:
        return 0
    return max(0, c.mixer_of_layers().count("parallel") - c.num_mem_blocks) * shared_block(c).numbers


def count(c: ModelConfig) -> tuple[int, int]:
    """Number of weights outside and inside the matrices of experts (transformers, ``modeling_*.py``)."""
    d = c.hidden_size
    numbers = c.vocab_size * d * (1 if c.tied else 2) + d * (c.family.outer_norms + 2 * (c.attn_res_block_size > 0))
    numbers += (c.hc_mult * d + 1) * c.hc_mult + 1 if c.hc_mult else 0
    numbers += side_inputs(c).numbers if c.altup_num_inputs else 0
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
        found += side_inputs(c).matrices
    layers: dict[Part, list[int]] = {}
    for layer, part in parts(c):
        layers.setdefault(part, []).append(layer)
    for part, where in layers.items():
        if c.num_mem_blocks and part == shared_block(c):
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
        inputs = side_inputs(c).matrices[0]
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
