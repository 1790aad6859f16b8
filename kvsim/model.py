"""Shapes of decoder-only transformers: enough to count bytes and to build one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Storage = Literal["f32", "f16", "q8_0", "q4_0"]
"""How K and V are kept; the last two are llama.cpp's, blocks of 32 numbers with a scale of 2 bytes."""

BYTES_PER_NUMBER: dict[Storage, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocabulary: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def cell_bytes(self, k: Storage = "f32", v: Storage = "f32") -> float:
        """Bytes of one cell: one token's K and V in all layers."""
        numbers = self.n_layers * self.n_kv_heads * self.d_head
        return numbers * (BYTES_PER_NUMBER[k] + BYTES_PER_NUMBER[v])


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(n_layers=4, d_model=256, n_heads=8, n_kv_heads=4, d_head=32, d_ff=768, vocabulary=1024),
    "small": ModelShape(n_layers=8, d_model=512, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1536, vocabulary=4096),
}
"""Built-in shapes by name. The real engine gives them seeded random weights."""
