"""How families without any attention call in a config.json what others have too."""

from __future__ import annotations

from kvsim.model.family_keys import Fields, given, given_or, mamba_rank


def only_mamba(fields: Fields) -> Fields:
    """Mamba and Falcon Mamba, which have no feed-forward networks."""
    return {
        **_without_attention(fields),
        "state_inner": fields.get("intermediate_size") or fields.get("expand", 2) * fields.get("hidden_size", 0),
        "state_rank": mamba_rank(fields, "time_step_rank"),
        **given_or(fields, state_size=("state_size", 16), state_kernel=("conv_kernel", 4)),
    }


def only_mamba2(fields: Fields) -> Fields:
    """Mamba 2, without feed-forward networks."""
    return {
        **_without_attention(fields),
        "state_norm": True,
        **given_or(fields, state_heads=("num_heads", 128), state_head=("head_dim", 64), state_groups=("n_groups", 8)),
        **given_or(fields, state_size=("state_size", 128), state_kernel=("conv_kernel", 4)),
    }


def rwkv6(fields: Fields) -> Fields:
    """RWKV 6, whose ranks follow from its width (``modeling_rwkv6.py`` beside its weights)."""
    d, wide = fields["hidden_size"], fields["hidden_size"] == 4096
    ranks = {"mix_rank": 64 if wide else 32, "decay_rank": 128 if wide else 64}
    return _rwkv(fields) | ranks | {"intermediate_size": fields.get("intermediate_size") or int(d * 3.5) // 32 * 32}


def rwkv7(fields: Fields) -> Fields:
    """RWKV 7, as the library fla has it."""
    names = {"decay_rank": "decay_low_rank_dim", "mix_rank": "a_low_rank_dim", "gate_rank": "gate_low_rank_dim"}
    width = fields.get("intermediate_size") or 4 * fields["hidden_size"]
    return _rwkv(fields) | {"intermediate_size": width} | given(fields, **names, value_rank="v_low_rank_dim")


def _rwkv(fields: Fields) -> Fields:
    head = fields.get("head_dim") or fields.get("head_size") or 64
    return {**_without_attention(fields), "state_head": head}


def _without_attention(fields: Fields) -> Fields:
    n = fields.get("num_hidden_layers", 0)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
    return {**heads, "intermediate_size": 0, "layer_types": ["mamba"] * n, "networks": ["none"] * n}
