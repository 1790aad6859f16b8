"""What the ``model_type`` of a config.json implies beyond its keys, and how each family calls what others have too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that a ``model_type`` implies, beyond its config.json (transformers, ``modeling_*.py``)."""

    qkv_bias: bool = False
    o_bias: bool = False
    o_biased: bool = False
    """Whether the output of attention has a bias where ``attention_bias`` is set."""
    qk_norm: bool = False
    whole_qk_norm: bool = False
    """Whether those norms are as wide as all heads together."""
    norms: int = 2
    """Norms of width ``hidden_size`` in a layer."""
    sinks: bool = False
    tied: bool = False
    pattern: int = 0
    """Every ``pattern``-th layer has full attention, the others a window; 0: all have the window, if there is one."""
    llamacpp_windows: bool = False
    fused: bool = False
    """Whether Q, K and V are one matrix, and gate and up another."""
    gated: bool = True
    """Whether feed-forward networks have a gate."""
    gated_attention: bool = False
    """Whether attention has a gate for each number of its result."""
    corrected: bool = False
    """Whether routers keep a correction for each expert."""
    gated_shared: bool = False
    """Whether the expert that all tokens share has a gate."""
    state: str = ""
    """Which of ``layer_parts.STATES`` its layers with a state are."""
    needed: tuple[str, ...] = ()
    """Keys that a config.json of this family must have."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of keys that a config.json of this family may omit."""
    adapt: Callable[[Fields], Fields] | None = None
    """Keys of this family under the names that ``ModelConfig`` has for them."""


def _given(fields: Fields, **names: str) -> Fields:
    """The keys that there are, by their new names."""
    return {new: fields[old] for new, old in names.items() if fields.get(old) is not None}


def _mamba2(fields: Fields) -> Fields:
    """Granite 4, Bamba and Falcon-H1: Mamba 2."""
    d, heads = fields.get("hidden_size", 0), fields.get("mamba_n_heads") or 128
    inner = fields.get("mamba_d_ssm") or fields.get("mamba_expand", 2) * d
    head = fields.get("mamba_d_head", "auto")
    return {
        "state_heads": heads,
        "state_head": inner // heads if head == "auto" else head,
        "state_norm": fields.get("mamba_rms_norm", True),
        **{"state_groups": 1, "state_size": 256, "state_kernel": 4},
        **_given(fields, state_groups="mamba_n_groups", state_size="mamba_d_state", state_kernel="mamba_d_conv"),
    }


def _granite(fields: Fields) -> Fields:
    found = _mamba2(fields)
    if fields.get("num_local_experts"):
        return found | _given(fields, shared_expert_width="shared_intermediate_size")
    return (
        found
        | {"num_local_experts": None, "num_experts_per_tok": None}
        | _given(fields, intermediate_size="shared_intermediate_size")
    )


def _bamba(fields: Fields) -> Fields:
    return _mamba2(fields) | {"layer_types": _except(fields, fields.get("attn_layer_indices") or [], "mamba")}


def _falcon_h1(fields: Fields) -> Fields:
    found = {"mamba_d_ssm": fields.get("mamba_d_ssm"), "mamba_rms_norm": fields.get("mamba_rms_norm", False)}
    return _mamba2(fields | found) | {"layer_types": ["parallel"] * fields.get("num_hidden_layers", 0)}


def _except(fields: Fields, attention: list[int], others: str) -> list[str]:
    """The kinds of layers, of which some have attention."""
    n = fields.get("num_hidden_layers", 0)
    return ["full_attention" if i in attention else others for i in range(n)]


