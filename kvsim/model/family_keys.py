"""How families call in a config.json what others have too: their keys under the names of ``ModelConfig``."""

from __future__ import annotations

from typing import Any

from kvsim.model.gguf_file import LARGEST_LAYERS

Fields = dict[str, Any]
_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def given(fields: Fields, **names: str) -> Fields:
    """The keys that there are, by their new names."""
    return {new: fields[old] for new, old in names.items() if fields.get(old) is not None}


def given_or(fields: Fields, **names: tuple[str, int]) -> Fields:
    """The keys by their new names, each with its default where it is not given."""
    return {new: default if fields.get(old) is None else fields[old] for new, (old, default) in names.items()}


def mamba_rank(fields: Fields, key: str) -> int:
    """The rank of time steps, which is told or follows from the width."""
    rank: int | str = fields.get(key, "auto")
    return -(-int(fields.get("hidden_size", 0)) // 16) if isinstance(rank, str) else rank


def _mamba2(fields: Fields) -> Fields:
    """Granite 4, Bamba and Falcon-H1: Mamba 2."""
    d, heads = fields.get("hidden_size", 0), fields.get("mamba_n_heads") or 128
    inner = fields.get("mamba_d_ssm") or fields.get("mamba_expand", 2) * d
    head = fields.get("mamba_d_head", "auto")
    return {
        "state_heads": heads,
        "state_head": inner // heads if head == "auto" else head,
        "state_norm": fields.get("mamba_rms_norm", True),
        **given_or(fields, state_groups=("mamba_n_groups", 1), state_size=("mamba_d_state", 256)),
        **given_or(fields, state_kernel=("mamba_d_conv", 4)),
    }


def granite(fields: Fields) -> Fields:
    """Granite 4: without experts, its shared network is the only one."""
    found = _mamba2(fields)
    if fields.get("num_local_experts"):
        return found | given(fields, shared_expert_width="shared_intermediate_size")
    return (
        found
        | {"num_local_experts": None, "num_experts_per_tok": None}
        | given(fields, intermediate_size="shared_intermediate_size")
    )


def bamba(fields: Fields) -> Fields:
    """Bamba: the layers with attention are listed."""
    return _mamba2(fields) | {"layer_types": _except(fields, fields.get("attn_layer_indices") or [], "mamba")}


def falcon_h1(fields: Fields) -> Fields:
    """Falcon-H1: each layer has attention and Mamba 2."""
    found = {"mamba_d_ssm": fields.get("mamba_d_ssm"), "mamba_rms_norm": fields.get("mamba_rms_norm", False)}
    return _mamba2(fields | found) | {"layer_types": ["parallel"] * fields.get("num_hidden_layers", 0)}


def _except(fields: Fields, attention: list[int], others: str) -> list[str]:
    """The kinds of layers, of which some have attention."""
    n = fields.get("num_hidden_layers", 0)
    return ["full_attention" if i in attention else others for i in range(n)]


def jamba(fields: Fields) -> Fields:
    """Jamba: attention and experts in every so many layers."""
    n = fields.get("num_hidden_layers", 0)
    period, offset = fields.get("attn_layer_period", 8), fields.get("attn_layer_offset", 4)
    every, first = fields.get("expert_layer_period", 2), fields.get("expert_layer_offset", 1)
    several = (fields.get("num_experts") or 1) > 1
    return {
        "layer_types": _except(fields, list(range(offset, n, period)), "mamba"),
        "networks": ["experts" if several and i % every == first else "dense" for i in range(n)],
        "num_experts": fields.get("num_experts") if several else None,
        "state_inner": fields.get("mamba_expand", 2) * fields.get("hidden_size", 0),
        "state_rank": mamba_rank(fields, "mamba_dt_rank"),
        "state_norm": True,
        **given_or(fields, state_size=("mamba_d_state", 16), state_kernel=("mamba_d_conv", 4)),
    }


def nemotron_h(fields: Fields) -> Fields:
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
        **(given(fields, shared_expert_width="moe_shared_expert_intermediate_size") if experts else {}),
        **given_or(fields, state_heads=("mamba_num_heads", 128), state_head=("mamba_head_dim", 64)),
        **given_or(
            fields, state_groups=("n_groups", 8), state_size=("ssm_state_size", 128), state_kernel=("conv_kernel", 4)
        ),
    }


