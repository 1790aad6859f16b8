"""Storage of K and V compared with the formats' definitions, number by number."""

import numpy as np
import pytest

from kvsim.errors import UserError
from kvsim.model.engine_shapes import SHAPES, STORAGES, ModelShape
from real_engine.storage import QK, store

SHAPE = ModelShape(n_layers=1, d_model=128, n_heads=4, n_kv_heads=2, d_head=64, d_ff=64, vocabulary=16)


def q8_0(block):
    """One block as in ggml's C code, with its rounding."""
    d = np.float32(max(abs(x) for x in block)) / np.float32(127)
    inverse = np.float32(1) / d if d else np.float32(0)
    scaled = [np.float32(x) * inverse for x in block]
    return [np.float32(np.sign(x) * np.floor(abs(x) + np.float32(0.5))) * np.float32(np.float16(d)) for x in scaled]


def q4_0(block):
    largest = max(block, key=abs)
    d = np.float32(largest) / np.float32(-8)
    inverse = np.float32(1) / d if d else np.float32(0)
    codes = [min(15, int(np.float32(x) * inverse + np.float32(8.5))) for x in block]
    return [np.float32(code - 8) * np.float32(np.float16(d)) for code in codes]


@pytest.mark.parametrize(("storage", "by_hand"), [("q8_0", q8_0), ("q4_0", q4_0)])
def test_quantised_blocks_equal_ggmls(storage, by_hand):
    rng = np.random.default_rng(3)
    numbers = (rng.standard_normal((2, 5, 64)) * 10.0 ** rng.uniform(-3, 2, (2, 5, 1))).astype(np.float32)
    numbers[0, 0] = 0
    kept = store(storage, SHAPE, 8)
    kept.write(np.array([6, 0, 3, 1, 7]), numbers)
    read = kept.read(np.array([6, 0, 3, 1, 7]))
    expected = [by_hand(block) for block in numbers.reshape(-1, QK)]
    assert (read.reshape(-1, QK) == np.array(expected)).all()
    assert (kept.read(slice(3, 4))[:, 0] == read[:, 2]).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_stores_take_the_bytes_that_the_simulator_counts(storage):
    cells = 100
    held = sum(
        array.nbytes for kept in (store(storage, SHAPE, cells), store(storage, SHAPE, cells)) for array in kept.arrays
    )
    assert held == cells * SHAPE.cell_bytes(storage, storage)


def test_coarser_storage_errs_more_but_little():
    rng = np.random.default_rng(4)
    numbers = rng.standard_normal((2, 50, 64)).astype(np.float32)
    errors = []
    for storage in ("f32", "f16", "q8_0", "q4_0"):
        kept = store(storage, SHAPE, 50)
        kept.write(slice(0, 50), numbers)
        errors.append(float(np.sqrt(np.mean((kept.read(slice(0, 50)) - numbers) ** 2))))
    assert errors[0] == 0
    assert errors == sorted(errors)
    assert errors[1] < 3e-4
    assert errors[2] < 8e-3
    assert errors[3] < 0.12


def test_a_head_that_cannot_be_cut_into_blocks_is_refused():
    shape = ModelShape(n_layers=1, d_model=48, n_heads=2, n_kv_heads=2, d_head=24, d_ff=64, vocabulary=16)
    with pytest.raises(UserError, match="heads of 24 numbers cannot be cut into blocks of 32"):
        store("q8_0", shape, 4)
    assert SHAPES["tiny"].d_head % QK == 0
