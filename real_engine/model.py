"""A decoder-only transformer in NumPy: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvsim.model.engine_shapes import ModelShape
from real_engine.arrays import FloatArray, IntArray
from real_engine.weights import Matrix, WeightForm, pack
from workloads import named_rng

Attend = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]
"""``attend(layer, q, k, v)``: store this pass's K and V, and return the attention output of each token.

q has shape (n_tokens, n_heads, d_head), k and v have shape (n_tokens, n_kv_heads, d_head); keys and queries are already
rotated. The result has q's shape.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; norms have shape (d_model,)."""

    attention_norm: FloatArray
    qkv: Matrix
    """From d_model to the concatenated heads of queries, keys and values."""
    attention_out: Matrix
    ffn_norm: FloatArray
    gate_up: Matrix
    """From d_model to twice d_ff: the gate projection, then the up projection."""
    down: Matrix


@dataclass(frozen=True, slots=True)
class Transformer:
    """Weights and the forward pass, without a cache."""

    shape: ModelShape
    embedding: Matrix
    """Shape (d_model, vocabulary); its outputs are looked up. The same object as ``head`` where the two are tied."""
    layers: tuple[Layer, ...]
    out_norm: FloatArray
    head: Matrix
    """Shape (d_model, vocabulary)."""

    @staticmethod
    def random(shape: ModelShape, seed: int, weights: WeightForm = "f32") -> Transformer:
        """Seeded normal weights, scaled so that every layer changes the generated text."""
        rng = named_rng(seed, "weights")

        def normal(inputs: int, outputs: int, gain: float = 1.0) -> FloatArray:
            drawn: FloatArray = (rng.standard_normal((inputs, outputs)) * (gain / np.sqrt(inputs))).astype(np.float32)
            return drawn.T

        def matrix(*parts: FloatArray) -> Matrix:
            return pack(weights, parts[0].shape[1], sum(len(part) for part in parts), iter(parts))

        s = shape
        q, kv = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        ones = np.ones(s.d_model, dtype=np.float32)
        embedding = matrix(rng.standard_normal((s.vocabulary, s.d_model)).astype(np.float32))
        layers = tuple(
            Layer(
                attention_norm=ones,
                # Queries and keys of twice the usual size make attention pick out single tokens.
                qkv=matrix(normal(s.d_model, q + kv, 2.0), normal(s.d_model, kv)),
                attention_out=matrix(normal(q, s.d_model, 2.0)),
                ffn_norm=ones,
                gate_up=matrix(normal(s.d_model, 2 * s.d_ff)),
                down=matrix(normal(s.d_ff, s.d_model)),
            )
            for _ in range(s.n_layers)
        )
        return Transformer(s, embedding, layers, ones, matrix(normal(s.d_model, s.vocabulary)))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, in memory or in the mapped file; a tied matrix counts once."""
        own = [self.embedding, self.head]
        for layer in self.layers:
            own += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
        return sum({id(matrix): matrix.nbytes for matrix in own}.values())

    def forward(self, tokens: IntArray, positions: IntArray, outputs: IntArray, attend: Attend) -> FloatArray:
        """Logits, shape (len(outputs), vocabulary), for the rows ``outputs`` of the pass.

        ``tokens`` and ``positions``: shape (n_tokens,).
        """
        s = self.shape
        n, n_q, n_qk = len(tokens), s.n_heads * s.d_head, (s.n_heads + s.n_kv_heads) * s.d_head
        cos, sin = rotary_table(positions, s.d_head, s.rope_base)
        x = self.embedding.rows(tokens)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.apply(_rms_norm(x, layer.attention_norm, s.norm_epsilon))
            qk = rotate(qkv[:, :n_qk].reshape(n, -1, s.d_head), cos, sin)
            v = qkv[:, n_qk:].reshape(n, s.n_kv_heads, s.d_head)
            seen = attend(index, qk[:, : s.n_heads], qk[:, s.n_heads :], v)
            x += layer.attention_out.apply(seen.reshape(n, n_q))
            gate_up = layer.gate_up.apply(_rms_norm(x, layer.ffn_norm, s.norm_epsilon))
            x += layer.down.apply(_swish(gate_up[:, : s.d_ff], gate_up[:, s.d_ff :]))
        return self.head.apply(_rms_norm(x[outputs], self.out_norm, s.norm_epsilon))


def rotary_table(positions: IntArray, d_head: int, base: float) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines, each of shape (n_tokens, 1, d_head / 2). Su et al., RoFormer, arXiv 2104.09864."""
    frequency = base ** (-np.arange(0, d_head, 2) / d_head)
    angle = positions[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32)[:, None, :], np.sin(angle).astype(np.float32)[:, None, :]


def rotate(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Rotate the two halves of each head against each other (the pairing of GPT-NeoX)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    mean: FloatArray = np.vecdot(x, x)[:, None] / np.float32(x.shape[1])
    scaled: FloatArray = x / np.sqrt(mean + np.float32(epsilon))
    scaled *= weight
    return scaled


def _swish(gate: FloatArray, up: FloatArray) -> FloatArray:
    """``gate / (1 + exp(-gate)) * up``, shape (n_tokens, d_ff)."""
    # exp(80) still fits a float32; a gate below -80 rounds to zero anyway.
    out: FloatArray = np.minimum(-gate, np.float32(80))
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out
