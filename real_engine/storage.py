"""Storage of K and V, each in a type of its own: f32, f16, or llama.cpp's block formats q8_0 and q4_0.

A store holds K or V of one layer, shape (n_kv_heads, cells, d_head). In q8_0 and q4_0 every 32 numbers of a head share
a scale in f16 (ggml's ``quantize_row_q8_0_ref`` and ``quantize_row_q4_0_ref``). Codes are made with the exact scale,
which is then rounded, as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import UserError
from kvsim.model.engine_shapes import ModelShape, Storage
from policies import Moves
from real_engine.arrays import FloatArray, IntArray

QK = 32
"""Numbers that share a scale."""

CellIndex = slice | IntArray
Array = NDArray[Any]


class _Format(NamedTuple):
    """How numbers are held, shape (heads, cells, d_head): in one array, or as codes and scales of blocks."""

    dtype: type[np.generic]
    encode: Callable[[FloatArray], tuple[Array, ...]]
    """What each array holds of the numbers."""
    decode: Callable[..., FloatArray]
    """The numbers of what each array holds, as float32; a view where possible."""
    block_codes: int = 0
    """Codes of a block; 0 without blocks."""


class Store:
    """K or V of one layer, indexed by cell."""

    def __init__(self, arrays: tuple[Array, ...], held: _Format):
        self.arrays = arrays
        """The arrays that make up the store; axis 1 of each is the cell, so that moves apply to each."""
        self._encode, self._decode = held.encode, held.decode

    @property
    def cells(self) -> int:
        """Number of cells."""
        return int(self.arrays[0].shape[1])

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Store numbers of shape (n_kv_heads, n_cells, d_head)."""
        for array, part in zip(self.arrays, self._encode(numbers), strict=True):
            array[:, cells] = part

    def read(self, cells: CellIndex) -> FloatArray:
        """Stored numbers as float32, shape (n_kv_heads, n_cells, d_head); a view where possible."""
        return self._decode(*(array[:, cells] for array in self.arrays))


def store(storage: Storage, shape: ModelShape, cells: int) -> Store:
    """Allocate K or V of one layer. Raises ``UserError`` if the format does not fit the model's heads."""
    held, d = _FORMATS[storage], shape.d_head
    if not held.block_codes:
        return Store((np.zeros((shape.n_kv_heads, cells, d), dtype=held.dtype),), held)
    if d % QK:
        raise UserError(f"cache type {storage}: heads of {d} numbers cannot be cut into blocks of {QK}")
    blocks = (shape.n_kv_heads, cells, d // QK)
    codes, scales = np.zeros((*blocks, held.block_codes), held.dtype), np.zeros((*blocks, 1), np.float16)
    return Store((codes, scales), held)


def carry_out(arrays: Sequence[Array], moves: Moves) -> None:
    """Move cells of C-ordered arrays of shape (heads, cells, ...) in place, run by run.

    Runs may overlap themselves and each other as ``Moves`` allows. It is done head by head: within a head a run is
    contiguous memory. Across heads, NumPy could not rule out an overlap between source and target, and would copy every
    run twice. Raises ``ValueError`` for other arrays.
    """
    for array in arrays:
        heads, cells = array.shape[:2]
        size = array.nbytes // (heads * cells)
        columns = ((column * size).tolist() for column in (moves.src, moves.dst, moves.length))
        runs = list(zip(*columns, strict=True))
        for head in array:
            # A memoryview takes a third less time for each run than a NumPy array.
            memory = head.reshape(-1, copy=False).view(np.uint8).data
            for source, target, n in runs:
                memory[target : target + n] = memory[source : source + n]


def _widened(numbers: Array) -> FloatArray:
    return numbers.astype(np.float32, copy=False)


def _to_q8_0(numbers: FloatArray) -> tuple[Array, Array]:
    """A signed byte for each number; the scale is the largest magnitude over 127."""
    blocks = numbers.reshape(*numbers.shape[:2], -1, QK)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # As C's roundf: halves away from zero, where NumPy would round them to even.
    return np.trunc(scaled + np.copysign(np.float32(0.5), scaled)), scale


def _from_q8_0(codes: Array, scales: Array) -> FloatArray:
    return _scaled(codes.astype(np.float32), scales)


def _to_q4_0(numbers: FloatArray) -> tuple[Array, Array]:
    """Half a byte for each number, -8 to 7 times the scale; the number of largest magnitude becomes -8.

    The first 16 numbers of a block are in the low halves, the others in the high ones.
    """
    blocks = numbers.reshape(*numbers.shape[:2], -1, QK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scale = largest / np.float32(-8)
    codes = np.minimum(15, (blocks * _inverse(scale) + np.float32(8.5)).astype(np.uint8))
    return codes[..., : QK // 2] | (codes[..., QK // 2 :] << 4), scale


def _from_q4_0(codes: Array, scales: Array) -> FloatArray:
    numbers = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32)
    numbers -= 8
    return _scaled(numbers, scales)


def _scaled(numbers: FloatArray, scales: Array) -> FloatArray:
    numbers *= scales
    return numbers.reshape(*numbers.shape[:2], -1)


def _inverse(scale: FloatArray) -> FloatArray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


_FORMATS: dict[Storage, _Format] = {
    "f32": _Format(np.float32, lambda numbers: (numbers,), _widened),
    "f16": _Format(np.float16, lambda numbers: (numbers,), _widened),
    "q8_0": _Format(np.int8, _to_q8_0, _from_q8_0, QK),
    "q4_0": _Format(np.uint8, _to_q4_0, _from_q4_0, QK // 2),
}
