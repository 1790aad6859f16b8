"""Fits to whole steps: known costs come back, whatever passes a step is made of."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.costs.pass_layout import LEAST_STEPS, Sample, Work
from kvsim.costs.step_fit import fit_steps, supported_knots
from kvsim.costs.tables import KNOTS

BASE_S, TOKEN_S, CELL_S = 0.02, 0.002, 2e-5
MIXED_BASE_S, MIXED_TOKEN_S, MIXED_CELL_S = 0.03, 0.0005, 1e-5


def decode(rng):
    cells = rng.integers(10, 900, rng.integers(1, 9)).tolist()
    return Work(tokens=len(cells), scans=tuple((1, each) for each in cells), chunks=len(cells), runs=len(cells))


def prompt(rng):
    tokens = int(rng.integers(2, 300))
    cells = tokens + int(rng.integers(0, 200))
    return Work(tokens=tokens, scans=((tokens, cells),), chunks=1, runs=1)


def seconds(work):
    """What such a pass takes: no cell of its own chunk behind a token is read."""
    cells = sum(each - (n - 1) / 2 for n, each in work.scans)
    if work.tokens == work.chunks:
        return BASE_S + TOKEN_S * (work.tokens - 1) + CELL_S * cells
    return MIXED_BASE_S + MIXED_TOKEN_S * (work.tokens - 1) + MIXED_CELL_S * cells


def samples(n=300, noise=0.0, seed=1):
    """Steps of one to three passes, of which some are prompts."""
    rng, found = np.random.default_rng(seed), []
    for i in range(n):
        works = [decode(rng) for _ in range(rng.integers(1, 3))]
        if i % 3 == 0:
            works.append(prompt(rng))
        took = sum(map(seconds, works)) * float(np.exp(rng.normal(0, noise)))
        first, *further = works
        found.append(
            Sample(**dict(first), kernel="tiled", further=tuple(further), seconds=took, origin=i // 20, mixed=True)
        )
    return found


def test_known_costs_come_back():
    fitted = fit_steps(samples(), np.random.default_rng(0))
    plain, mixed = fitted.costs["decode"], fitted.costs["mixed"]
    attention = plain.kernels["tiled"]
    assert attention.base_s.value + attention.per_chunk_s.value == pytest.approx(BASE_S, rel=0.01)
    assert plain.kernels["tiled"].per_cell_s.value == pytest.approx(CELL_S, rel=1e-3)
    assert mixed.kernels["tiled"].per_cell_s.value == pytest.approx(MIXED_CELL_S, rel=0.05)
    assert [slope.value for slope in mixed.matmul_slopes_s] == pytest.approx(
        [MIXED_TOKEN_S] * len(mixed.matmul_slopes_s), rel=0.05
    )
    off = fitted.held_out["predicted_s"] / fitted.held_out["measured_s"]
    assert off.to_numpy() == pytest.approx(1.0, rel=1e-3)
    assert fitted.errors["decode"].error_most < 1e-3
    assert set(fitted.held_out["regime"]) == {"decode", "mixed"}


def test_with_noise_the_intervals_hold_the_costs_and_the_errors_are_those_of_the_noise():
    fitted = fit_steps(samples(600, noise=0.05), np.random.default_rng(0))
    cell = fitted.costs["decode"].kernels["tiled"].per_cell_s
    assert cell.low <= cell.value <= cell.high
    assert cell.low * 0.95 < CELL_S < cell.high * 1.05
    assert 0.01 < fitted.errors["decode"].error_median < 0.06


def test_of_one_sequence_at_a_time_a_further_one_costs_as_much_as_a_token_of_a_prompt():
    rng, found = np.random.default_rng(3), []
    for i in range(200):
        cells = int(rng.integers(10, 900))
        single = Work(tokens=1, scans=((1, cells),), chunks=1, runs=int(rng.integers(1, 30)))
        work = prompt(rng) if i % 2 else single
        found.append(Sample(**dict(work), kernel="gather", seconds=seconds(work), origin=i // 10, mixed=True))
    fitted = fit_steps(found, np.random.default_rng(0))
    for costs, base_s in ((fitted.costs["decode"], BASE_S), (fitted.costs["mixed"], MIXED_BASE_S)):
        attention = costs.kernels["gather"]
        assert attention.base_s.value == pytest.approx(base_s, rel=0.05)
        # Of chunks and runs, as many as there are passes or blocks, nothing can be told.
        assert (attention.per_chunk_s.value, attention.per_run_s.value) == (0, 0)
        assert costs.matmul_slopes_s[2].value == pytest.approx(MIXED_TOKEN_S, rel=0.1)


def test_a_third_of_the_origins_is_held_out():
    """Consecutive steps together: a machine is fast or slow for a while."""
    each = samples()
    fitted = fit_steps(each, np.random.default_rng(0))
    assert len(fitted.held_out) == 5 * 20
    assert sum(error.samples for error in fitted.errors.values()) == 100


def test_kernels_that_skip_are_said_to():
    assert fit_steps(samples(), np.random.default_rng(0), ("tiled",)).costs["mixed"].kernels["tiled"].skips
    assert not fit_steps(samples(), np.random.default_rng(0)).costs["mixed"].kernels["tiled"].skips


@pytest.mark.parametrize("regime", ["decode", "mixed"])
def test_too_few_steps_of_a_kind(regime):
    each = samples()
    own = [
        sample for sample in each if any(work.tokens > work.chunks for work in sample.further) == (regime == "mixed")
    ]
    few = [sample for sample in each if sample not in own] + own[: LEAST_STEPS - 1]
    with pytest.raises(ValueError, match=f"{LEAST_STEPS - 1} {regime} steps; at least {LEAST_STEPS} are needed"):
        fit_steps(few, np.random.default_rng(0))


def test_knots_without_passes_between_them_are_left_out():
    assert supported_knots((1, 4, 16, 64), [2] * 4 + [30] * 4) == (1, 4, 64)
    assert supported_knots((1, 4, 16, 64), [2] * 3 + [9]) == (1, 16)
    assert supported_knots((1, 4, 16), []) == (1, 4)
    assert supported_knots((1, 4, 16), [99] * 50) == (1, 4)
    assert supported_knots((1, 4, 16), [1] * 50) == (1, 4)


@given(st.lists(st.integers(1, 3000), max_size=80))
def test_between_any_two_knots_there_are_passes_enough(tokens):
    kept = supported_knots(KNOTS, tokens)
    assert kept[0] == KNOTS[0]
    assert set(kept) <= set(KNOTS)
    assert len(kept) >= 2
    assert list(kept) == sorted(kept)
    if len(kept) > 2:
        for low, high in pairwise(kept):
            assert sum(low < n <= high for n in tokens) >= 4
