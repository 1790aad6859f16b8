"""Calibrations measure copies of sequences to host memory and back, on a machine with a clock of its own."""

import numpy as np
import pytest

from kvsim.calibration.numpy_engine import draw_trials
from kvsim.calibration.run import measure
from kvsim.calibration.trials import CELLS, Trial, medians
from kvsim.costs.cost_model import CostModel
from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample, digest, fit
from kvsim.costs.load_profile import load_profile
from kvsim.costs.pass_layout import Sample
from policies import Group, HostCopy, Transfer
from real_engine import Engine, load_model
from tests.kvsim.calibration.drifting import TRUTH, DriftingClock, DriftingSubject
from tests.paths import DATA
from workloads import named_rng

TINY = load_model("tiny").transformer
ONE_RUN = (Transfer(True, 0, 0, 700),)
BACK_IN_TEN = tuple(Transfer(False, 100 * i, 70 * i, 70) for i in range(10))


def samples(way, each, per_run, per_cell, noise=0.0):
    """Copies that cost what a formula says."""
    rng = np.random.default_rng(3)
    for cells in (16, 40, 90, 200, 500, 900, 1500, 2000):
        for runs in (1, 5):
            seconds = (each + runs * per_run + cells * per_cell) * np.exp(noise * rng.standard_normal())
            yield HostCopySample(out=way, runs=runs, cells=cells, seconds=seconds)


def fitted(copies):
    """The cost of copies in a fit of these, beside passes that say nothing."""
    engine = {"sliced": Engine(TINY, (Group(CELLS),), "sliced", seed=0)}
    trials = draw_trials(engine, 8, named_rng(1, "test"))
    alone = medians(trials, [[0.001 * (1 + i % 7)] for i in range(len(trials))])
    passes, moves, shifts = (
        [each for each in alone if isinstance(each, of)] for of in (Sample, MoveSample, ShiftSample)
    )
    return fit(passes, moves, shifts, named_rng(0, "fit"), host_copies=copies).fit.host_copies


@pytest.mark.slow
def test_a_fit_finds_the_cost_of_each_way():
    found = fitted([*samples(True, 1e-4, 2e-5, 3e-6), *samples(False, 5e-5, 0.0, 1e-6)])
    assert found.seconds(3, 700, out=True) == pytest.approx(1e-4 + 3 * 2e-5 + 700 * 3e-6)
    assert found.seconds(3, 700, out=False) == pytest.approx(5e-5 + 700 * 1e-6)
    noisy = fitted([*samples(True, 1e-4, 2e-5, 3e-6, 0.05), *samples(False, 5e-5, 0.0, 1e-6, 0.05)])
    assert noisy.out_per_cell_s.low <= 3e-6 <= noisy.out_per_cell_s.high
    assert noisy.in_per_cell_s.value == pytest.approx(1e-6, rel=0.1)


@pytest.mark.slow
def test_without_copies_of_both_ways_there_is_no_cost():
    assert fitted([]) is None
    assert fitted([*samples(True, 1e-4, 2e-5, 3e-6)]) is None


def test_runs_that_were_not_told_apart_cost_nothing():
    """llama.cpp is measured with sequences in one run."""
    found = fitted([s for way in (True, False) for s in samples(way, 1e-4, 0.0, 3e-6) if s.runs == 1])
    assert (found.out_per_run_s.value, found.in_per_run_s.value) == (0, 0)
    assert found.out_per_copy_s.value == pytest.approx(1e-4)


@pytest.mark.slow
def test_a_calibration_finds_what_copies_cost():
    """On a machine whose pace drifts: within a tenth, both ways, in one run and in many."""
    clock = DriftingClock(noise=0.01)
    found = measure(DriftingSubject(clock), seconds=20, clock=clock).profile
    for transfers in (ONE_RUN, BACK_IN_TEN):
        truth = CostModel(TRUTH, cell_bytes=0.0).host_copies(HostCopy(transfers))
        assert CostModel(found, cell_bytes=0.0).host_copies(HostCopy(transfers)) == pytest.approx(truth, rel=0.1)


def test_the_engine_is_timed_with_sequences_of_all_sizes():
    engine = Engine(TINY, (Group(CELLS),), "sliced", seed=0)
    trials = draw_trials({"sliced": engine}, 8, named_rng(0, "test"))
    copies = [trial for trial in trials if isinstance(trial.sample, HostCopySample)]
    works = [trial.sample for trial in copies]
    assert sum(work.out for work in works) == sum(not work.out for work in works) >= 8
    assert min(work.cells for work in works) < 100 < 1000 < max(work.cells for work in works)
    assert 1 in {work.runs for work in works} != {1}
    largest = max(copies, key=lambda trial: trial.sample.cells)
    assert all(seconds > 0 for seconds in largest.measure())
    assert engine.host_keys[0].arrays[0].shape[1] >= largest.sample.cells


def test_medians_go_to_their_samples():
    shift, copy = ShiftSample(cells=8, seconds=0.0), HostCopySample(out=True, runs=2, cells=30, seconds=0.0)
    trials = [Trial(what, lambda: 1.0) for what in (shift, copy, copy)]
    found = medians(trials, [[5.0], [1.0, 2.0, 9.0], []])
    assert found == [
        ShiftSample(cells=8, seconds=5.0),
        HostCopySample(out=True, runs=2, cells=30, seconds=2.0),
    ]
    assert [trial.tokens for trial in trials] == [1, 1, 1]
    assert digest(found[:1], found[1:]) != digest(found[:1])


def test_profiles_of_before_still_load(tmp_path):
    """They have no cost of copies; one that has it is read as it was written."""
    old = load_profile(str(DATA / "profile-without-pace.json"))
    assert old.host_copies is None
    cost = fitted([*samples(True, 1e-4, 2e-5, 3e-6), *samples(False, 5e-5, 0.0, 1e-6)])
    old.model_copy(update={"host_copies": cost}).save(tmp_path / "new.json")
    assert load_profile(str(tmp_path / "new.json")).host_copies == cost
