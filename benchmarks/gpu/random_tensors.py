"""The tensors of GGUF files of known architectures, and the keys of their headers.

Names, shapes and keys are those that llama.cpp (0c1e570) loads: ``models/*.cpp`` in its ``src``, ``conversion/*.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gguf import ExpertGatingFuncType

from kvsim.model.config_shapes import model_config, shape_of_config
from kvsim.model.gguf_quantization import Mixture
from kvsim.model.gguf_tensors import GgufTensor
from kvsim.model.model_config import ModelConfig

ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "minicpm3": "minicpm3",
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3next",
}
"""``model_type`` of a config.json, and what llama.cpp calls it."""
_KINDS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Names by which ``llama-quantize`` gives types; all other matrices are alike."""
Shapes = dict[str, tuple[int, ...]]


class Tensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    """Outputs first; of experts, their number."""
    kind: str
    """A name of ``gguf.GGMLQuantizationType``."""


def tensors(config: dict[str, Any], weights: str) -> dict[str, Tensor]:
    """The tensors of a model, with the types that llama-quantize gives them (``kvsim.model.gguf_quantization``)."""
    c = model_config(config, config["model_type"])
    mixture = Mixture(shape_of_config(config, "random", "config"), weights)
    d, vocabulary, end = c.hidden_size, c.vocab_size, "token_embd_norm" if c.model_type.startswith("lfm2") else ""
    found = {"token_embd.weight": (vocabulary, d), f"{end or 'output_norm'}.weight": (d,)}
    if not c.tied:
        found["output.weight"] = (vocabulary, d)
    for i, (mixer, network) in enumerate(zip(c.mixer_of_layers(), c.network_of_layers(), strict=True)):
        own = {"attn_norm.weight": (d,)} | (_state(c) if mixer == "state" else {})
        if mixer == "full":
            own |= _attention(c) if c.kv_lora_rank is None else _latent(c)
        if network != "none":
            own |= _experts(c) if network == "experts" else _network(c, c.intermediate_size)
            if mixer != "none":
                own["post_attention_norm.weight" if c.model_type == "qwen3_next" else "ffn_norm.weight"] = (d,)
        found |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    return {name: Tensor(shape, _kind(name, shape, mixture)) for name, shape in found.items()}


def _kind(name: str, shape: tuple[int, ...], mixture: Mixture) -> str:
    """The storage type: f32 of vectors, routers and convolutions, and of the diagonals of a state."""
    plain = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
    if len(shape) == 1 or not name.endswith(".weight") or name.endswith(plain):
        return "F32"
    *block, part, _ = name.split(".")
    kind = part.removesuffix("_exps").removesuffix("_shexp")
    kind = "attn_v" if kind == "attn_kv_b" else kind
    kind = kind if kind in (*_KINDS, "token_embd", "output") else "other"
    layer = int(block[1]) if block else 0
    row, rows = shape[-1], shape[-2]
    return mixture.type_of(GgufTensor(kind, row, rows, (layer,), "_exps" in part), layer).upper()


def _attention(c: ModelConfig) -> Shapes:
    d, head, q, kv = c.hidden_size, c.d_head, c.num_attention_heads * c.d_head, c.kv_heads * c.d_head
    norms = {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)} if c.family.qk_norm else {}
    return {
        "attn_q.weight": (2 * q if c.family.gated_attention else q, d),
        "attn_k.weight": (kv, d),
        "attn_v.weight": (kv, d),
        "attn_output.weight": (d, q),
        **norms,
    }


def _latent(c: ModelConfig) -> Shapes:
    d, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank or 0
    nope, rope, v = c.qk_nope_head_dim or 0, c.qk_rope_head_dim or 0, c.v_head_dim or 0
    q: Shapes = {"attn_q.weight": (heads * (nope + rope), d)}
    if c.q_lora_rank is not None:
        q = {"attn_q_a.weight": (c.q_lora_rank, d), "attn_q_b.weight": (heads * (nope + rope), c.q_lora_rank)}
        q["attn_q_a_norm.weight"] = (c.q_lora_rank,)
    both: Shapes = {"attn_k_b.weight": (heads, rank, nope), "attn_v_b.weight": (heads, v, rank)}
    if c.family.expanded:
        both = {"attn_kv_b.weight": (heads * (nope + v), rank)}
    return {
        **q,
        "attn_kv_a_mqa.weight": (rank + rope, d),
        "attn_kv_a_norm.weight": (rank,),
        **both,
        "attn_output.weight": (d, heads * v),
        **(_indexer(c) if c.indexer_types else {}),
    }


def _indexer(c: ModelConfig) -> Shapes:
    d, heads, head = c.hidden_size, c.index_n_heads, c.index_head_dim
    return {
        "indexer.k_norm.weight": (head,),
        "indexer.k_norm.bias": (head,),
        "indexer.proj.weight": (heads, d),
        "indexer.attn_k.weight": (head, d),
        "indexer.attn_q_b.weight": (heads * head, c.q_lora_rank or 0),
    }


