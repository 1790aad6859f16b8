"""Chunks that attend by a tiled kernel from some number of tokens on: what they cost, and that a fit finds it."""

import numpy as np
import pytest

from kvsim.costs.pass_layout import Sample
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Attention, Coefficient
from kvsim.costs.step_fit import fit_steps
from policies import Group
from policies.placement.rule import PassReads
from tests.kvsim.engines.recordings.stepped_servers import KNOWN

TILE, CELL_S, TILED_CELL_S, TILED_TOKEN_S = 64, 20e-6, 30e-6, 3e-6


def coefficient(value):
    return Coefficient(value=value, low=value, high=value)


def attended(tokens, context):
    """Seconds of attention of a chunk whose last token sees ``context`` cells."""
    cells = context - (tokens - 1) / 2
    if tokens < TILE:
        return CELL_S * tokens * cells
    return (TILED_CELL_S + TILED_TOKEN_S * (tokens - 1)) * cells


def sample(tokens, context, origin):
    seconds = 5e-3 + 1e-3 * tokens + attended(tokens, context)
    return Sample(
        tokens=tokens, scans=((tokens, context),), chunks=1, runs=1, kernel="tiled", seconds=seconds, origin=origin
    )


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(3)
    draw = [(1, int(c)) for c in rng.integers(1, 900, 120)]
    draw += [(int(n), int(n + c)) for n, c in zip(rng.integers(2, 400, 240), rng.integers(0, 600, 240), strict=True)]
    return fit_steps([sample(n, c, i) for i, (n, c) in enumerate(draw)], np.random.default_rng(1), ("tiled",))


def test_the_fit_finds_both_kernels(fitted):
    kernel = fitted.costs["mixed"].kernels["tiled"]
    assert kernel.tiles_from == TILE
    assert kernel.tiled_token_s.value == pytest.approx(TILED_TOKEN_S, rel=0.05)
    assert fitted.costs["mixed"].kernels["tiled"].further_token_s[0].value == pytest.approx(CELL_S, rel=0.05)
    assert fitted.errors["mixed"].error_most < 0.02


def test_a_chunk_is_priced_by_the_kernel_of_its_size(fitted):
    profile = KNOWN.model_copy(update={**dict(fitted.costs["decode"]), "mixed": fitted.costs["mixed"]})
    price = PassPrice(profile, "tiled", [Group(0)])

    def priced(tokens, context):
        return price.seconds(PassReads.counted(tokens, 1, 1, ((tokens, context),)))

    for tokens, context in ((2, 300), (63, 400), (64, 400), (300, 500)):
        expected = 5e-3 + 1e-3 * tokens + attended(tokens, context)
        assert priced(tokens, context) == pytest.approx(expected, rel=0.03)
    # One token more may cost less: a tile is cheaper.
    assert priced(64, 400) < priced(63, 400)


def test_no_tiles_by_default():
    nothing = coefficient(0.0)
    assert (
        Attention(
            base_s=nothing, per_cell_s=nothing, further_token_s=(), per_chunk_s=nothing, per_run_s=nothing
        ).tiles_from
        == 0
    )
