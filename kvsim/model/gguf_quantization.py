"""The type of each tensor in a quantised GGUF file, and so the size of the file.

Source: llama.cpp of August 2026, ``src/llama-quant.cpp``: ``tensor_allows_quantization``,
``llama_tensor_get_type_impl``, ``tensor_type_fallback`` and ``llama_ftype_get_default_type``. Types that need an
importance matrix are taken to have been made with one, others without. Publishers may choose otherwise, tensor by
tensor (``--tensor-type``); unsloth's UD files are such.
"""

from __future__ import annotations

from collections import defaultdict

from kvsim.model.cache_groups import MemoryShape
from kvsim.model.gguf_tensors import GgufTensor
from kvsim.model.storage_types import GGUF_BLOCKS, WHOLE_TYPES

_MAIN = {"q2_k_s": "q2_k", "iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s"}
_MAIN |= {f"q{n}_k_{size}": f"q{n}_k" for n in (3, 4, 5) for size in "sml"}
"""The type of most tensors, where the mixture is called otherwise."""
_ONE_BIT = ("iq1_s", "iq1_m")
_TWO_BITS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")
_SPARE = ("iq2_s", "iq2_m")
_FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types with blocks of 32 for rows that blocks of 256 do not divide; of all others ``iq4_nl``."""
_OF_EIGHT = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq3_xs", "iq3_xxs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs")
"""Mixtures that give the outputs of attention more bits where there are eight experts."""


def gguf_types(shape: MemoryShape, kind: str) -> dict[str, tuple[int, int]]:
    """Matrices and bytes by storage type in the GGUF file of a model, quantised as ``kind``; vectors are 0 matrices."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    mixture = Mixture(shape, kind)
    for tensor in shape.tensors:
        for layer in tensor.layers:
            stored = tensor.stored or mixture.type_of(tensor, layer)
            block, size = GGUF_BLOCKS[stored]
            found[stored][0] += 1
            found[stored][1] += tensor.numbers // block * size
    rest = sum(shape.parameters.values()) - sum(tensor.numbers * len(tensor.layers) for tensor in shape.tensors)
    found["f32"][1] += 4 * rest
    return {stored: (n, size) for stored, (n, size) in found.items()}