def _state(c: ModelConfig) -> Shapes:
    d, kernel, heads, inner = c.hidden_size, c.state_kernel, c.state_heads, c.state_heads * c.state_head
    if c.family.state == "short_convolution":
        return {
            "shortconv.conv.weight": (d, kernel),
            "shortconv.in_proj.weight": (3 * d, d),
            "shortconv.out_proj.weight": (d, d),
        }
    convolved = inner + 2 * c.state_groups * c.state_size
    both = {"ssm_conv1d.weight": (convolved, kernel), "ssm_dt.bias": (heads,), "ssm_out.weight": (d, inner)}
    if c.family.state == "gated_delta_net":
        return both | {
            "attn_qkv.weight": (convolved, d),
            "attn_gate.weight": (inner, d),
            "ssm_ba.weight": (2 * heads, d),
            "ssm_a": (heads,),
            "ssm_norm.weight": (c.state_head,),
        }
    return both | {
        "ssm_in.weight": (inner + convolved + heads, d),
        "ssm_conv1d.bias": (convolved,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_norm.weight": (c.state_groups, inner // c.state_groups),
    }


def _network(c: ModelConfig, width: int, suffix: str = "", experts: tuple[int, ...] = ()) -> Shapes:
    d = c.hidden_size
    parts = {"ffn_gate": (width, d), "ffn_up": (width, d), "ffn_down": (d, width)}
    return {
        f"{part}{suffix}.weight": (*experts, *shape)
        for part, shape in parts.items()
        if part != "ffn_gate" or c.family.gated
    }


def _experts(c: ModelConfig) -> Shapes:
    found = _network(c, c.d_expert, "_exps", (c.n_experts,)) | {"ffn_gate_inp.weight": (c.n_experts, c.hidden_size)}
    if c.shared_width:
        found |= _network(c, c.shared_width, "_shexp")
    if c.family.gated_shared:
        found["ffn_gate_inp_shexp.weight"] = (c.hidden_size,)
    return found | ({"exp_probs_b.bias": (c.n_experts,)} if c.family.corrected else {})


def fields(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the header, by the methods of ``gguf.GGUFWriter`` that add them, but for those of the vocabulary."""
    c = model_config(config, config["model_type"])
    mixers, networks = c.mixer_of_layers(), c.network_of_layers()
    kv_heads: Any = 1 if c.kv_lora_rank is not None and not c.family.expanded else c.kv_heads
    if c.model_type in ("granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h"):
        kv_heads = [c.kv_heads if mixer == "full" else 0 for mixer in mixers]
    width: Any = c.intermediate_size
    if c.model_type == "nemotron_h":
        width = [c.intermediate_size if network == "dense" else 0 for network in networks]
    found = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings or 4096,
        "embedding_length": c.hidden_size,
        "feed_forward_length": width,
        "head_count": c.num_attention_heads,
        "head_count_kv": kv_heads,
        "key_length": c.d_head,
        "value_length": c.d_head,
        "rope_dimension_count": c.d_head // 4 if c.model_type == "qwen3_next" else c.d_head,
        "rope_freq_base": 1e6,
        "layer_norm_rms_eps": 1e-6,
        "layer_norm_eps": 1e-6,
    }
    if c.kv_lora_rank is not None:
        found |= _latent_fields(c)
    if c.n_experts:
        found |= {
            "expert_count": c.n_experts,
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.d_expert,
            "leading_dense_block_count": c.first_k_dense_replace,
            "expert_shared_feed_forward_length": c.shared_width,
            "expert_shared_count": c.n_shared_experts or 0,
            "expert_weights_scale": 1.0,
        }
    if c.family.corrected:
        found["expert_gating_func"] = ExpertGatingFuncType.SIGMOID
    if c.model_type == "granitemoehybrid":
        scales = {"attention_scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
        found |= scales | {"rope_scaling_finetuned": False}
    return found | (_state_fields(c) if c.family.state else {})


def _latent_fields(c: ModelConfig) -> dict[str, Any]:
    nope, rope, rank = c.qk_nope_head_dim or 0, c.qk_rope_head_dim or 0, c.kv_lora_rank or 0
    ranks = {"kv_lora_rank": rank, "rope_dimension_count": rope}
    ranks |= {} if c.q_lora_rank is None else {"q_lora_rank": c.q_lora_rank}
    if c.family.expanded:
        return ranks | {"key_length": nope + rope, "value_length": c.v_head_dim}
    if c.indexer_types:
        index = {"head_count": c.index_n_heads, "key_length": c.index_head_dim, "top_k": 64}
        ranks |= {f"indexer_{name}": value for name, value in index.items()}
    return ranks | {
        "key_length": rank + rope,
        "value_length": rank,
        "key_length_mla": nope + rope,
        "value_length_mla": c.v_head_dim,
    }


def _state_fields(c: ModelConfig) -> dict[str, Any]:
    if c.family.state == "short_convolution":
        return {"shortconv_l_cache": c.state_kernel, "vocab_size": c.vocab_size}
    found = {
        "ssm_conv_kernel": c.state_kernel,
        "ssm_inner_size": c.state_heads * c.state_head,
        "ssm_state_size": c.state_size,
        "ssm_time_step_rank": c.state_heads,
        "ssm_group_count": c.state_groups,
    }
    if c.model_type == "qwen3_next":
        found["full_attention_interval"] = c.mixer_of_layers().index("full") + 1
    return found