def _mamba_rank(fields: Fields, given: str) -> int:
    rank: int | str = fields.get(given, "auto")
    return -(-int(fields.get("hidden_size", 0)) // 16) if isinstance(rank, str) else rank


def _jamba(fields: Fields) -> Fields:
    n, (period, offset) = (
        fields.get("num_hidden_layers", 0),
        (
            fields.get("attn_layer_period", 8),
            fields.get("attn_layer_offset", 4),
        ),
    )
    every, first = fields.get("expert_layer_period", 2), fields.get("expert_layer_offset", 1)
    several = (fields.get("num_experts") or 1) > 1
    return {
        "layer_types": _except(fields, list(range(offset, n, period)), "mamba"),
        "networks": ["experts" if several and i % every == first else "dense" for i in range(n)],
        "num_experts": fields.get("num_experts") if several else None,
        "state_inner": fields.get("mamba_expand", 2) * fields.get("hidden_size", 0),
        "state_rank": _mamba_rank(fields, "mamba_dt_rank"),
        "state_norm": True,
        **{"state_size": 16, "state_kernel": 4},
        **_given(fields, state_size="mamba_d_state", state_kernel="mamba_d_conv"),
    }


def _only_mamba(fields: Fields) -> Fields:
    """Mamba and Falcon Mamba, which have no feed-forward networks."""
    return {
        **_without_attention(fields),
        "state_inner": fields.get("intermediate_size") or fields.get("expand", 2) * fields.get("hidden_size", 0),
        "state_rank": _mamba_rank(fields, "time_step_rank"),
        **{"state_size": 16, "state_kernel": 4},
        **_given(fields, state_size="state_size", state_kernel="conv_kernel"),
    }


def _only_mamba2(fields: Fields) -> Fields:
    return {
        **_without_attention(fields),
        "state_norm": True,
        **{"state_heads": 128, "state_head": 64, "state_groups": 8, "state_size": 128, "state_kernel": 4},
        **_given(fields, state_heads="num_heads", state_head="head_dim", state_groups="n_groups"),
        **_given(fields, state_size="state_size", state_kernel="conv_kernel"),
    }


def _without_attention(fields: Fields) -> Fields:
    n = fields.get("num_hidden_layers", 0)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
    return {**heads, "intermediate_size": 0, "layer_types": ["mamba"] * n, "networks": ["none"] * n}


def _nemotron_h(fields: Fields) -> Fields:
    """Each layer has attention, a state, or a feed-forward network."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    kinds = fields.get("layers_block_type") or [letters.get(c, c) for c in fields.get("hybrid_override_pattern", "")]
    kinds = [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in kinds]
    experts = "moe" in kinds
    return {
        "num_hidden_layers": len(kinds) or fields.get("num_hidden_layers", 0),
        "layer_types": ["none" if kind in ("mlp", "moe") else kind for kind in kinds],
        "networks": [{"mlp": "dense", "moe": "experts"}.get(kind, "none") for kind in kinds],
        "n_routed_experts": fields.get("n_routed_experts") if experts else None,
        "n_shared_experts": None,
        "state_norm": True,
        "recurrent_type": _TYPES.get(fields.get("mamba_ssm_cache_dtype", "float32"), ""),
        **(_given(fields, shared_expert_width="moe_shared_expert_intermediate_size") if experts else {}),
        **{"state_heads": 128, "state_head": 64, "state_groups": 8, "state_size": 128, "state_kernel": 4},
        **_given(fields, state_heads="mamba_num_heads", state_head="mamba_head_dim", state_groups="n_groups"),
        **_given(fields, state_size="ssm_state_size", state_kernel="conv_kernel"),
    }


def _lfm2(fields: Fields) -> Fields:
    width = fields.get("block_ff_dim") or fields.get("intermediate_size", 0)
    if fields.get("block_auto_adjust_ff_dim", True) and "num_experts" not in fields:
        unit = fields.get("block_multiple_of", 256)
        width = -(-int(fields.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // unit) * unit
    found = {"intermediate_size": width, "state_kernel": fields.get("conv_L_cache", 3)}
    if fields.get("layer_types") is None and fields.get("full_attn_idxs") is not None:
        found["layer_types"] = _except(fields, fields["full_attn_idxs"], "conv")
    return found | _given(fields, tie_word_embeddings="tie_embedding", first_k_dense_replace="num_dense_layers")


def _qwen3_next(fields: Fields) -> Fields:
    n, every = fields.get("num_hidden_layers", 0), fields.get("full_attention_interval", 4)
    return {
        "layer_types": fields.get("layer_types")
        or _except(fields, list(range(every - 1, n, every)), "linear_attention"),
        "recurrent_type": _TYPES.get(fields.get("mamba_ssm_dtype", ""), ""),
        **{"state_heads": 32, "state_head": 128, "state_groups": 16, "state_size": 128, "state_kernel": 4},
        **_given(fields, state_heads="linear_num_value_heads", state_head="linear_value_head_dim"),
        **_given(fields, state_groups="linear_num_key_heads", state_size="linear_key_head_dim"),
        **_given(fields, state_kernel="linear_conv_kernel_dim"),
        **_given(fields, shared_expert_width="shared_expert_intermediate_size"),
        **({} if fields.get("intermediate_size") else _given(fields, intermediate_size="moe_intermediate_size")),
    }


def _kimi_linear(fields: Fields) -> Fields:
    told = fields.get("linear_attn_config") or {}
    kinds = fields.get("layer_types") or _except(fields, [i - 1 for i in told.get("full_attn_layers", [])], "kimi")
    return {
        "layer_types": kinds,
        **{"state_heads": 32, "state_head": 128, "state_kernel": 4},
        **_given(fields, state_heads="linear_num_heads", state_head="linear_head_dim"),
        **_given(fields, state_kernel="linear_conv_kernel_dim", n_shared_experts="num_shared_experts"),
        **_given(fields, num_experts_per_tok="num_experts_per_token"),
        **_given(told, state_heads="num_heads", state_head="head_dim", state_kernel="short_conv_kernel_size"),
    }


def _minimax(fields: Fields) -> Fields:
    kinds = fields.get("attn_type_list")
    found = {} if kinds is None else {"layer_types": ["full_attention" if kind else "lightning" for kind in kinds]}
    return found | ({"sliding_window": None} if fields.get("sliding_window") else {})


def _llama4(fields: Fields) -> Fields:
    n, every = fields.get("num_hidden_layers", 0), fields.get("no_rope_layer_interval", 4)
    # Layers without positions have full attention.
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(n)]
    step = fields.get("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers") or range(step - 1, n, step)
    return {
        "layer_types": ["chunked_attention" if some else "full_attention" for some in rotated],
        "networks": ["experts" if i in sparse else "dense" for i in range(n)],
        "n_shared_experts": 1,
        **_given(fields, intermediate_size="intermediate_size_mlp", moe_intermediate_size="intermediate_size"),
    }


def _gemma3n(fields: Fields) -> Fields:
    width = fields.get("intermediate_size")
    return {"intermediate_size": width[0]} if isinstance(width, list) and len(set(width)) == 1 else {}


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
_QWEN3_NEXT = Family(state="gated_delta_net", qk_norm=True, gated_attention=True, gated_shared=True, adapt=_qwen3_next)
_QWEN3_5_SHAPE = (
    ("head_dim", 256),
    ("vocab_size", 248320),
    ("mamba_ssm_dtype", "float32"),
    ("max_position_embeddings", 262144),
)
FAMILIES: dict[str, Family] = {
    # llama.cpp runs Mistral as a Llama, without its window, and has switched off Phi's (PR 13676).
    "llama": Family(o_biased=True),
    "mistral": Family(),
    "mixtral": Family(needed=_EXPERTS),
    "phi3": Family(fused=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, o_biased=True),
    "qwen3_moe": Family(
        qk_norm=True, o_biased=True, needed=("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    ),
    "gemma2": Family(norms=4, tied=True, pattern=2, llamacpp_windows=True),
    "gemma3_text": Family(
        qk_norm=True,
        norms=4,
        tied=True,
        pattern=6,
        llamacpp_windows=True,
        defaults=(
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("vocab_size", 262208),
            ("max_position_embeddings", 131072),
        ),
    ),
    "gemma3n_text": Family(
        qk_norm=True,
        norms=4,
        tied=True,
        pattern=5,
        llamacpp_windows=True,
        adapt=_gemma3n,
        defaults=(
            ("num_attention_heads", 8),
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("vocab_size", 262400),
            ("num_kv_shared_layers", 15),
            ("sliding_window", 512),
            ("vocab_size_per_layer_input", 262144),
            ("hidden_size_per_layer_input", 256),
            ("laurel_rank", 64),
            ("altup_num_inputs", 4),
        ),
    ),
    "cohere2": Family(norms=1, tied=True, pattern=4, llamacpp_windows=True),
    "llama4_text": Family(llamacpp_windows=True, needed=("attention_chunk_size", *_EXPERTS), adapt=_llama4),
    "gpt_oss": Family(qkv_bias=True, o_bias=True, sinks=True, pattern=2, llamacpp_windows=True, needed=_EXPERTS),
    "deepseek_v2": Family(needed=_LATENT),
    "deepseek_v3": Family(needed=_LATENT, corrected=True),
    "kimi_k2": Family(needed=_LATENT, corrected=True),
    "minimax_m2": Family(qk_norm=True, whole_qk_norm=True, needed=_EXPERTS, corrected=True),
    "mamba": Family(norms=1, tied=True, state="mamba", adapt=_only_mamba),
    "falcon_mamba": Family(norms=1, tied=True, state="mamba", adapt=_only_mamba),
    "mamba2": Family(norms=1, state="mamba2", adapt=_only_mamba2),
    "jamba": Family(state="mamba", adapt=_jamba),
    "bamba": Family(state="mamba2", adapt=_bamba, needed=("attn_layer_indices",)),
    "granitemoehybrid": Family(state="mamba2", adapt=_granite, needed=("layer_types", "shared_intermediate_size")),
    "falcon_h1": Family(state="mamba2", adapt=_falcon_h1),
    "nemotron_h": Family(norms=1, gated=False, state="mamba2", corrected=True, adapt=_nemotron_h),
    "lfm2": Family(qk_norm=True, tied=True, state="short_convolution", adapt=_lfm2, needed=("layer_types",)),
    "lfm2_moe": Family(
        qk_norm=True, tied=True, corrected=True, state="short_convolution", adapt=_lfm2, needed=("layer_types",)
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": Family(
        state="gated_delta_net", qk_norm=True, gated_attention=True, adapt=_qwen3_next, defaults=_QWEN3_5_SHAPE
    ),
    "qwen3_5_moe_text": Family(
        state="gated_delta_net",
        qk_norm=True,
        gated_attention=True,
        gated_shared=True,
        adapt=_qwen3_next,
        defaults=_QWEN3_5_SHAPE,
    ),
    "kimi_linear": Family(needed=_LATENT, corrected=True, state="kimi_delta", adapt=_kimi_linear),
    "minimax": Family(state="lightning", adapt=_minimax, needed=("layer_types", *_EXPERTS)),
    "minimax_text_01": Family(state="lightning", adapt=_minimax, needed=("layer_types", *_EXPERTS)),
}
WITH_TEXT = ("gemma3", "gemma3n", "llama4", "qwen3_5", "qwen3_5_moe")
"""Multimodal families, whose text part is called so with ``_text``."""
