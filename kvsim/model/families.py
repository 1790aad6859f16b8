"""What the ``model_type`` of a config.json implies beyond its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvsim.model import family_keys as keys
from kvsim.model import recurrent_keys
from kvsim.model.family_keys import Fields


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
    outer_norms: int = 1
    """Vectors of width ``hidden_size`` outside of layers."""
    sinks: bool = False
    tied: bool = False
    pattern: int = 0
    """Every ``pattern``-th layer has full attention, the others a window; 0: all have the window, if there is one."""
    llamacpp_windows: bool = False
    expanded: bool = False
    """Whether K and V are cached by head although they are made of a latent."""
    fused: bool = False
    """Whether Q, K and V are one matrix, and gate and up another."""
    gated: bool = True
    """Whether feed-forward networks have a gate."""
    gated_attention: bool = False
    """Whether attention has a gate for each number of its result."""
    corrected: bool = False
    """Whether routers keep a correction for each expert."""
    normed_experts: bool = False
    """Whether a norm follows the experts."""
    gated_shared: bool = False
    """Whether the expert that all tokens share has a gate."""
    only: str = ""
    """``llamacpp`` or ``vllm`` where the other does not run it (``llama-arch.cpp`` in 0c1e570, ``registry.py``)."""
    vllm_until: str = ""
    """The last version of vLLM that serves it (``_PREVIOUSLY_SUPPORTED_MODELS`` in its ``registry.py``)."""
    state: str = ""
    """Which of ``layer_parts.STATES`` its layers with a state are."""
    takes_back: bool = False
    """Whether llama.cpp can take tokens back from these states (``llama-arch.cpp``)."""
    needed: tuple[str, ...] = ()
    """Keys that a config.json of this family must have."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of keys that a config.json of this family may omit."""
    adapt: Callable[[Fields], Fields] | None = None
    """Keys of this family under the names that ``ModelConfig`` has for them."""


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_INDEX = ("q_lora_rank", "index_n_heads", "index_head_dim")
_RANKS = ("decay_rank", "mix_rank", "gate_rank", "value_rank")
_EXPERTS = ("num_local_experts", "num_experts_per_tok")
_QWEN3_NEXT = Family(
    state="gated_delta_net", qk_norm=True, gated_attention=True, gated_shared=True, adapt=keys.qwen3_next
)
_LFM2 = Family(
    qk_norm=True, tied=True, state="short_convolution", takes_back=True, adapt=keys.lfm2, needed=("layer_types",)
)
_MINIMAX = Family(state="lightning", vllm_until="0.23.0", adapt=keys.minimax, needed=("layer_types", *_EXPERTS))
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
        adapt=keys.gemma3n,
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
    "llama4_text": Family(llamacpp_windows=True, needed=("attention_chunk_size", *_EXPERTS), adapt=keys.llama4),
    "gpt_oss": Family(qkv_bias=True, o_bias=True, sinks=True, pattern=2, llamacpp_windows=True, needed=_EXPERTS),
    "deepseek_v2": Family(needed=_LATENT),
    "deepseek_v3": Family(needed=_LATENT, corrected=True),
    "deepseek_v32": Family(needed=_LATENT + _INDEX, corrected=True, adapt=keys.index),
    "glm_moe_dsa": Family(needed=_LATENT + _INDEX, corrected=True, adapt=keys.index),
    "hy_v4": Family(needed=_LATENT + _INDEX, corrected=True, sinks=True, adapt=keys.hy4),
    "kimi_k2": Family(needed=_LATENT, corrected=True),
    "axk1": Family(needed=_LATENT, corrected=True, normed_experts=True, only="vllm"),
    "glm4_moe_lite": Family(needed=_LATENT, corrected=True),
    "minicpm3": Family(needed=_LATENT, tied=True, expanded=True, adapt=keys.minicpm3),
    "longcat_flash": Family(needed=_LATENT, corrected=True, adapt=keys.longcat, only="vllm"),
    "mistral4": Family(needed=_LATENT),
    "sarvam_mla": Family(needed=_LATENT, corrected=True, adapt=keys.sarvam, only="vllm"),
    "youtu": Family(needed=_LATENT, tied=True),
    "minimax_m2": Family(qk_norm=True, whole_qk_norm=True, needed=_EXPERTS, corrected=True),
    "mamba": Family(norms=1, tied=True, state="mamba", adapt=recurrent_keys.only_mamba),
    "falcon_mamba": Family(norms=1, tied=True, state="mamba", adapt=recurrent_keys.only_mamba),
    "mamba2": Family(norms=1, state="mamba2", adapt=recurrent_keys.only_mamba2),
    "rwkv6": Family(norms=4, outer_norms=4, state="rwkv6", adapt=recurrent_keys.rwkv6, only="llamacpp"),
    "rwkv7": Family(norms=4, outer_norms=4, state="rwkv7", adapt=recurrent_keys.rwkv7, only="llamacpp", needed=_RANKS),
    "jamba": Family(state="mamba", adapt=keys.jamba),
    "bamba": Family(state="mamba2", vllm_until="0.23.0", adapt=keys.bamba, needed=("attn_layer_indices",)),
    "granitemoehybrid": Family(state="mamba2", adapt=keys.granite, needed=("layer_types", "shared_intermediate_size")),
    "falcon_h1": Family(state="mamba2", adapt=keys.falcon_h1),
    "nemotron_h": Family(norms=1, gated=False, state="mamba2", takes_back=True, corrected=True, adapt=keys.nemotron_h),
    "plamo2": Family(
        norms=4,
        tied=True,
        fused=True,
        qk_norm=True,
        whole_qk_norm=True,
        state="plamo_mamba",
        vllm_until="0.26.0",
        adapt=keys.plamo2,
    ),
    "zamba2": Family(norms=1, tied=True, state="mamba2", adapt=keys.zamba2, only="vllm", needed=("layer_types",)),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, corrected=True),
    "olmo_hybrid": Family(
        state="gated_delta_net", qk_norm=True, whole_qk_norm=True, adapt=keys.olmo_hybrid, only="vllm"
    ),
    "bailing_hybrid": Family(
        needed=_LATENT, qk_norm=True, corrected=True, state="lightning", adapt=keys.bailing, only="vllm"
    ),
    "bailing_hybrid_v3": Family(
        needed=_LATENT, corrected=True, state="kimi_delta", takes_back=True, adapt=keys.bailing
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(_QWEN3_NEXT, gated_shared=False, takes_back=True, defaults=_QWEN3_5_SHAPE),
    "qwen3_5_moe_text": replace(_QWEN3_NEXT, takes_back=True, defaults=_QWEN3_5_SHAPE),
    "kimi_linear": Family(needed=_LATENT, corrected=True, state="kimi_delta", adapt=keys.kimi_linear),
    **dict.fromkeys(("minimax", "minimax_text_01"), _MINIMAX),
}
_WITH_TEXT = ("gemma3", "gemma3n", "llama4", "qwen3_5", "qwen3_5_moe")
"""Multimodal families, whose text part is called so with ``_text``."""


def family_of(fields: Fields) -> Any:
    """The name in ``FAMILIES`` of a config.json's ``model_type``, which may stand for several; itself if unknown."""
    kind = fields.get("model_type")
    if kind == "bailing_hybrid" and fields.get("short_conv_kernel_size"):
        return "bailing_hybrid_v3"  # Ling 3, which has another linear attention than Ling 2.5.
    return f"{kind}_text" if kind in _WITH_TEXT else kind
