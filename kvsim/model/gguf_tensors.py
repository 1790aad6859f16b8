"""The matrices that a GGUF file has of a model, as llama.cpp's ``convert_hf_to_gguf.py`` makes them of its config.json.

Whatever else a model has (norms, biases, sinks, routers) is small and stays in f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.model.config_shapes import ModelConfig


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A matrix, in each of some layers."""

    kind: str
    """What ``llama-quantize`` takes it for by its name: ``attn_v``, ``ffn_down``, ``output``, ``other``, ..."""
    row: int
    """Numbers in a row: the inputs of the matrix."""
    rows: int
    """Its rows; of experts, those of all of them."""
    layers: range = range(1)
    experts: bool = False
    stored: str | None = None
    """The type in which the model is published, if ``llama-quantize`` leaves it so."""

    @property
    def numbers(self) -> int:
        """Numbers in one layer."""
        return self.row * self.rows


def gguf_tensors(config: ModelConfig, *, tied: bool, experts_as: str | None) -> tuple[GgufTensor, ...]:
    """The matrices of a model. ``tied``: embeddings are the head too. ``experts_as``: the type of its experts."""
    d, layers = config.hidden_size, range(config.num_hidden_layers)
    tensors = [GgufTensor("token_embd", d, config.vocab_size)]
    if not tied:
        tensors.append(GgufTensor("output", d, config.vocab_size))
    tensors += _attention(config, layers)
    sparse = layers[min(config.first_k_dense_replace, len(layers)) :] if config.n_experts else range(0)
    dense = layers[: len(layers) - len(sparse)]
    if dense:
        tensors += _feed_forward(d, config.intermediate_size, dense, fused=config.model_type == "phi3")
    if sparse:
        # Of the types in which experts are published, llama-quantize keeps this one; it cannot read others.
        kept = experts_as if experts_as == "mxfp4" else None
        tensors += _feed_forward(d, config.d_expert, sparse, experts=config.n_experts, stored=kept)
        if config.n_shared_experts:
            tensors += _feed_forward(d, config.d_expert * config.n_shared_experts, sparse)
    return tuple(tensors)


def _attention(config: ModelConfig, layers: range) -> list[GgufTensor]:
    d, heads = config.hidden_size, config.num_attention_heads
    if config.kv_lora_rank is not None:
        nope, rope, v = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0, config.v_head_dim or 0
        q, rank = heads * (nope + rope), config.kv_lora_rank
        found = [("attn_q", d, q)]
        if config.q_lora_rank is not None:
            found = [("other", d, config.q_lora_rank), ("other", config.q_lora_rank, q)]
        # attn_kv_a_mqa, attn_k_b and attn_v_b.
        found += [("other", d, rank + rope), ("other", nope, heads * rank), ("other", rank, heads * v)]
        found.append(("attn_output", heads * v, d))
    else:
        q, kv = heads * config.d_head, config.kv_heads * config.d_head
        found = [("attn_q", d, q), ("attn_k", d, kv), ("attn_v", d, kv), ("attn_output", q, d)]
        if config.model_type == "phi3":
            found[:3] = [("attn_qkv", d, q + 2 * kv)]
    return [GgufTensor(kind, row, rows, layers) for kind, row, rows in found]


def _feed_forward(
    d: int, width: int, layers: range, *, experts: int = 0, stored: str | None = None, fused: bool = False
) -> list[GgufTensor]:
    """Gate, up and down, of one feed-forward layer or of all ``experts``; ``fused``: gate and up are one."""
    several = max(experts, 1)
    found = [("ffn_up", d, 2 * width)] if fused else [("ffn_gate", d, width), ("ffn_up", d, width)]
    return [
        GgufTensor(kind, row, rows * several, layers, bool(experts), stored)
        for kind, row, rows in (*found, ("ffn_down", width, d))
    ]
