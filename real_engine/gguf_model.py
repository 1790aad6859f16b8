"""Load transformers from GGUF files of the llama architecture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.model.engine_shapes import shape_in
from kvsim.model.gguf_file import GgufHeader
from real_engine.arrays import FloatArray, IntArray
from real_engine.model import Layer, Transformer
from real_engine.weights import WEIGHT_BYTES, DecodedMatrix, Matrix, WeightForm, pack, pieces

_ACCEPTED = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
"""Tensor types that can be decoded."""


class MappedTensor:
    """A matrix in the memory-mapped file, in the file's type."""

    def __init__(
        self,
        name: str,
        inputs: int,
        tensor_type: GGMLQuantizationType,
        data: NDArray[np.uint8],
        order: IntArray | None = None,
    ):
        """``data``: shape (outputs, bytes of a row). ``order``: shape (outputs,), the row that holds each output."""
        self.inputs = inputs
        self._name, self._kind, self._order = name, tensor_type, order
        self.data = data
        self.outputs = len(data)
        """Number of rows."""

    def read(self, outputs: slice | IntArray) -> FloatArray:
        """Weights of these outputs, shape (n, inputs). Raises ``UserError`` if any is not finite."""
        data = self.data[outputs if self._order is None else self._order[outputs]]
        with np.errstate(all="ignore"):
            weights = _decode(np.ascontiguousarray(data), self._kind)
        if not np.isfinite(weights).all():
            raise UserError(f"{self._name}: damaged: not all of its weights are finite numbers")
        return weights


class MappedMatrix(DecodedMatrix):
    """A matrix of tensors that stay in the file; their outputs are concatenated."""

    def __init__(self, tensors: Sequence[MappedTensor]):
        super().__init__(
            tensors[0].inputs, sum(tensor.outputs for tensor in tensors), *(tensor.data for tensor in tensors)
        )
        self._tensors = tuple(tensors)

    def rows(self, outputs: IntArray) -> FloatArray:
        """Decoded for the look-up; of a matrix of one tensor only, as tables of embeddings are."""
        (tensor,) = self._tensors
        return tensor.read(outputs)

    def decode(self, piece: slice) -> FloatArray:
        """Decoded by the ``gguf`` package."""
        found, first = [], 0
        for tensor in self._tensors:
            start, stop = max(piece.start - first, 0), min(piece.stop - first, tensor.outputs)
            if start < stop:
                found.append(tensor.read(slice(start, stop)))
            first += tensor.outputs
        return found[0] if len(found) == 1 else np.concatenate(found)


def load_transformer(header: GgufHeader, form: WeightForm = "f32") -> Transformer:
    """The transformer in a GGUF file, its weights in the given form.

    Everything is checked before anything is allocated. A file with a tensor that would go unused is refused, since the
    model would be a different one without it. Raises ``UserError``.
    """
    shape = shape_in(header)
    file = _File(header)
    s = shape
    q, kv = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
    planned: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (s.d_model, s.vocabulary),
        "output_norm.weight": (s.d_model,),
    }
    if "output.weight" in header.tensors:
        planned["output.weight"] = (s.d_model, s.vocabulary)
    of_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (s.d_model,),
        "attn_q": (s.d_model, q),
        "attn_k": (s.d_model, kv),
        "attn_v": (s.d_model, kv),
        "attn_output": (q, s.d_model),
        "ffn_norm": (s.d_model,),
        "ffn_gate": (s.d_model, s.d_ff),
        "ffn_up": (s.d_model, s.d_ff),
        "ffn_down": (s.d_ff, s.d_model),
    }
    planned |= {f"blk.{i}.{part}.weight": dims for i in range(s.n_layers) for part, dims in of_layer.items()}
    file.check(planned)
    _check_memory(header.path, sum(math.prod(dims) for dims in planned.values()), form)

    def matrix(*tensors: MappedTensor) -> Matrix:
        mapped = MappedMatrix(tensors)
        if form == "mapped":
            return mapped
        own = pieces(mapped.outputs, mapped.inputs)
        return pack(form, mapped.inputs, mapped.outputs, (mapped.decode(piece) for piece in own))

    def layer(i: int) -> Layer:
        def tensor(part: str, heads: int = 0) -> MappedTensor:
            return file.tensor(f"blk.{i}.{part}.weight", rotary_order(heads, s.d_head) if heads else None)

        return Layer(
            attention_norm=file.vector(f"blk.{i}.attn_norm.weight"),
            qkv=matrix(tensor("attn_q", s.n_heads), tensor("attn_k", s.n_kv_heads), tensor("attn_v")),
            attention_out=matrix(tensor("attn_output")),
            ffn_norm=file.vector(f"blk.{i}.ffn_norm.weight"),
            gate_up=matrix(tensor("ffn_gate"), tensor("ffn_up")),
            down=matrix(tensor("ffn_down")),
        )

    embedding = matrix(file.tensor("token_embd.weight"))
    tied = "output.weight" not in planned
    head = embedding if tied else matrix(file.tensor("output.weight"))
    layers = tuple(layer(i) for i in range(s.n_layers))
    return Transformer(shape, embedding, layers, file.vector("output_norm.weight"), head)


