"""Tiny random models for tests against llama.cpp, where only speed and the cache's layout matter."""

from pathlib import Path

import numpy as np

from tests.gguf_files import Small

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
