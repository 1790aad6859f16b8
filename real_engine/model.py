"""A decoder-only transformer in NumPy: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.model import ModelShape
from workloads import stream

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

Attend = Callable[[int, Floats, Floats, Floats], Floats]
"""``attend(layer, q, k, v)``: store this pass's K and V, and return what each token attends to.

q of shape (n_tokens, n_heads, d_head), k and v of shape (n_tokens, n_kv_heads, d_head), keys and queries already
rotated; the result has q's shape.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; matrices are (inputs, outputs), C-ordered."""

    attention_norm: Floats
    qkv: Floats
    attention_out: Floats
    ffn_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Transformer:
    """Weights and the forward pass; holds no cache."""

    shape: ModelShape
    embedding: Floats
    """Shape (vocabulary, d_model)."""
    layers: tuple[Layer, ...]
    out_norm: Floats
    head: Floats
    """Shape (d_model, vocabulary)."""

    @staticmethod
    def random(shape: ModelShape, seed: int) -> Transformer:
        """Seeded normal weights, scaled so that every layer changes the text that comes out."""
        rng = stream(seed, "weights")

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Floats:
            weights: Floats = (rng.standard_normal((rows, columns)) * (gain / np.sqrt(rows))).astype(np.float32)
            return weights

        s = shape
        q, kv = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        ones = np.ones(s.d_model, dtype=np.float32)
        embedding = rng.standard_normal((s.vocabulary, s.d_model)).astype(np.float32)
        layers = tuple(
            Layer(
                attention_norm=ones,
                # Queries and keys of twice the usual size: attention that picks out single tokens.
                qkv=np.hstack([matrix(s.d_model, q + kv, 2.0), matrix(s.d_model, kv)]),
                attention_out=matrix(q, s.d_model, 2.0),
                ffn_norm=ones,
                gate_up=matrix(s.d_model, 2 * s.d_ff),
                down=matrix(s.d_ff, s.d_model),
            )
            for _ in range(s.n_layers)
        )
        return Transformer(s, embedding, layers, ones, matrix(s.d_model, s.vocabulary))

    def forward(self, tokens: Ints, positions: Ints, outputs: Ints, attend: Attend) -> Floats:
        """Logits, shape (len(outputs), vocabulary), for the rows ``outputs`` of the pass.

        ``tokens`` and ``positions``: shape (n_tokens,).
        """
        s = self.shape
        n, n_q, n_kv = len(tokens), s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        cos, sin = rotary_table(positions, s.d_head, s.rope_base)
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            qkv = _rms_norm(x, layer.attention_norm, s.norm_epsilon) @ layer.qkv
            q = rotate(qkv[:, :n_q].reshape(n, s.n_heads, s.d_head), cos, sin)
            k = rotate(qkv[:, n_q : n_q + n_kv].reshape(n, s.n_kv_heads, s.d_head), cos, sin)
            v = qkv[:, n_q + n_kv :].reshape(n, s.n_kv_heads, s.d_head)
            x = x + attend(index, q, k, v).reshape(n, n_q) @ layer.attention_out
            gate_up = _rms_norm(x, layer.ffn_norm, s.norm_epsilon) @ layer.gate_up
            gate, up = gate_up[:, : s.d_ff], gate_up[:, s.d_ff :]
            x = x + (gate / (1.0 + np.exp(-gate)) * up) @ layer.down
        return np.asarray(_rms_norm(x[outputs], self.out_norm, s.norm_epsilon) @ self.head)


def rotary_table(positions: Ints, d_head: int, base: float) -> tuple[Floats, Floats]:
    """Cosines and sines, each of shape (n_tokens, 1, d_head / 2). Su et al., RoFormer, arXiv 2104.09864."""
    frequency = base ** (-np.arange(0, d_head, 2) / d_head)
    angle = positions[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32)[:, None, :], np.sin(angle).astype(np.float32)[:, None, :]


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the two halves of each head against one another (the pairing of GPT-NeoX)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight)