def rotary_order(heads: int, d_head: int) -> IntArray:
    """The file's row for each row of our queries or keys, shape (heads * d_head,).

    The file pairs neighbours for the rotation, (0, 1), (2, 3), ...; ``rotate`` pairs halves, (0, d_head / 2), .... The
    pairs themselves are the same, in the same order.
    """
    rows = np.arange(heads * d_head, dtype=np.int64).reshape(heads, d_head // 2, 2)
    return np.asarray(rows.transpose(0, 2, 1).reshape(-1))


def _decode(data: NDArray[np.uint8], tensor_type: GGMLQuantizationType) -> FloatArray:
    """Rows of bytes as float32."""
    if tensor_type == GGMLQuantizationType.F32:
        return data.view(np.float32)
    if tensor_type == GGMLQuantizationType.F16:
        return data.view(np.float16).astype(np.float32)
    # quants.dequantize would take twice as long: it decodes 16 rows at a time.
    return np.asarray(getattr(quants, tensor_type.name).dequantize_rows(data))


class _File:
    """The memory-mapped file with its tensors by name."""

    def __init__(self, header: GgufHeader):
        self._header = header
        self._data: NDArray[np.uint8] = np.asarray(np.memmap(header.path, dtype=np.uint8, mode="r"))

    def check(self, planned: dict[str, tuple[int, ...]]) -> None:
        """Raise ``UserError`` unless the file holds exactly these tensors, in these dimensions and supported types."""
        path, held = self._header.path, self._header.tensors
        for name, dims in planned.items():
            if name not in held:
                raise UserError(f"{path}: tensor {name} is missing")
            if held[name].dims != dims:
                found, expected = (" x ".join(map(str, d)) for d in (held[name].dims, dims))
                raise UserError(f"{path}: tensor {name} is {found}; {expected} is expected")
            self._place(name)
        for name in held:
            if name not in planned:
                raise UserError(
                    f"{path}: tensor {name!r:.60} is not part of a plain Llama model; only such models are accepted"
                )

    def vector(self, name: str) -> FloatArray:
        """A one-dimensional tensor, shape (n,)."""
        (vector,) = self.tensor(name).read(slice(None)).copy()
        return np.asarray(vector)

    def tensor(self, name: str, order: IntArray | None = None) -> MappedTensor:
        """A tensor, by a name that ``check`` has accepted."""
        tensor_type, start, rows, width = self._place(name)
        data = self._data[start : start + rows * width].reshape(rows, width)
        inputs = self._header.tensors[name].dims[0]
        return MappedTensor(f"{self._header.path}: tensor {name}", inputs, tensor_type, data, order)

    def _place(self, name: str) -> tuple[GGMLQuantizationType, int, int, int]:
        """A tensor's type, first byte, number of rows, and bytes of a row."""
        path, info = self._header.path, self._header.tensors[name]
        tensor_type = next((tensor_type for tensor_type in _ACCEPTED if tensor_type.value == info.kind), None)
        if tensor_type is None:
            known = {t.value: t.name for t in GGMLQuantizationType}
            accepted = ", ".join(t.name for t in _ACCEPTED)
            found = known.get(info.kind, f"type {info.kind}")
            raise UserError(f"{path}: tensor {name} is {found}; {accepted} are accepted")
        numbers, size = GGML_QUANT_SIZES[tensor_type]
        if info.dims[0] % numbers:
            raise UserError(
                f"{path}: tensor {name} has rows of {info.dims[0]}, not a multiple of {tensor_type.name}'s {numbers}"
            )
        rows, width = math.prod(info.dims[1:]), info.dims[0] // numbers * size
        end = info.offset + rows * width
        if end > self._header.size:
            raise UserError(
                f"{path}: cut short: tensor {name} ends at byte {end}, the file after {self._header.size} bytes"
            )
        return tensor_type, info.offset, rows, width


def _check_memory(path: Path, weights: int, form: WeightForm) -> None:
    """Refuse weights that exceed this machine's memory."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return
    there, needed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), weights * WEIGHT_BYTES[form]
    if needed > there:
        narrower = [name for name, size in WEIGHT_BYTES.items() if weights * size <= there]
        raise UserError(
            f"{path}: {form} weights take {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB; "
            f"weights that fit: {', '.join(narrower)}"
        )