class Mixture:
    """How ``llama-quantize`` chooses types for one model."""

    def __init__(self, shape: MemoryShape, kind: str):
        self.kind = kind
        self.main = _MAIN.get(kind, kind)
        self.layers = shape.n_layers
        self.experts = shape.n_experts
        group = next(iter(shape.cells), None)
        grouped = group is not None and group.kind != "latent"
        self.shared = shape.n_heads * group.k_head // group.k_row if group and grouped else 1
        self.with_v = sorted({i for t in shape.tensors if t.kind in ("attn_v", "attn_qkv") for i in t.layers})
        self.with_down = sorted({i for t in shape.tensors if t.kind == "ffn_down" for i in t.layers})
        self.tied = all(tensor.kind != "output" for tensor in shape.tensors)

    def type_of(self, tensor: GgufTensor, layer: int) -> str:
        """The type of a tensor, of which the main one may have blocks that do not divide its rows."""
        if self.kind in WHOLE_TYPES:
            return self.kind
        chosen = self._chosen(tensor, layer)
        if tensor.row % GGUF_BLOCKS[chosen][0]:
            chosen = _FALLBACK.get(chosen, "iq4_nl")
        return "f16" if tensor.row % GGUF_BLOCKS[chosen][0] else chosen

    def _chosen(self, tensor: GgufTensor, layer: int) -> str:
        kind = self.kind
        if tensor.kind == "output" or (self.tied and tensor.kind == "token_embd"):
            if kind == "mxfp4" or tensor.row % GGUF_BLOCKS[self.main][0] or self.main == "q8_0":
                return "q8_0"
            return "q5_k" if kind in (*_ONE_BIT, *_TWO_BITS, "iq3_xxs") else "q6_k"
        if kind == "mxfp4":
            return "mxfp4" if tensor.experts else "q8_0"
        if tensor.kind == "token_embd":
            if kind in (*_SPARE, "iq3_xxs"):
                return "iq3_s"
            return "q2_k" if kind in (*_ONE_BIT, *_TWO_BITS) else self.main
        if kind in (*_ONE_BIT, *_TWO_BITS):
            return self._below_three_bits(tensor, layer)
        if tensor.kind in ("attn_v", "attn_qkv"):
            return self._value(layer)
        if tensor.kind in ("attn_q", "attn_k"):
            if tensor.kind == "attn_k" and self.experts == 8:
                return "q8_0"
            return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(kind, self.main)
        if tensor.kind == "attn_output":
            return self._attention_output()
        if tensor.kind == "ffn_down":
            return self._down(layer)
        middle = self.layers // 8 <= layer < 7 * self.layers // 8
        return "iq3_xxs" if kind == "iq3_xs" and middle and tensor.kind != "other" else self.main

    def _below_three_bits(self, tensor: GgufTensor, layer: int) -> str:
        more = "iq3_s" if self.kind in _SPARE else "q2_k"
        if tensor.kind in ("attn_v", "attn_qkv"):
            return "q4_k" if self.shared >= 4 or self.experts >= 4 else more
        if tensor.kind == "attn_k" and self.experts == 8:
            return "q4_k"
        if tensor.kind == "ffn_down" and layer < self.layers // 8:
            return more
        if tensor.kind == "attn_output":
            if self.experts == 8:
                return "q5_k"
            return "iq2_xxs" if self.kind in _ONE_BIT else "iq3_s" if self.kind in _SPARE else self.main
        return self.main

    def _value(self, layer: int) -> str:
        """V's type; layers are counted that have one."""
        kind, grouped = self.kind, self.shared >= 4
        layer, layers = self.with_v.index(layer), len(self.with_v)
        if self.experts == 8:
            return "q8_0"
        chosen = self.main
        if kind in ("q4_k_m", "q5_k_m"):
            chosen = "q6_k" if _gets_more(layer, layers) else chosen
        elif kind in ("q3_k_m", "q4_k_s"):
            first, others, n = ("q5_k", "q4_k", 2) if kind == "q3_k_m" else ("q5_k", chosen, 4)
            chosen = first if layer < n else others
        elif kind in ("iq3_m", "q3_k_l"):
            chosen = "q4_k" if kind == "iq3_m" else "q5_k"
        elif kind == "q2_k":
            chosen = "q4_k" if grouped else "q3_k"
        elif grouped and kind in ("q2_k_s", "iq3_xxs", "iq3_xs", "iq3_s", "iq4_nl", "iq4_xs"):
            chosen = "q5_k" if kind.startswith("iq4") else "q4_k"
        # Llama's and Qwen's models of 70B: eight heads share a V.
        big = self.layers == 80 and self.shared == 8
        return "q5_k" if big and chosen in ("q3_k", "q4_k") else chosen

    def _attention_output(self) -> str:
        if self.experts == 8:
            return "q5_k" if self.kind in _OF_EIGHT else self.main
        more = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}
        return more.get(self.kind, self.main)

    def _down(self, layer: int) -> str:
        kind = self.kind
        if not self.experts:  # Of networks without experts, those are counted that there are.
            layer = self.with_down.index(layer)
        early, more = layer < self.layers // 8, _gets_more(layer, self.layers)
        if kind in ("q4_k_m", "q5_k_m"):
            return "q6_k" if more else self.main
        if kind == "q3_k_m":
            return "q5_k" if layer < self.layers // 16 else "q4_k"
        if kind == "iq3_m" and (early or (self.experts == 8 and more)):
            return "q4_k"
        if early and kind in ("q2_k_s", "q4_k_s"):
            return "q4_k" if kind == "q2_k_s" else "q5_k"
        return {"q2_k": "q3_k", "q3_k_l": "q5_k"}.get(kind, self.main)


def _gets_more(layer: int, layers: int) -> bool:
    """``use_more_bits``: the first and the last eighth of the layers, and every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
