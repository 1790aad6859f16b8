"""Weight matrices in several storage forms, each with the product ``x @ W`` and an embedding look-up.

An embedding table has an output for each token, so that it can also serve as a tied output head. Narrow forms are
decoded to float32 piece by piece at each product, within the processor's cache; no float32 copy of a whole matrix ever
exists. They store W transposed, a row for each output, as GGUF files do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from real_engine.arrays import FloatArray, IntArray

WeightForm = Literal["f32", "f16", "int8", "mapped"]
"""``f32``, ``f16``: numbers of 4 or 2 bytes. ``int8``: 1 byte, and a scale for each output. ``mapped``: left as they
are in the memory-mapped GGUF file, and decoded at each use."""
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)
WEIGHT_BYTES: dict[WeightForm, int] = {"f32": 4, "f16": 2, "int8": 1, "mapped": 0}
"""Bytes of memory for each weight."""

PIECE = 1 << 18
"""Numbers decoded at a time: 1 MB in float32, to stay in the second-level cache."""

_F16_MOST = np.float32(np.finfo(np.float16).max)
_F16_TO_F32 = np.float32(2.0**112)
"""2 ** (127 - 15), the difference of the two types' exponent biases."""
_F16_BITS = np.int32(-0x70002000)
"""Mask of a half's sign, 5 exponent bits and 10 fraction bits at their places in a float32."""


class Matrix(ABC):
    """A matrix W of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, *arrays: NDArray[Any]):
        """``arrays``: those that hold it."""
        self.inputs, self.outputs = inputs, outputs
        self.nbytes = sum(array.nbytes for array in arrays)
        """Bytes in memory or in the mapped file, of which the operating system decides how many are in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        return self.inputs, self.outputs

    @abstractmethod
    def apply(self, x: FloatArray) -> FloatArray:
        """``x @ W``, a new array of shape (n, outputs); ``x`` has shape (n, inputs)."""

    @abstractmethod
    def rows(self, outputs: IntArray) -> FloatArray:
        """Weights of these outputs (an embedding look-up), a new array of shape (len(outputs), inputs)."""


class F32Matrix(Matrix):
    """Numbers of 4 bytes, not transposed: OpenBLAS is then up to a quarter faster for few tokens, as fast for many."""

    def __init__(self, weights: FloatArray):
        """``weights``: shape (inputs, outputs), C-ordered."""
        super().__init__(*weights.shape, weights)
        self._weights = weights

    def apply(self, x: FloatArray) -> FloatArray:
        """``x @ W`` by one BLAS product."""
        return x @ self._weights

    def rows(self, outputs: IntArray) -> FloatArray:
        """Columns of the stored matrix."""
        return np.ascontiguousarray(self._weights.take(outputs, axis=1).T)


class DecodedMatrix(Matrix):
    """A matrix in a form that is decoded piece by piece."""

    def apply(self, x: FloatArray) -> FloatArray:
        """``x @ W`` by one product for each piece."""
        out = np.empty((len(x), self.outputs), dtype=np.float32)
        for piece in pieces(self.outputs, self.inputs):
            np.matmul(x, self.decode(piece).T, out=out[:, piece])
        return out

    @abstractmethod
    def decode(self, piece: slice) -> FloatArray:
        """Weights of these outputs, shape (len(piece), inputs); ``Int8Matrix`` leaves out the scales."""


class F16Matrix(DecodedMatrix):
    """Numbers of 2 bytes."""

    def __init__(self, weights: NDArray[np.float16]):
        """``weights``: shape (outputs, inputs), finite."""
        super().__init__(weights.shape[1], weights.shape[0], weights)
        self._weights = weights

    def rows(self, outputs: IntArray) -> FloatArray:
        """Rows of the stored matrix, widened."""
        return self._weights[outputs].astype(np.float32)

    def decode(self, piece: slice) -> FloatArray:
        """Move the bits, then scale the exponent: exact for finite halves, and twice as fast as ``astype``."""
        bits = self._weights[piece].view(np.int16).astype(np.int32)
        bits <<= 13
        bits &= _F16_BITS
        numbers: FloatArray = bits.view(np.float32)
        numbers *= _F16_TO_F32
        return numbers


class Int8Matrix(DecodedMatrix):
    """Integers from -127 to 127, and a scale for each output."""

    def __init__(self, weights: NDArray[np.int8], scales: FloatArray):
        """``weights``: shape (outputs, inputs); ``scales``: shape (outputs,)."""
        super().__init__(weights.shape[1], weights.shape[0], weights, scales)
        self._weights = weights
        self._scales = scales

    def apply(self, x: FloatArray) -> FloatArray:
        """The product with the integers, scaled."""
        out = super().apply(x)
        out *= self._scales
        return out

    def rows(self, outputs: IntArray) -> FloatArray:
        """Rows of the stored matrix, widened."""
        return self._weights[outputs] * self._scales[outputs, None]

    def decode(self, piece: slice) -> FloatArray:
        """The integers as float32."""
        return self._weights[piece].astype(np.float32)


def pack(form: WeightForm, inputs: int, outputs: int, blocks: Iterator[FloatArray]) -> Matrix:
    """Build a matrix in the form ``f32``, ``f16`` or ``int8`` from consecutive blocks of rows, shape (n, inputs)
    each."""
    at = 0
    if form == "int8":
        small = np.empty((outputs, inputs), dtype=np.int8)
        scales = np.empty(outputs, dtype=np.float32)
        for block in blocks:
            own = slice(at, at := at + len(block))
            scales[own] = np.abs(block).max(axis=1) / 127
            small[own] = np.rint(block / np.maximum(scales[own, None], np.finfo(np.float32).tiny))
        return Int8Matrix(small, scales)
    if form == "f16":
        half = np.empty((outputs, inputs), dtype=np.float16)
        for block in blocks:
            half[at : at + len(block)] = block.clip(-_F16_MOST, _F16_MOST)
            at += len(block)
        return F16Matrix(half)
    assert form == "f32", "mapped weights are not packed"
    full = np.empty((inputs, outputs), dtype=np.float32)
    for block in blocks:
        full[:, at : at + len(block)] = block.T
        at += len(block)
    return F32Matrix(full)


def pieces(outputs: int, inputs: int) -> Iterator[slice]:
    """Slices of a matrix's outputs, about ``PIECE`` numbers each."""
    step = max(PIECE // inputs, 1)
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))
