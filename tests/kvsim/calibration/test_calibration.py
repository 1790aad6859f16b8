"""Calibrations of the engine: trials, samples, journals, and refusals of bad profiles."""

import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import kvsim
from kvsim.calibration.journal import Journal
from kvsim.calibration.numpy_engine import POLICIES, draw_trials, random_pass, serve, traffic, whole_pass
from kvsim.calibration.pace import Tick
from kvsim.calibration.pieces import MeasuredPiece, PieceRecorder, TrialMeasurement
from kvsim.calibration.reference_passes import PaceKeeper, ReferencePasses
from kvsim.calibration.run import JournalHeader, measure
from kvsim.calibration.serving import USERS, SamplingBackend
from kvsim.calibration.trials import Trial, half_width
from kvsim.costs.fitting import ShiftSample
from kvsim.costs.pass_layout import Sample
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.set_up import build_policy
from policies import Group, Moves
from real_engine import Engine, load_model
from tests.worlds import command
from workloads import named_rng

TINY = load_model("tiny").transformer


def undisturbed():
    """However busy the machine is."""
    return 0.0, 0.0


NO_REFERENCE = ReferencePasses(lambda: 1.0, lambda: 2.0)
KERNELS = ("masked", "tiled", "gather", "sliced")


def engine(kernel="sliced"):
    return Engine(TINY, (Group(4096),), kernel, seed=0)


HEADER = JournalHeader(
    model="tiny", type_k="f32", type_v="f32", each=24, runs=1, trials=2, processor="p", blas="b", numpy="2"
)


def a_piece(seconds=1.0):
    trials = (TrialMeasurement(0, 0.5, seconds), TrialMeasurement(1, 2.5, 2.0))
    return MeasuredPiece(
        items=2, trials=trials, mixed=(), ticks=(Tick(0.1, (0.5, 0.7)),), disturbed=0, wall_s=3.0, cpu_s=2.9
    )


def journal_at(path):
    return Journal(path, JournalHeader, MeasuredPiece)


def test_a_journal_gives_back_what_was_written(tmp_path):
    journal = journal_at(tmp_path / "new folder" / "j.part")
    assert journal.header() is None
    journal.begin(HEADER)
    journal.add(a_piece(1.0))
    journal.add(a_piece(1.5))
    again = journal_at(tmp_path / "new folder" / "j.part")
    assert again.header() == HEADER
    assert [each.trials[0].seconds for each in again.entries()] == [1.0, 1.5]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_an_incomplete_last_line_is_ignored(tmp_path, cut):
    path = tmp_path / "j.part"
    journal = journal_at(path)
    journal.begin(HEADER)
    journal.add(a_piece(1.0))
    journal.add(a_piece(1.5))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [each.trials[0].seconds for each in journal.entries()] == [1.0]
    journal.add(a_piece(2.0))
    assert [each.trials[0].seconds for each in journal.entries()] == [1.0, 2.0]


def test_a_file_that_is_not_a_journal_has_no_header(tmp_path):
    path = tmp_path / "j.part"
    path.write_text("hello\nworld\n")
    assert journal_at(path).header() is None
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="delete it to begin anew"):
        journal_at(path).header()


