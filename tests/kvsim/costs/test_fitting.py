"""Costs from measurements: what is recovered, what noise does, and what is held out."""

import numpy as np
import pytest

from kvsim.costs.fitting import MoveSample, ShiftSample, digest, fit
from kvsim.costs.pass_layout import Sample, sample_of
from kvsim.costs.tables import ATTENTION_KNOTS
from policies import Chunk, Group, MicroBatch, Place
from policies.cells.reads import reads_of

BASE = {"masked": 1e-3, "gather": 8e-4}
PER_TOKEN, PER_CELL, PER_SCORE, PER_CHUNK, PER_RUN = 5e-5, 4e-7, 1e-7, 2e-5, 4e-6


def known_samples(rng, n=600, noise=0.0, mixed=False):
    samples = []
    for origin in range(n):
        kernel = str(rng.choice(["masked", "gather"]))
        chunks = int(rng.integers(1, 9))
        lengths = (2 ** rng.uniform(0, 6, chunks)).astype(int)
        cells = rng.integers(32, 2048, chunks)
        if kernel == "masked":
            scans, runs = ((int(lengths.sum()), int(cells.max())),), chunks
        else:
            scans, runs = tuple(zip(lengths.tolist(), cells.tolist(), strict=True)), int(rng.integers(chunks, 200))
        seconds = BASE[kernel] + PER_TOKEN * (lengths.sum() - 1) + PER_CHUNK * chunks
        seconds += sum(c * (PER_CELL + PER_SCORE * (t - 1)) for t, c in scans)
        seconds += PER_RUN * runs if kernel == "gather" else 0
        seconds *= np.exp(noise * rng.standard_normal())
        samples.append(
            Sample(
                kernel=kernel,
                tokens=int(lengths.sum()),
                scans=scans,
                chunks=chunks,
                runs=runs,
                seconds=seconds,
                origin=origin,
                mixed=mixed,
            )
        )
    moves = []
    for _ in range(50):
        runs, cells = int(rng.integers(1, 50)), int(rng.integers(50, 2000))
        moves.append(MoveSample(runs=runs, cells=cells, seconds=PER_RUN * runs + PER_CELL * cells))
    shifts = [ShiftSample(cells=n, seconds=PER_CELL * n) for n in (1, 10, 100)]
    return samples, moves, shifts


def coefficients(fitted):
    for attention in fitted.kernels.values():
        yield from (attention.base_s, attention.per_cell_s, attention.per_chunk_s, attention.per_run_s)
        yield from attention.further_token_s
    yield from fitted.matmul_slopes_s
    yield from (fitted.moves.per_run_s, fitted.moves.per_cell_s, fitted.shift_per_cell_s)


def test_the_fit_recovers_known_costs():
    fitted = fit(*known_samples(np.random.default_rng(1)), np.random.default_rng(2)).fit
    assert fitted.held_out_error_p95 < 1e-6
    for kernel, attention in fitted.kernels.items():
        assert attention.per_cell_s.value == pytest.approx(PER_CELL, rel=1e-3)
        assert attention.per_chunk_s.value == pytest.approx(PER_CHUNK, rel=1e-3)
        seen = attention.further_token_s[:-1]
        assert [slope.value for slope in seen] == pytest.approx([PER_SCORE] * len(seen), rel=1e-2)
        assert attention.base_s.value == pytest.approx(BASE[kernel], rel=1e-2)
    assert fitted.kernels["gather"].per_run_s.value == pytest.approx(PER_RUN, rel=1e-3)
    assert fitted.moves.per_run_s.value == pytest.approx(PER_RUN)
    assert fitted.moves.per_cell_s.value == pytest.approx(PER_CELL)
    assert fitted.shift_per_cell_s.value == pytest.approx(PER_CELL)


def test_what_cannot_be_told_from_chunks_is_not_charged_to_runs():
    fitted = fit(*known_samples(np.random.default_rng(1), noise=0.05), np.random.default_rng(2)).fit
    per_run = fitted.kernels["masked"].per_run_s
    assert (per_run.low, per_run.value, per_run.high) == (0, 0, 0)


def test_noise_shows_in_the_intervals_and_in_the_held_out_error():
    fitted = fit(*known_samples(np.random.default_rng(1), noise=0.05), np.random.default_rng(2)).fit
    cell = fitted.kernels["gather"].per_cell_s
    assert cell.low < PER_CELL < cell.high < 3 * PER_CELL
    assert 0.02 < fitted.held_out_error_median < 0.06


def test_no_coefficient_is_negative_and_every_interval_holds_its_value():
    rng = np.random.default_rng(3)
    fitted = fit(*known_samples(rng, n=60, noise=0.5), rng).fit
    assert all(0 <= c.low <= c.value <= c.high < 1 for c in coefficients(fitted))


