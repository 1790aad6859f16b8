"""Storage of K and V, each in a type of its own: f32, f16, or llama.cpp's block formats q8_0 and q4_0.

A store holds K or V of one layer, shape (n_kv_heads, cells, d_head). In q8_0 and q4_0 every 32 numbers of a head share
a scale in f16 (ggml's ``quantize_row_q8_0_ref`` and ``quantize_row_q4_0_ref``).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.model.engine_shapes import ModelShape, Storage
from real_engine.arrays import FloatArray, IntArray

QK = 32
"""Numbers that share a scale."""

CellIndex = slice | IntArray


class Store(Protocol):
    """K or V of one layer, indexed by cell."""

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """The arrays that make up the store; axis 1 of each is the cell, so that moves apply to each."""
        ...

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Store numbers of shape (n_kv_heads, n_cells, d_head)."""
        ...

    def read(self, cells: CellIndex) -> FloatArray:
        """Stored numbers as float32, shape (n_kv_heads, n_cells, d_head); a view where possible."""
        ...


class F32Store:
    """float32, as computed."""

    def __init__(self, heads: int, cells: int, d: int):
        self._numbers = np.zeros((heads, cells, d), dtype=np.float32)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """One array of float32."""
        return (self._numbers,)

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Store the numbers unchanged."""
        self._numbers[:, cells] = numbers

    def read(self, cells: CellIndex) -> FloatArray:
        """A view for a slice, else a copy."""
        return self._numbers[:, cells]


class F16Store:
    """float16: half the bytes, 11 bits of precision."""

    def __init__(self, heads: int, cells: int, d: int):
        self._numbers = np.zeros((heads, cells, d), dtype=np.float16)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """One array of float16."""
        return (self._numbers,)

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Store the numbers rounded to the nearest half."""
        self._numbers[:, cells] = numbers

    def read(self, cells: CellIndex) -> FloatArray:
        """Stored numbers, widened."""
        return self._numbers[:, cells].astype(np.float32)


class Q8Store:
    """q8_0: a signed byte for each number; the scale is the largest magnitude over 127."""

    def __init__(self, heads: int, cells: int, d: int):
        self._codes = np.zeros((heads, cells, d // QK, QK), dtype=np.int8)
        self._scales = np.zeros((heads, cells, d // QK, 1), dtype=np.float16)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """Codes and scales."""
        return self._codes, self._scales

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Quantise: codes by the exact scale, which is then rounded to f16, as in ggml."""
        blocks = numbers.reshape(*numbers.shape[:2], -1, QK)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        self._codes[:, cells] = _away_from_zero(blocks * _inverse(scale))
        self._scales[:, cells] = scale

    def read(self, cells: CellIndex) -> FloatArray:
        """Dequantised numbers, a copy."""
        numbers = self._codes[:, cells].astype(np.float32)
        numbers *= self._scales[:, cells]
        return numbers.reshape(*numbers.shape[:2], -1)


class Q4Store:
    """q4_0: half a byte for each number, -8 to 7 times the scale; the number of largest magnitude becomes -8."""

    def __init__(self, heads: int, cells: int, d: int):
        self._codes = np.zeros((heads, cells, d // QK, QK // 2), dtype=np.uint8)
        """The first 16 numbers of a block in the low halves, the others in the high ones."""
        self._scales = np.zeros((heads, cells, d // QK, 1), dtype=np.float16)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """Codes and scales."""
        return self._codes, self._scales

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Quantise: codes by the exact scale, which is then rounded to f16, as in ggml."""
        blocks = numbers.reshape(*numbers.shape[:2], -1, QK)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
        scale = largest / np.float32(-8)
        codes = np.minimum(15, (blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8))
        self._codes[:, cells] = codes[..., : QK // 2] | (codes[..., QK // 2 :] << 4)
        self._scales[:, cells] = scale

    def read(self, cells: CellIndex) -> FloatArray:
        """Dequantised numbers, a copy."""
        codes = self._codes[:, cells]
        numbers = np.empty((*codes.shape[:3], QK), dtype=np.float32)
        numbers[..., : QK // 2] = codes & 15
        numbers[..., QK // 2 :] = codes >> 4
        numbers -= 8
        numbers *= self._scales[:, cells]
        return numbers.reshape(*numbers.shape[:2], -1)


_STORES: dict[Storage, type[F32Store] | type[F16Store] | type[Q8Store] | type[Q4Store]] = {
    "f32": F32Store,
    "f16": F16Store,
    "q8_0": Q8Store,
    "q4_0": Q4Store,
}


def store(storage: Storage, shape: ModelShape, cells: int) -> Store:
    """Allocate K or V of one layer. Raises ``UserError`` if the format does not fit the model's heads."""
    if storage in ("q8_0", "q4_0") and shape.d_head % QK:
        raise UserError(f"cache type {storage}: heads of {shape.d_head} numbers cannot be cut into blocks of {QK}")
    return _STORES[storage](shape.n_kv_heads, cells, shape.d_head)


def _inverse(scale: FloatArray) -> FloatArray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _away_from_zero(numbers: FloatArray) -> FloatArray:
    """Round as C's ``roundf``: halves away from zero, where NumPy would round them to even."""
    return np.trunc(numbers + np.copysign(np.float32(0.5), numbers))
