"""The cost model: what is fitted, what is predicted, and what is refused."""

import json

import numpy as np
import pytest

from kvsim.costs import CostModel, MoveSample, Sample, ShiftSample, fit, load_profile
from kvsim.errors import UserError
from kvsim.scenario import load
from kvsim.simulation import build_policy, run
from policies import NO_MOVES, Chunk, MicroBatch, Moves, Place
from policies.reads import reads_of

BASE, PER_TOKEN, PER_SCORE, PER_CHUNK, PER_RUN, PER_CELL = 1e-3, 5e-5, 1e-7, 2e-5, 4e-6, 8e-7


def known_samples(rng, n=400, noise=0.0):
    samples = []
    for _ in range(n):
        tokens, chunks = int(rng.integers(1, 400)), int(rng.integers(1, 9))
        cells, runs = int(rng.integers(32, 4096)), int(rng.integers(1, 200))
        scores = tokens * cells
        seconds = BASE + PER_TOKEN * tokens + PER_SCORE * scores + PER_CHUNK * chunks
        seconds *= 1 + noise * rng.standard_normal()
        samples.append(
            Sample(
                kernel=rng.choice(["masked", "gather"]),
                tokens=tokens,
                token_cells=scores,
                cells=cells,
                chunks=chunks,
                runs=runs,
                seconds=seconds,
            )
        )
    moves = []
    for _ in range(50):
        runs, cells = int(rng.integers(1, 50)), int(rng.integers(50, 2000))
        moves.append(MoveSample(runs=runs, cells=cells, seconds=PER_RUN * runs + PER_CELL * cells))
    shifts = [ShiftSample(cells=n, seconds=PER_CELL * n) for n in (1, 10, 100)]
    return samples, moves, shifts


def test_the_fit_recovers_known_costs():
    fitted = fit(*known_samples(np.random.default_rng(1)), np.random.default_rng(2))
    assert fitted.held_out_error_p95 < 1e-6
    assert fitted.base_s.value == pytest.approx(BASE + PER_TOKEN, rel=1e-3)
    for kernel in ("masked", "gather"):
        assert fitted.kernels[kernel].per_token_cell_s.value == pytest.approx(PER_SCORE)
        assert fitted.kernels[kernel].per_chunk_s.value == pytest.approx(PER_CHUNK, rel=1e-3)
    assert fitted.moves.per_run_s.value == pytest.approx(PER_RUN)
    assert fitted.moves.per_cell_s.value == pytest.approx(PER_CELL)
    assert fitted.shift_per_cell_s.value == pytest.approx(PER_CELL)


def test_noise_shows_in_the_intervals_and_in_the_held_out_error():
    fitted = fit(*known_samples(np.random.default_rng(1), noise=0.05), np.random.default_rng(2))
    score = fitted.kernels["masked"].per_token_cell_s
    assert score.low < PER_SCORE < score.high
    assert 0.02 < fitted.held_out_error_median < 0.06


def test_no_coefficient_is_negative():
    rng = np.random.default_rng(3)
    fitted = fit(*known_samples(rng, n=60, noise=0.5), rng)
    values = [fitted.base_s, *fitted.matmul_slopes_s, fitted.moves.per_run_s, fitted.moves.per_cell_s]
    assert all(0 <= c.low <= c.value <= c.high for c in values)


@pytest.fixture
def shipped():
    return load_profile("default")


def test_prediction_is_the_sum_of_its_parts(shipped):
    costs = CostModel(shipped)
    chunks = (Chunk(0, 100, 1), Chunk(1, 0, 30))
    reads = reads_of("masked", chunks, lambda seq: np.arange(101), 512)
    slopes, knots, a = shipped.matmul_slopes_s, shipped.matmul_knots, shipped.kernels["masked"]
    matmul = sum(
        s.value * (min(31, high) - low) for s, low, high in zip(slopes, knots, knots[1:], strict=False) if low < 31
    )
    expected = (
        shipped.base_s.value
        + matmul
        + a.per_token_cell_s.value * 31 * 512
        + a.per_cell_s.value * 512
        + a.per_chunk_s.value * 2
        + a.per_run_s.value * 2
    )
    batch = MicroBatch(chunks, (Place(np.arange(31), reads),))
    assert costs.forward(batch, "masked") == pytest.approx(expected, rel=1e-12)


def test_more_tokens_never_cost_less_even_beyond_the_table(shipped):
    costs = CostModel(shipped)

    def seconds(n):
        chunks = (Chunk(0, 0, n),)
        reads = reads_of("gather", chunks, lambda seq: np.arange(n), n)
        return costs.forward(MicroBatch(chunks, (Place(np.arange(n), reads),)), "gather")

    times = [seconds(n) for n in (1, 2, 3, 7, 64, 511, 512, 513, 1024, 1025, 3000)]
    assert times == sorted(times)


def test_moves_cost_by_run_and_by_cell(shipped):
    costs = CostModel(shipped)
    one = costs.moves(Moves.from_runs([(10, 0, 8)]))
    eight = costs.moves(Moves.from_runs([(10 + i, i, 1) for i in range(8)]))
    assert eight - one == pytest.approx(7 * shipped.moves.per_run_s.value)
    assert costs.moves(NO_MOVES) == 0


def test_going_beyond_the_measured_range_is_said(shipped):
    world = load("chat", workload__requests=5, server__n_ubatch=2048, server__n_batch=2048, server__slot_context=2048)
    long = load(world, workload__prompt_tokens={"kind": "fixed", "value": 1500})
    assert run(world, "paged").warnings == ()
    (warning,) = run(long, "paged").warnings
    assert "1500 tokens; the profile was measured up to" in warning


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(UserError, match="measured on model 'tiny', the scenario serves 'small'"):
        run(load("chat", model__name="small"))


def test_a_profile_survives_its_file(shipped, tmp_path):
    shipped.save(tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == shipped


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_s": {"value": -1, "low": 0, "high": 0}}, "base_s.value"),
        ({"format": 99}, "format 99"),
        ({"moves": None}, "moves"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(shipped, tmp_path, change, said):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**shipped.model_dump(mode="json"), **change}))
    with pytest.raises(UserError, match=said) as error:
        load_profile(str(path))
    assert "\n" not in str(error.value)


def test_same_seed_same_numbers():
    world = load("chat", workload__requests=60)
    first, second = run(world).summary, run(world).summary
    first.pop("wall_s"), second.pop("wall_s")
    assert first == second
    other = run(load(world, seed=2)).summary
    assert other["e2e_s"] != first["e2e_s"]


def test_kernel_of_the_scenario_replaces_the_policy_s():
    world = load("chat", cache__kernel="gather")
    assert build_policy(world, "contiguous").kernel == "gather"