def test_the_prediction_is_the_mean_not_less():
    """Slow passes must not count less than fast ones: half at 0.7 and half at 1.3 of a cost are that cost."""
    samples, moves, shifts = known_samples(np.random.default_rng(1))
    both = [s.model_copy(update={"seconds": s.seconds * f}) for s in samples for f in (0.7, 1.3)]
    fitted = fit(both, moves, shifts, np.random.default_rng(2))
    assert fitted.held_out["predicted_s"].sum() == pytest.approx(fitted.held_out["measured_s"].sum(), rel=0.03)


def test_one_interruption_does_not_spoil_the_fit():
    samples, moves, shifts = known_samples(np.random.default_rng(1))
    samples[7] = samples[7].model_copy(update={"seconds": 2.0})
    fitted = fit(samples, moves, shifts, np.random.default_rng(2)).fit
    assert fitted.kernels["gather"].per_cell_s.value == pytest.approx(PER_CELL, rel=0.05)
    assert fitted.held_out_error_median < 0.02


def test_passes_of_one_origin_are_held_out_together():
    samples, moves, shifts = known_samples(np.random.default_rng(1), n=90)
    # Three origins, told by their kinds of chunks.
    grouped = [s.model_copy(update={"origin": s.chunks % 3}) for s in samples]
    held = fit(grouped, moves, shifts, np.random.default_rng(2)).held_out
    assert len(set(held["chunks"] % 3)) == 1
    assert len(held) == sum(s.chunks % 3 == held["chunks"].iloc[0] % 3 for s in samples)


def test_steps_that_were_timed_as_a_whole_fit_as_well_as_their_passes():
    samples, moves, shifts = known_samples(np.random.default_rng(4))
    of = {kernel: [s for s in samples if s.kernel == kernel] for kernel in BASE}
    steps = []
    for own in of.values():
        for first, second, third in zip(own[::3], own[1::3], own[2::3], strict=False):
            seconds = first.seconds + second.seconds + third.seconds
            steps.append(first.model_copy(update={"further": (second, third), "seconds": seconds}))
    alone = [s.model_copy(update={"origin": len(samples) + i}) for i, s in enumerate(samples[:60])]
    fitted = fit([*steps, *alone], moves, shifts, np.random.default_rng(2))
    assert fitted.fit.held_out_error_p95 < 1e-6
    assert fitted.fit.kernels["gather"].per_cell_s.value == pytest.approx(PER_CELL, rel=1e-2)
    most = max(s.tokens for s in samples)
    assert fitted.held_out["tokens"].max() > most, "of all passes of a step"


def test_what_every_compaction_costs_is_told_from_its_runs():
    samples, moves, shifts = known_samples(np.random.default_rng(1), n=60)
    dearer = [m.model_copy(update={"seconds": m.seconds + 4e-4}) for m in moves]
    copies = fit(samples, dearer, shifts, np.random.default_rng(2)).fit.moves
    assert copies.per_pass_s.value == pytest.approx(4e-4)
    assert copies.per_run_s.value == pytest.approx(PER_RUN)


def test_an_engine_that_moves_nothing_has_no_cost_of_moves():
    samples, _, shifts = known_samples(np.random.default_rng(1), n=60)
    assert fit(samples, [], shifts, np.random.default_rng(2)).fit.moves is None


def test_a_sample_says_who_scans_what():
    chunks = (Chunk(0, 100, 1), Chunk(1, 0, 30))
    views = {0: np.arange(101), 1: np.arange(200, 230)}
    for kernel, streams, scans in [
        ("masked", 1, ((31, 512),)),
        ("masked", 2, ((1, 512), (30, 512))),
        ("gather", 1, ((1, 101), (30, 30))),
    ]:
        batch = MicroBatch(chunks, (Place(np.arange(31), reads_of(kernel, chunks, views.__getitem__, 512)),))
        sample = sample_of(kernel, [batch], Group(1024, streams=streams), 0.5, 3, mixed=True)
        assert (sample.scans, sample.tokens, sample.chunks, sample.seconds) == (scans, 31, 2, 0.5)
        assert (sample.origin, sample.mixed, len(ATTENTION_KNOTS) > 2) == (3, True, True)
        both = sample_of(kernel, [batch, batch], Group(1024, streams=streams), 0.5, 3, mixed=True)
        assert [(work.scans, work.tokens, work.chunks) for work in both.further] == [(scans, 31, 2)]


def test_the_digest_changes_with_any_measurement():
    samples, moves, shifts = known_samples(np.random.default_rng(1), n=20)
    changed = [samples[0].model_copy(update={"seconds": samples[0].seconds * 1.001}), *samples[1:]]
    assert digest(samples, moves, shifts) == digest(list(samples), moves, shifts)
    assert digest(changed, moves, shifts) != digest(samples, moves, shifts)
