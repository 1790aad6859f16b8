"""Weight matrices, and the forms they are kept in: ``x @ W`` and a look-up of rows, whatever the form.

A table of embeddings has an output for each token, so that it can be at the same time the head that is tied to it.
Narrow forms are turned into float32 piece by piece, in cache, at each product; no float32 copy of a whole matrix ever
exists. They keep W transposed, a row for each output, as GGUF files do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from real_engine.arrays import FloatArray, IntArray

WeightForm = Literal["f32", "f16", "int8", "mapped"]
"""``f32``, ``f16``: numbers of 4 or 2 bytes. ``int8``: 1 byte, and a scale for each output. ``mapped``: left in the
GGUF file as they are, and decoded at each use."""
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

PIECE = 1 << 18
"""Numbers that are decoded at a time: 1 MB in float32, to stay in the second-level cache."""

_F16_MOST = np.float32(np.finfo(np.float16).max)
_F16_TO_F32 = np.float32(2.0**112)
"""2 ** (127 - 15): the two types count their exponents from there."""
_F16_BITS = np.int32(-0x70002000)
"""Sign, the 5 bits of exponent and the 10 of fraction of a half, where they lie in a float32."""


class Matrix(ABC):
    """A matrix W of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int):
        self.inputs = inputs
        self.outputs = outputs

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        return self.inputs, self.outputs

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it occupies, in memory or in the mapped file."""

    @abstractmethod
    def apply(self, x: FloatArray) -> FloatArray:
        """``x @ W``: from shape (n, inputs) to a new array of shape (n, outputs)."""

    @abstractmethod
    def rows(self, outputs: IntArray) -> FloatArray:
        """The weights of these outputs, a new array of shape (len(outputs), inputs): a look-up of embeddings."""


class F32Matrix(Matrix):
    """Numbers of 4 bytes. Not transposed: OpenBLAS is up to a quarter faster for a few tokens, as fast for many."""

    def __init__(self, weights: FloatArray):
        """``weights``: shape (inputs, outputs), C-ordered."""
        super().__init__(*weights.shape)
        self._weights = weights

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._weights.nbytes

    def apply(self, x: FloatArray) -> FloatArray:
        """One product of the BLAS."""
        return x @ self._weights

    def rows(self, outputs: IntArray) -> FloatArray:
        """A look-up of columns."""
        return np.ascontiguousarray(self._weights.take(outputs, axis=1).T)


class DecodedMatrix(Matrix):
    """A form that is decoded piece by piece."""

    def apply(self, x: FloatArray) -> FloatArray:
        """A product for each piece."""
        out = np.empty((len(x), self.outputs), dtype=np.float32)
        for piece in pieces(self.outputs, self.inputs):
            np.matmul(x, self.decode(piece).T, out=out[:, piece])
        return out

    @abstractmethod
    def decode(self, piece: slice) -> FloatArray:
        """The weights of these outputs, shape (len(piece), inputs); of ``Int8Matrix`` but for the scales."""


class F16Matrix(DecodedMatrix):
    """Numbers of 2 bytes."""

    def __init__(self, weights: NDArray[np.float16]):
        """``weights``: shape (outputs, inputs), finite."""
        super().__init__(weights.shape[1], weights.shape[0])
        self._weights = weights

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._weights.nbytes

    def rows(self, outputs: IntArray) -> FloatArray:
        """A look-up."""
        return self._weights[outputs].astype(np.float32)

    def decode(self, piece: slice) -> FloatArray:
        """Exact, and twice as fast as ``astype``, which minds infinities: move the bits, then scale the exponent."""
        bits = self._weights[piece].view(np.int16).astype(np.int32)
        bits <<= 13
        bits &= _F16_BITS
        numbers: FloatArray = bits.view(np.float32)
        numbers *= _F16_TO_F32
        return numbers


class Int8Matrix(DecodedMatrix):
    """Whole numbers from -127 to 127, and a scale for each output."""

    def __init__(self, weights: NDArray[np.int8], scales: FloatArray):
        """``weights``: shape (outputs, inputs); ``scales``: shape (outputs,)."""
        super().__init__(weights.shape[1], weights.shape[0])
        self._weights = weights
        self._scales = scales

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._weights.nbytes + self._scales.nbytes

    def apply(self, x: FloatArray) -> FloatArray:
        """The product with the whole numbers, scaled."""
        out = super().apply(x)
        out *= self._scales
        return out

    def rows(self, outputs: IntArray) -> FloatArray:
        """A look-up."""
        return self._weights[outputs] * self._scales[outputs, None]

    def decode(self, piece: slice) -> FloatArray:
        """The whole numbers as float32."""
        return self._weights[piece].astype(np.float32)


def pack(form: WeightForm, inputs: int, outputs: int, blocks: Iterator[FloatArray]) -> Matrix:
    """A matrix in the form ``f32``, ``f16`` or ``int8`` from its rows: blocks of shape (some, inputs), in order."""
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
    """The outputs of a matrix in slices of about ``PIECE`` numbers."""
    step = max(PIECE // inputs, 1)
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))
