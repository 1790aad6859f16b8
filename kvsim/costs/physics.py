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
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.storage_types import row_bytes

SIXTEEN_BITS = ("f16", "bf16")


@dataclass(frozen=True)
class Need:
    """Seconds that a part of a pass takes at least, by what it reads and by what it computes; arrays of one shape."""

    reading_s: FloatArray
    computing_s: FloatArray
    unpacking_s: FloatArray | float = 0.0
    """Seconds of one operation for each weight and each time that it is unpacked, which costs some engines; it is no
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
    flash_attn: bool = True
    """Whether attention is one kernel, which never stores its scores."""
    ep: int = 1
    """Devices over which the experts are divided, each of which has all the rest for tokens of its own. Its passes are
    priced as if the others had as many tokens: all wait for the one with the most, and vLLM pads the others to it."""

    def matrices(self, tokens: ArrayLike) -> Need:
        """The matrices that every token is multiplied with."""
        n, own = np.asarray(tokens, dtype=float), self.shape.matrices
        used = own.numbers + self.shape.repeated
        read = own.bytes(self.weights) * used / max(own.numbers, 1)
        need = self._need(np.full_like(n, read), 2 * used * n, self.weights)
        return replace(need, unpacking_s=self._unpacking_s(used * self._unpacked(n, self.weights)))

    def experts(self, tokens: ArrayLike) -> Need:
        """The experts that tokens choose, which are taken to choose evenly."""
        n, own = self.ep * np.asarray(tokens, dtype=float), self.shape.experts
        if not self.shape.n_experts:
            return Need(np.zeros_like(n), np.zeros_like(n))
        share = self.shape.experts_per_token / self.shape.n_experts
        touched = (1 - (1 - share) ** n) / self.ep
        need = self._need(own.bytes(self.weights) * touched, 2 * own.numbers * share * n / self.ep, self.expert_type)
        return replace(need, unpacking_s=self._unpacking_s(own.numbers * touched))

    @property
    def expert_type(self) -> str:
        """The storage type of the experts: a model's own, but for NVFP4, to which NVIDIA converts those in INT4."""
        own = self.shape.experts.kind
        return self.weights if own == "default" or (own, self.weights) == ("int4_g32", "nvfp4") else own

    def head(self, sequences: ArrayLike) -> Need:
        """The language-model head; vLLM keeps it in 16 bits, GGUF files have it like the rest, unless they say."""
        n, own = np.asarray(sequences, dtype=float), self.shape.head
        kind = self.weights if self.engine == "llamacpp" else "bf16"
        need = self._need(np.full_like(n, own.bytes(kind)), 2 * own.numbers * n, kind)
        return replace(need, unpacking_s=self._unpacking_s(own.numbers * self._unpacked(n, kind)))

    def decode(self, sequences: ArrayLike, cells: ArrayLike) -> Need:
        """Attention of sequences that decode, each over ``cells`` cells, or as many of them as a window has."""
        n, cells = np.asarray(sequences, dtype=float), np.asarray(cells, dtype=float)
        return self._attention(n, n, cells, n * cells)

    def states(self, sequences: ArrayLike, tokens: ArrayLike) -> Need:
        """States of sequences, each read and written once, and ``tokens`` tokens in all that update them.

        A token is one product with K and one with Q, as wide as the state. vLLM keeps states in the model's type or in
        f32, llama.cpp in f32.
        """
        n = np.asarray(sequences, dtype=float)
        moved = updated = 0.0
        for group in self.shape.states:
            assert group.state is not None
            sizes = (4, 4) if self.engine == "llamacpp" else (2, 4 if group.state.recurrent_type == "f32" else 2)
            moved += 2 * group.layers * float(np.dot(sizes, group.state.numbers()))
            updated += 4 * group.layers * group.state.recurrent
        return self._need(n * moved, np.asarray(tokens, dtype=float) * updated, "bf16")

    def prompt(self, tokens: ArrayLike, seen: ArrayLike) -> Need:
        """Attention of ``tokens`` tokens of prompts, each of which sees ``seen`` cells on the mean."""
        n, cells = np.asarray(tokens, dtype=float), np.asarray(seen, dtype=float)
        # Where the scores of all tokens are one matrix, each is scored with those behind it too.
        return self._attention(n, np.ones(()), cells, n * (cells if self.flash_attn else cells + (n - 1) / 2))

    def exchange(self, tokens: ArrayLike) -> Need:
        """What devices send each other: two all-reduces a layer and one of the embeddings, each by a ring.

        Norms over all queries and keys take a third one, of a few bytes. Devices that divide the experts gather the
        tokens of all in each layer and reduce what the experts made of them, each its own: one all-reduce of all tokens
        (``AgRsAll2AllManager`` in vLLM's ``distributed/device_communicators/all2all.py``, its default in 0.32.0).
        """
        n = self.ep * np.asarray(tokens, dtype=float)
        share = 2 * (self.ranks - 1) / self.ranks
        times = self.shape.n_layers if self.ep > 1 else 2 * self.shape.n_layers + 1
        sent = times * share * 2 * n * self.shape.d_model
        return Need(sent / (self.device.link_gb_s * 1e9), np.zeros_like(n))

    @property
    def quantised(self) -> bool:
        """Whether K or V are in fewer than 16 bits."""
        return not {self.type_k, self.type_v} <= {*SIXTEEN_BITS, "f32"}

    @property
    def ranks(self) -> int:
        """Devices that exchange something in each layer."""
        return max(self.tp, self.ep)

    @property
    def exchanges(self) -> int:
        """How many all-reduces these are."""
        if self.ep > 1:
            return self.shape.n_layers
        return (2 + self.shape.whole_qk_norm) * self.shape.n_layers + 1

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

    def _attention(self, tokens: FloatArray, readers: FloatArray, cells: FloatArray, scores: FloatArray) -> Need:
        """Attention of ``tokens`` tokens to ``cells`` cells each, that ``readers`` read, with ``scores`` in all.

        For each head a product with K and one with V. Devices that are more than the heads of K hold and read the same.
        """
        read = operations = np.zeros(np.broadcast_shapes(tokens.shape, cells.shape))
        for group in self.shape.cells:
            # llama.cpp has caches of their own for layers with a window, which are priced apart.
            window = group.window if self.engine == "vllm" else None
            layers = group.layers + group.readers
            seen = layers * (cells if window is None else np.minimum(cells, window))
            row = row_bytes(self.type_k, group.k_row) + row_bytes(self.type_v, group.v_row)
            read = read + readers * seen * row * (self.tp / min(self.tp, group.kv_heads))
            scored = tokens * seen if self.flash_attn else scores * layers
            operations = operations + scored * (2 * self.shape.n_heads * group.multiplied)
        return self._need(np.broadcast_to(read, operations.shape) + self._score_bytes * scores, operations, "bf16")

    @property
    def _score_bytes(self) -> float:
        """Bytes of the scores of a token for one cell in all layers, in f32 as ggml has them: written by the product
        with K, read and written by softmax, and read by the product with V (``build_attn_mha`` in ``llama-graph.cpp``).
        """
        return 0.0 if self.flash_attn else 16.0 * self.shape.n_heads * self.attention_layers

    @property
    def attention_layers(self) -> int:
        """Layers that attend to cells, be they their own or another's."""
        return sum(group.layers + group.readers for group in self.shape.cells)

    def _unpacked(self, tokens: FloatArray, kind: str) -> FloatArray:
        """How often llama.cpp unpacks weights of a type: its products with vectors for each of up to 8 tokens
        (``MMVQ_MAX_BATCH_SIZE`` in ``mmvq.cuh``), and products of matrices as if for 8; 16 bits from two tokens on.

        On Apple's devices once: whole steps of devices that are left out are not priced better otherwise.
        """
        if self.device.kind == "apple":
            return np.ones_like(tokens)
        return np.clip(tokens - 1, 0, 1) if kind in SIXTEEN_BITS else np.clip(tokens, 1, 8)

    def _unpacking_s(self, numbers: FloatArray) -> FloatArray:
        return numbers / (self.device.tflops * 1e12 * self.tp)

    def _need(self, read: FloatArray, operations: FloatArray, kind: str) -> Need:
        rate = self.device.bandwidth_gb_s * 1e9 * self.tp
        return Need(
            read / rate, np.asarray(operations, dtype=float) / (self.device.peak_s(kind, self.engine) * self.tp)
        )