def plamo2(fields: Fields) -> Fields:
    """PLaMo 2: attention in the middle of every few layers."""
    n, every, head = fields["num_hidden_layers"], fields.get("mamba_step", 2), fields["hidden_size_per_head"]
    attention = range(every // 2, n, every) if n > every // 2 else [n - 1]
    return {
        "layer_types": _except(fields, list(attention), "mamba"),
        "head_dim": head,
        "state_head": head,
        "state_heads": fields["mamba_num_heads"],
        "state_rank": max(64, fields["hidden_size"] // 16),
        **given_or(fields, state_size=("mamba_d_state", 64), state_kernel=("mamba_d_conv", 4)),
    }


def sarvam(fields: Fields) -> Fields:
    """Sarvam 105B: the first layer has no experts, unless it says otherwise."""
    first = given_or(fields, first_k_dense_replace=("first_k_dense_replace", 1))
    return first | given(fields, n_shared_experts="num_shared_experts")


def zamba2(fields: Fields) -> Fields:
    """Zamba 2: hybrid layers have Mamba 2 behind one of a few blocks that they share, in turn."""
    d = fields.get("hidden_size", 0)
    named = {"mamba_n_heads": fields.get("n_mamba_heads", 8), "mamba_n_groups": fields.get("mamba_ngroups", 1)}
    return _mamba2({"mamba_d_state": 64, **fields, **named}) | {
        "layer_types": fields.get("layers_block_type"),
        "networks": ["none"] * fields.get("num_hidden_layers", 0),
        "head_dim": 2 * d // fields.get("num_attention_heads", 32),
        "intermediate_size": fields.get("intermediate_size") or 4 * d,
        "num_mem_blocks": fields.get("num_mem_blocks", 1),
        "adapter_rank": fields.get("adapter_rank", 128),
    }


def lfm2(fields: Fields) -> Fields:
    """LFM2, whose width is adjusted as its code does."""
    width = fields.get("block_ff_dim") or fields.get("intermediate_size", 0)
    if fields.get("block_auto_adjust_ff_dim", True) and "num_experts" not in fields:
        unit = fields.get("block_multiple_of", 256)
        width = -(-int(fields.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // unit) * unit
    found = {"intermediate_size": width, "state_kernel": fields.get("conv_L_cache", 3)}
    if fields.get("layer_types") is None and fields.get("full_attn_idxs") is not None:
        found["layer_types"] = _except(fields, fields["full_attn_idxs"], "conv")
    return found | given(fields, tie_word_embeddings="tie_embedding", first_k_dense_replace="num_dense_layers")


def qwen3_next(fields: Fields) -> Fields:
    """Qwen3-Next and Qwen3.5: attention in every so many layers."""
    n, every = fields.get("num_hidden_layers", 0), fields.get("full_attention_interval", 4)
    return {
        "layer_types": fields.get("layer_types")
        or _except(fields, list(range(every - 1, n, every)), "linear_attention"),
        "recurrent_type": _TYPES.get(fields.get("mamba_ssm_dtype", ""), ""),
        **given_or(fields, state_heads=("linear_num_value_heads", 32), state_head=("linear_value_head_dim", 128)),
        **given_or(fields, state_groups=("linear_num_key_heads", 16), state_size=("linear_key_head_dim", 128)),
        **given_or(fields, state_kernel=("linear_conv_kernel_dim", 4)),
        **given(fields, shared_expert_width="shared_expert_intermediate_size"),
        **({} if fields.get("intermediate_size") else given(fields, intermediate_size="moe_intermediate_size")),
    }


def olmo_hybrid(fields: Fields) -> Fields:
    """OLMo Hybrid: as many heads of a state as of attention, unless it says otherwise."""
    heads = fields.get("num_attention_heads", 1)
    keys = fields.get("linear_num_key_heads") or heads
    size = fields.get("linear_key_head_dim") or int(0.75 * fields.get("hidden_size", 0) / keys)
    return qwen3_next(
        {"linear_num_value_heads": heads, "linear_value_head_dim": 2 * size}
        | {name: value for name, value in fields.items() if value is not None}
        | {"linear_num_key_heads": keys, "linear_key_head_dim": size}
    )


def kimi_linear(fields: Fields) -> Fields:
    """Kimi Linear and Kimi K3: layers are counted from 1."""
    told = fields.get("linear_attn_config") or {}
    kinds = fields.get("layer_types") or _except(fields, [i - 1 for i in told.get("full_attn_layers", [])], "kimi")
    return {
        "layer_types": kinds,
        "low_rank_gates": 1 if told.get("use_full_rank_gate") else 2,
        "latent_gates": fields["num_attention_heads"] * fields["v_head_dim"]
        if fields.get("mla_use_output_gate")
        else 0,
        "attn_res_block_size": fields.get("attn_res_block_size") or 0,
        **given_or(fields, state_heads=("linear_num_heads", 32), state_head=("linear_head_dim", 128)),
        **given_or(fields, state_kernel=("linear_conv_kernel_dim", 4)),
        **given(fields, n_shared_experts="num_shared_experts", num_experts_per_tok="num_experts_per_token"),
        **given(told, state_heads="num_heads", state_head="head_dim", state_kernel="short_conv_kernel_size"),
    }


def index(fields: Fields) -> Fields:
    """DeepSeek-V3.2 and GLM 5: some layers may choose tokens as the one before does."""
    n, told = fields.get("num_hidden_layers", 0), fields.get("indexer_types")
    pattern, every = fields.get("index_topk_pattern"), fields.get("index_topk_freq", 1)
    if told is None and pattern is not None:
        told = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    first = fields.get("index_skip_topk_offset", 2) - 1
    # Whatever layers are called, all are sparse.
    return {
        "layer_types": None,
        "indexer_types": told or ["shared" if max(i - first, 0) % every else "full" for i in range(n)],
    }


def hy4(fields: Fields) -> Fields:
    """Hy 4: an indexer in every fourth layer of those whose attention is sparse."""
    n, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    kinds = fields.get("layer_types") or ["sparse"] * n
    own = fields.get("indexer_types") or ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(n)]
    networks = fields.get("mlp_layer_types") or ["dense" if i == 0 else "sparse" for i in range(n)]
    gates = heads if fields.get("gating_type") == "headwise" else heads * fields["v_head_dim"]
    return {
        "layer_types": ["full_attention" if kind.endswith(("sparse", "attention")) else kind for kind in kinds],
        "indexer_types": [
            "shared" if kind == "full_attention" else mode for kind, mode in zip(kinds, own, strict=True)
        ],
        "networks": ["dense" if kind == "dense" else "experts" for kind in networks],
        "latent_gates": gates if fields.get("gated_mla", True) else 0,
        "hc_mult": fields.get("hc_mult", 4) if fields.get("enable_ihc", True) else 0,
    }


def longcat(fields: Fields) -> Fields:
    """LongCat-Flash: two layers in each of its own, of which the first has experts beside its network.

    Some experts do nothing and have no weights, but are routed to: a token uses fewer of the others.
    """
    n, real, zero = fields["num_layers"], fields["n_routed_experts"], fields.get("zero_expert_num") or 0
    return {
        "num_hidden_layers": 2 * n,
        "networks": ["both", "dense"] * min(n, LARGEST_LAYERS),
        "idle_experts": zero,
        "num_experts_per_tok": max(1, fields["moe_topk"] * real // (real + zero)),
        **given(fields, intermediate_size="ffn_hidden_size", moe_intermediate_size="expert_ffn_hidden_size"),
    }


def minicpm3(fields: Fields) -> Fields:
    """MiniCPM3: heads of V as wide as the model's."""
    return {"v_head_dim": fields.get("v_head_dim") or fields["hidden_size"] // fields["num_attention_heads"]}


def bailing(fields: Fields) -> Fields:
    """Ling 2.5 and 3: latents in the last layer of each group and in those behind the last group."""
    n, every, heads = fields.get("num_hidden_layers", 0), fields["layer_group_size"], fields["num_attention_heads"]
    whole = n // every * every
    width = fields.get("moe_shared_expert_intermediate_size") or fields.get("moe_intermediate_size") or 0
    gates = {"head_wise": heads, "element_wise": heads * fields.get("v_head_dim", 0)}
    return {
        "layer_types": _except(fields, [i for i in range(n) if i >= whole or (i + 1) % every == 0], "linear_attention"),
        "low_rank_gates": 0 if fields.get("no_kda_lora") else 2,
        "latent_gates": gates.get(fields.get("gated_attention_proj_granularity_type", ""), 0),
        "shared_expert_width": (fields.get("num_shared_experts") or 0) * width,
        "state_heads": heads,
        **given(fields, state_head="head_dim", state_kernel="short_conv_kernel_size"),
    }


def minimax(fields: Fields) -> Fields:
    """MiniMax-Text-01: 1 is attention."""
    kinds = fields.get("attn_type_list")
    found = {} if kinds is None else {"layer_types": ["full_attention" if kind else "lightning" for kind in kinds]}
    return found | ({"sliding_window": None} if fields.get("sliding_window") else {})


def llama4(fields: Fields) -> Fields:
    """Llama 4: layers without positions have full attention, the others chunks."""
    n, every = fields.get("num_hidden_layers", 0), fields.get("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(n)]
    step = fields.get("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers") or range(step - 1, n, step)
    return {
        "layer_types": ["chunked_attention" if some else "full_attention" for some in rotated],
        "networks": ["experts" if i in sparse else "dense" for i in range(n)],
        "n_shared_experts": 1,
        **given(fields, intermediate_size="intermediate_size_mlp", moe_intermediate_size="intermediate_size"),
    }


def gemma3n(fields: Fields) -> Fields:
    """Gemma 3n: one width for all layers."""
    width = fields.get("intermediate_size")
    return {"intermediate_size": width[0]} if isinstance(width, list) and len(set(width)) == 1 else {}
