"""What a forward pass must read and compute: the bytes and operations of its parts, and the seconds they take at least.

No engine is faster than its device's memory can be read and than its units can multiply. These bounds hold every price
of a device from below, and carry tables beyond what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from kvsim.costs.devices import Device
from kvsim.costs.tables import FloatArray
from kvsim.model.attention_groups import MemoryShape


@dataclass(frozen=True)
class Need:
    """Seconds that a part of a pass takes at least, by what it reads and by what it computes; arrays of one shape."""

    reading_s: FloatArray
    computing_s: FloatArray
    unpacking_s: FloatArray | float = 0.0
    """Seconds of one operation for each weight that is read, which is what unpacking costs some engines; it is no
    bound, since engines may keep to what is stored."""

    @property
    def least_s(self) -> FloatArray:
        """The longer of the two: at best they overlap."""
        return np.maximum(self.reading_s, self.computing_s)


@dataclass(frozen=True)
class PassPhysics:
    """The needs of the passes of one model on a device, or on several that share it evenly."""

    device: Device
    shape: MemoryShape
    weights: str
    """Storage type of the weights that users may choose."""
    type_k: str = "f16"
    type_v: str = "f16"
    tp: int = 1
    """Devices that share the model."""
    engine: str = "vllm"
    """``vllm`` or ``llamacpp``, which compute in other types."""

    def matrices(self, tokens: ArrayLike) -> Need:
        """The matrices that every token is multiplied with."""
        n, own = np.asarray(tokens, dtype=float), self.shape.matrices
        need = self._need(np.full_like(n, own.bytes(self.weights)), 2 * own.numbers * n, self.weights)
        return replace(need, unpacking_s=self._unpacking_s(np.full_like(n, own.numbers)))

    def experts(self, tokens: ArrayLike) -> Need:
        """The experts that tokens choose, which are taken to choose evenly."""
        n, own = np.asarray(tokens, dtype=float), self.shape.experts
        if not self.shape.n_experts:
            return Need(np.zeros_like(n), np.zeros_like(n))
        share = self.shape.experts_per_token / self.shape.n_experts
        kind = self.weights if own.kind == "default" else own.kind
        touched = 1 - (1 - share) ** n
        need = self._need(own.bytes(self.weights) * touched, 2 * own.numbers * share * n, kind)
        return replace(need, unpacking_s=self._unpacking_s(own.numbers * touched))

    def head(self, sequences: ArrayLike) -> Need:
        """The language-model head; vLLM keeps it in 16 bits, GGUF files have it like the rest, unless they say."""
        n, own = np.asarray(sequences, dtype=float), self.shape.head
        kind = self.weights if self.engine == "llamacpp" else "bf16"
        need = self._need(np.full_like(n, own.bytes(kind)), 2 * own.numbers * n, kind)
        return replace(need, unpacking_s=self._unpacking_s(np.full_like(n, own.numbers)))

    def decode(self, sequences: ArrayLike, cells: ArrayLike) -> Need:
        """Attention of sequences that decode, each over ``cells`` cells."""
        seen = np.asarray(sequences, dtype=float) * np.asarray(cells, dtype=float)
        return self._need(seen * self.shape.cell_bytes(self.type_k, self.type_v), self._score_operations * seen, "bf16")

    def prompt(self, tokens: ArrayLike, seen: ArrayLike) -> Need:
        """Attention of ``tokens`` tokens of prompts, each of which sees ``seen`` cells on the mean."""
        scores = np.asarray(tokens, dtype=float) * np.asarray(seen, dtype=float)
        read = np.asarray(seen, dtype=float) * self.shape.cell_bytes(self.type_k, self.type_v)
        return self._need(np.broadcast_to(read, scores.shape), self._score_operations * scores, "bf16")

    def exchange(self, tokens: ArrayLike) -> Need:
        """What devices send each other: two all-reduces a layer and one of the embeddings, each by a ring."""
        n = np.asarray(tokens, dtype=float)
        share = 2 * (self.tp - 1) / self.tp
        sent = (2 * self.shape.n_layers + 1) * share * 2 * n * self.shape.d_model
        return Need(sent / (self.device.link_gb_s * 1e9), np.zeros_like(n))

    def copies(self) -> tuple[float, float]:
        """Seconds to move one cell, and to rotate its K: each byte is read and written once, on all devices at once."""
        rate = self.device.bandwidth_gb_s * 1e9 * self.tp
        return (
            2 * self.shape.cell_bytes(self.type_k, self.type_v) / rate,
            2 * self.shape.key_bytes(self.type_k) / rate,
        )

    def elementwise(self, tokens: ArrayLike) -> Need:
        """Norms and activations, by the rows in 16 bits that they read and write; those of experts are with these."""
        rows = 8 * self.shape.d_model + (0 if self.shape.n_experts else 3 * self.shape.d_ff / self.tp)
        moved = 2 * self.shape.n_layers * rows * np.asarray(tokens, dtype=float)
        # Each device normalises whole rows.
        return Need(moved / (self.device.bandwidth_gb_s * 1e9), np.zeros_like(moved))

    @property
    def _score_operations(self) -> float:
        """Operations for a token to look at one cell in all layers: a product with K and one with V for each head."""
        return sum(2 * self.shape.n_heads * group.layers * group.multiplied for group in self.shape.groups)

    def _unpacking_s(self, numbers: FloatArray) -> FloatArray:
        return numbers / (self.device.tflops * 1e12 * self.tp)

    def _need(self, read: FloatArray, operations: FloatArray, kind: str) -> Need:
        rate = self.device.bandwidth_gb_s * 1e9 * self.tp
        return Need(
            read / rate, np.asarray(operations, dtype=float) / (self.device.peak_s(kind, self.engine) * self.tp)
        )