@contextmanager
def on_own_time():
    """Seconds are this process's own, so that a busy machine has as many passes in them as an idle one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", time.process_time)
        patch.setitem(measure.__kwdefaults__, "clock", time.process_time)
        yield


@pytest.fixture
def small_rounds(monkeypatch):
    monkeypatch.setattr("kvsim.calibration.subject._EACH", (8, 8))


@pytest.mark.slow
def test_an_interrupted_calibration_resumes(tmp_path, small_rounds):
    path = tmp_path / "tiny.part"
    first, again = (kvsim.calibrate("tiny", seconds=1, journal=path) for _ in range(2))
    assert first.resumed == 0 < again.resumed


@pytest.fixture(scope="module")
def calibrated():
    with on_own_time():
        return kvsim.calibrate("tiny", seconds=3)


@pytest.mark.slow
def test_calibration_measures_this_machine(calibrated):
    profile = calibrated.profile
    # On a busy machine, and in so short a time, either may be fitted as nothing.
    assert all(a.base_s.value + a.per_cell_s.value > 0 for a in profile.kernels.values())
    assert set(profile.kernels) == set(KERNELS)
    assert profile.moves.per_run_s.value + profile.moves.per_cell_s.value > 0
    assert profile.held_out_error_median > 0
    assert profile.machine.processor
    assert all(seconds > 0 for seconds in profile.reference_passes_s)


@pytest.mark.slow
def test_the_plot_shows_the_held_out_passes(calibrated):
    against, errors = calibrated.plot().axes
    dots = sum(len(collection.get_offsets()) for collection in against.collections[1:])
    assert dots == len(calibrated.held_out) == calibrated.profile.held_out_samples
    assert [label.get_text() for label in errors.get_yticklabels()] == sorted(KERNELS)


@pytest.mark.slow
def test_bad_predictions_and_busy_machines_are_refused(calibrated):
    quiet = pretend(calibrated, left_out=0.01)
    assert quiet.refusal(bound=0.06) is None
    assert "over the bound of 0.1%" in quiet.refusal(bound=0.001)
    assert "the machine is busy: other work disturbed 60% of" in pretend(calibrated, left_out=0.6).refusal(0.06)


def pretend(calibration, left_out):
    """The calibration with a share of disturbed measurements and an error of 5 %, however busy the machine was."""
    return replace(
        calibration, left_out=left_out, profile=calibration.profile.model_copy(update={"held_out_error_median": 0.05})
    )


def test_an_unwritable_folder_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    refused = command("calibrate", "--seconds", "3000", "--out", "file/p.json")
    assert refused.returncode == 2
    assert "cannot write" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_passes_of_a_server_are_sampled_except_the_first(kernel):
    scenario = traffic("tiny", "f32", "f32", 2, named_rng(1, "test"))
    real = engine(kernel)
    passes = []
    forward = real.forward

    def counted(batch):
        passes.append(batch)
        return forward(batch)

    real.forward = counted
    recorder = PieceRecorder(PaceKeeper(NO_REFERENCE, every_s=1e6, spent=undisturbed))
    recorder.keeper.tick()
    serve(real, scenario, 5, recorder)
    samples = [served.sample for served in recorder.piece(1.0, 1.0).mixed]
    assert build_policy(scenario, POLICIES[kernel]).kernel == kernel
    assert len(samples) == len(passes) - 8
    assert [s.tokens for s in samples] == [b.n_tokens for b in passes[8:]]
    assert {s.origin for s in samples} == {5}
    assert all(s.mixed and s.seconds > 0 and s.kernel == kernel for s in samples)
    assert max(s.chunks for s in samples) == USERS[2]


def test_passes_with_copies_are_not_sampled():
    real = engine()
    real.tokens = {0: [7] * 200}
    recorder = PieceRecorder(PaceKeeper(NO_REFERENCE, every_s=1e6, spent=undisturbed))
    sampling = SamplingBackend(real, recorder, "sliced", real.groups[0], 0)
    batch = whole_pass(1, 100, prompt=False)
    for _ in range(10):
        sampling.step((), [batch])
    place = batch.places[0]._replace(moves=Moves.from_runs([(200, 300, 4)]))
    sampling.step((), [batch._replace(places=(place,))])
    assert len(recorder.piece(1.0, 1.0).mixed) == 2


def test_passes_right_after_reference_passes_are_not_sampled():
    real = engine()
    real.tokens = {0: [7] * 200}
    recorder = PieceRecorder(PaceKeeper(NO_REFERENCE, every_s=0.0, clock=lambda: 0.0, spent=undisturbed))
    sampling = SamplingBackend(real, recorder, "sliced", real.groups[0], 0)
    for _ in range(20):
        sampling.step((), [whole_pass(1, 100, prompt=False)])
    assert len(recorder.keeper.ticks) == 20
    assert not recorder.piece(1.0, 1.0).mixed


def test_equal_generators_draw_equal_trials():
    drawn = [draw_trials({"sliced": engine()}, 10, named_rng(3, "test")) for _ in range(2)]
    tokens = [[trial.tokens for trial in trials] for trials in drawn]
    assert tokens[0] == tokens[1]
    assert sum(isinstance(trial.sample, Sample) for trial in drawn[0]) == 10 < len(drawn[0])


@pytest.mark.parametrize("decodes", [1, 5])
def test_a_random_pass_of_decodes_alone(decodes):
    batch = random_pass("sliced", named_rng(3, "test"), [1] * decodes)
    assert [chunk.n for chunk in batch.chunks] == [1] * decodes


def test_decodes_are_warmed_up_and_prompts_follow_a_decode():
    runs = []

    def run(name, seconds):
        runs.append(name)
        return seconds

    shift = ShiftSample(cells=1, seconds=0.0)
    assert Trial(shift, lambda: run("decode", 1e-3)).measure() == (1e-3, 1e-3)
    assert len(runs) == 6, "four milliseconds of warm-up"
    runs.clear()
    prompt = Trial(shift, lambda: run("prompt", 2.0), before=lambda: run("decode", 1.0))
    assert (prompt.measure(), runs) == ((2.0,), ["decode", "prompt"])


def test_large_passes_are_drawn_with_exactly_the_usual_batches():
    trials = draw_trials({"sliced": engine()}, 96, named_rng(3, "test"))
    sizes = [trial.tokens for trial in trials]
    assert sizes[:2] == [512, 2048]
    assert sum(n > 256 for n in sizes) < 12, "few, as they take long"


def test_the_interval_of_a_median_narrows():
    rng = np.random.default_rng(1)
    few, many = (half_width((1 + 0.05 * rng.standard_normal(n)).tolist()) for n in (10, 1000))
    assert 0.005 < few < 0.08
    assert many == pytest.approx(1.96 * 1.2533 * 0.05 / 1000**0.5, rel=0.15)


def test_traffic_cycles_through_users_and_repeats_with_the_generator():
    users = [traffic("tiny", "f32", "f32", turn, named_rng(1, "test")).workload.users for turn in range(9)]
    assert users == [*USERS, USERS[0]]
    one, two = (traffic("tiny", "q8_0", "f16", 3, named_rng(1, "test")) for _ in range(2))
    assert one == two == load_scenario(one)
    assert (one.cache.type_k, one.cache.type_v) == ("q8_0", "f16")
