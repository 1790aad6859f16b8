"""Tiny random models for tests against llama.cpp, where only speed and the cache's layout matter.

Their vocabulary is every byte and a few words; files are some hundred kB.
"""

from pathlib import Path

import numpy as np

from tests.gguf_files import TOKENS, Small

# A head of 32 numbers is one block of q8_0, the least that a quantized cache takes.
TINY = {"n_layers": 2, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "d_head": 32, "d_ff": 64}
CONTEXT_LENGTH = 32_768


def write_llama(path: Path) -> Path:
    """Write a Llama of 2 layers, 1 head of keys of 32 numbers; every layer sees all positions."""
    return Small(**TINY, fields={"llama.context_length": CONTEXT_LENGTH}).write(path)


def write_windowed(path: Path, window: int) -> Path:
    """Write a Gemma 2 of 2 layers, 1 head of keys of 32 numbers; layer 0 sees ``window`` positions, layer 1 all.

    In Gemma 2 half of the layers are windowed, the even ones: llama.cpp knows this and reads only the window's size.
    Not for llama-cpp-python 0.3.8, which has no cache of its own for windows, and whose Gemma 2 aborts the process
    unless it has the layers of one of the published ones.
    """
    # The tensors of Gemma 2 are those of a Llama with two more norms in each layer.
    norms = {
        f"blk.{i}.{norm}.weight": np.ones(TINY["d_model"], np.float32)
        for i in range(TINY["n_layers"])
        for norm in ("post_attention_norm", "post_ffw_norm")
    }
    fields = {"gemma2.context_length": CONTEXT_LENGTH, "gemma2.attention.sliding_window": window}
    return Small(**TINY, architecture="gemma2", tensors=norms, fields=fields).write(path)


HYBRID_LAYERS = 4
"""Layers of the hybrid model, every other one with attention."""
STATE_NUMBERS = 2 * TINY["d_model"]
"""Numbers of a state in one of its other layers: what a convolution over three tokens must know of the last two."""


def write_hybrid(path: Path, window: int | None = None) -> Path:
    """Write an LFM2: short convolutions, whose state llama.cpp keeps, in layers 0 and 2, attention in 1 and 3.

    With a ``window`` these look back so many tokens only.
    """
    rng, width = np.random.default_rng(1), TINY["d_model"]

    def matrix(outputs, inputs):
        return (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    tensors = {"output_norm.weight": None, "token_embd_norm.weight": np.ones(width, np.float32)}
    for i in range(HYBRID_LAYERS):
        if i % 2:
            norms = {f"blk.{i}.attn_{part}_norm.weight": np.ones(TINY["d_head"], np.float32) for part in "qk"}
            tensors |= norms
        else:
            tensors |= {f"blk.{i}.attn_{part}.weight": None for part in ("q", "k", "v", "output")}
            tensors[f"blk.{i}.shortconv.conv.weight"] = matrix(width, 3)
            tensors[f"blk.{i}.shortconv.in_proj.weight"] = matrix(3 * width, width)
            tensors[f"blk.{i}.shortconv.out_proj.weight"] = matrix(width, width)
    fields = {
        "lfm2.context_length": CONTEXT_LENGTH,
        "lfm2.attention.head_count_kv": [0, 1] * (HYBRID_LAYERS // 2),
        "lfm2.shortconv.l_cache": 3,
        "lfm2.vocab_size": len(TOKENS),
    }
    if window is not None:
        fields["lfm2.attention.sliding_window"] = window
    return Small(**{**TINY, "n_layers": HYBRID_LAYERS}, architecture="lfm2", tensors=tensors, fields=fields).write(path)


def write_recurrent(path: Path) -> Path:
    """Write a Mamba of 2 layers, all of them with states and none with attention."""
    rng, width, inner, state, rank = np.random.default_rng(2), TINY["d_model"], 2 * TINY["d_model"], 8, 4

    def matrix(outputs, inputs):
        return (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    attention = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {}
    for i in range(TINY["n_layers"]):
        tensors |= {f"blk.{i}.{part}.weight": None for part in attention}
        tensors |= {
            f"blk.{i}.ssm_in.weight": matrix(2 * inner, width),
            f"blk.{i}.ssm_conv1d.weight": matrix(inner, 4),
            f"blk.{i}.ssm_conv1d.bias": np.zeros(inner, np.float32),
            f"blk.{i}.ssm_x.weight": matrix(rank + 2 * state, inner),
            f"blk.{i}.ssm_dt.weight": matrix(inner, rank),
            f"blk.{i}.ssm_dt.bias": np.zeros(inner, np.float32),
            f"blk.{i}.ssm_a": -np.ones((inner, state), np.float32),
            f"blk.{i}.ssm_d": np.ones(inner, np.float32),
            f"blk.{i}.ssm_out.weight": matrix(width, inner),
        }
    fields = {
        "mamba.context_length": CONTEXT_LENGTH,
        "mamba.attention.head_count": 0,
        "mamba.attention.head_count_kv": None,
        "mamba.attention.key_length": None,
        "mamba.attention.value_length": None,
        "mamba.rope.dimension_count": None,
        "mamba.rope.freq_base": None,
        "mamba.feed_forward_length": 0,
        "mamba.ssm.conv_kernel": 4,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    return Small(**TINY, architecture="mamba", tensors=tensors, fields=fields).write(path)
