"""Calibration and validation on the real llama.cpp: trials, profiles, and the engines that they apply to."""

import json

import numpy as np
import pytest

import kvsim
from kvsim.calibration.llamacpp import LlamaSubject
from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import PaceKeeper
from kvsim.calibration.trials import CELLS
from kvsim.costs.fitting import ShiftSample
from kvsim.costs.pass_layout import Sample
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from policies import Chunk
from tests.real_engine.llamacpp.conftest import FOLDER
from tests.worlds import command
from workloads import named_rng

pytestmark = pytest.mark.llama


@pytest.fixture(scope="module")
def subject(library, tiny):
    return LlamaSubject(str(tiny), library=FOLDER)


@pytest.fixture(scope="module")
def calibrated(library, tiny):
    return kvsim.calibrate(str(tiny), engine="llamacpp", library=FOLDER, seconds=2, name="mine")


def test_a_pass_reads_the_cells_of_its_micro_batch(subject):
    """The micro-batch attends to the cells that llama.cpp rounds up to; its tokens follow the filled cells."""
    for kernel, prefilled in subject._prefilled.items():
        for lengths, filled in (([1], 32), ([1, 1, 30], 700), ([200], 3520)):
            prefilled.set_filled(filled)
            batch = prefilled.pass_of(lengths, filled)
            assert [chunk.n for chunk in batch.chunks] == lengths
            assert batch.places[0].cells.tolist() == list(range(filled, filled + sum(lengths)))
            if kernel == "masked":
                assert batch.reads.span >= filled + sum(lengths)
                assert batch.reads.span - filled - sum(lengths) < 256
            assert prefilled.timed(lengths, filled)() > 0
            if prefilled.context.era == "A":
                (cells,) = prefilled.context.cells()
                assert cells.used == filled, "the pass left no cells behind"


def test_equal_generators_draw_equal_trials(subject):
    drawn = [subject.draw(8, named_rng(3, "test")) for _ in range(2)]
    first, second = ([trial.sample for trial in trials] for trials in drawn)
    assert first == second
    assert sum(isinstance(each, Sample) for each in first) == 8 * len(subject._prefilled)
    assert {each.cells for each in first if isinstance(each, ShiftSample)} == {512, 1024, 2048, CELLS}


def test_a_defragmentation_moves_what_the_policy_would(subject, only):
    only("A")
    prefilled = next(iter(subject._prefilled.values()))
    rng = named_rng(5, "test")
    for _ in range(6):
        trial = prefilled.defragmentation(2, rng)
        prefilled._filled = 0
        prefilled.set_filled(3520)
        (before,) = prefilled.context.cells()
        assert before.used == 3520
        trial.measure()
        (after,) = prefilled.context.cells()
        assert after.used == 3520 - trial.sample.cells
        assert int(np.flatnonzero(after.position >= 0)[-1]) + 1 == after.used, "no hole is left"


def served(subject, kind, turn, origin):
    """The samples of a server run."""
    recorder = PieceRecorder(PaceKeeper(subject.reference_passes, spent=lambda: (0.0, 0.0)))
    subject.serve(kind, turn, origin, named_rng(turn, "test"), recorder)
    return [each.sample for each in recorder.piece(1.0, 1.0).mixed]


def test_the_largest_batch_is_measured_exactly(subject):
    trials = subject.draw(8, named_rng(3, "test"))
    assert max(trial.tokens for trial in trials) == 512


def test_cells_are_filled_with_copies_as_if_they_were_computed(subject, only):
    only("A")  # Today's version does not show its cells here.
    for prefilled in subject._prefilled.values():
        prefilled.set_filled(3520)
        (cells,) = prefilled.context.cells()
        assert cells.position[:3520].tolist() == list(range(3520))
        assert set(cells.owner[:3520].tolist()) == {0}


def test_a_server_run_is_sampled_step_by_step(subject):
    samples = served(subject, 0, 3, 11)
    assert samples
    assert {sample.origin for sample in samples} == {11}
    assert all(sample.mixed and sample.seconds > 0 for sample in samples)


def test_streams_are_sampled_with_all_passes_of_a_step(subject, only):
    only("B")
    kinds = [kind for kind in range(subject.kinds) if subject._served[kind] == ("masked", "streams")]
    samples = [s for turn in (3, 4) for s in served(subject, kinds[0], turn, 12)]
    assert any(sample.further for sample in samples)
    assert all(tokens == 1 or cells >= 256 for s in samples for tokens, cells in s.scans)


@pytest.mark.slow
def test_a_profile_names_its_engine_and_what_it_can_price(calibrated, library):
    profile = calibrated.profile
    assert profile.engine == library.name
    assert set(profile.kernels) == {"masked", "tiled"}
    assert (profile.kernels["tiled"].skips, profile.kernels["masked"].skips, profile.shifts_all) == (True, False, True)
    assert (profile.moves is None) == (library.era == "B")
    assert profile.shift_per_cell_s.value > 0
    assert profile.machine.threads == 1
    assert 0 < profile.held_out_error_median < 1
    assert library.name in profile.describe()


@pytest.mark.slow
def test_quantised_values_are_measured_with_flash_attention_only(library, tiny):
    small = LlamaSubject(str(tiny), "q8_0", "q4_0", library=FOLDER)
    assert list(small._prefilled) == ["tiled"]
    batch = small._prefilled["tiled"].pass_of([1], 100)
    assert batch.chunks == (Chunk(1, 100, 1),)
    assert small._prefilled["tiled"].timed([1], 100)() > 0


@pytest.fixture
def world(tiny, calibrated, tmp_path):
    path = tmp_path / "world.toml"
    scenario = load_scenario(
        "chat",
        model__name=str(tiny),
        cache__type_k="f16",
        cache__type_v="f16",
        workload__requests=12,
        cache__cells=4096,
    )
    path.write_text(scenario.to_toml(), encoding="utf-8")
    return path


@pytest.mark.slow
def test_predictions_follow_the_schedule_of_the_real_run(world, calibrated, library):
    validation = kvsim.validate(world, calibrated.profile, engine="llamacpp", library=FOLDER)
    wanted = {"A": ["llama.cpp-b4666"], "B": ["llama.cpp-b6975", "streams"]}[library.era]
    assert list(validation.schedules) == wanted
    assert all(n > 50 for n in validation.compared.values()), "cells were compared"
    # A tiny model's passes are as short as the clock's resolution: a factor of two is enough here.
    assert validation.worst < 2
    assert json.loads(json.dumps(validation.to_dict()))["policies"][0]["compared"] > 50


def test_a_profile_is_for_its_own_engine(world, calibrated):
    with pytest.raises(UserError, match=r"measured on our own engine, not on llama\.cpp"):
        kvsim.validate(world, kvsim.load_profile("default"), engine="llamacpp", library=FOLDER)
    with pytest.raises(UserError, match="so engine must be llamacpp"):
        kvsim.validate("chat", calibrated.profile)
    other = calibrated.profile.model_copy(update={"engine": "llama-cpp-python 9"})
    with pytest.raises(UserError, match="was measured on llama-cpp-python 9; this is"):
        kvsim.validate(world, other, engine="llamacpp", library=FOLDER)


@pytest.mark.slow
def test_a_policy_that_this_llamacpp_cannot_serve_is_left_out_or_refused(world, calibrated, only):
    only("B")
    # Three slots: no whole multiple of 256 cells for each, where they do not share one cache, and no server rounds up.
    odd = load_scenario(world, server__slots=3, cache__unified=True, server__scheduler="static")
    validation = kvsim.validate(odd, calibrated.profile, engine="llamacpp", library=FOLDER, requests=3)
    assert list(validation.schedules) == ["llama.cpp-b6975"]
    assert (
        "left out streams: chat: streams: it makes multiples of 256 cells for each of 3 streams"
        in (validation.warnings[0])
    )
    with pytest.raises(UserError, match="chat: streams: it makes multiples of 256"):
        kvsim.validate(odd, calibrated.profile, "streams", engine="llamacpp", library=FOLDER)
    with pytest.raises(UserError, match=r"paged: llama\.cpp hands out its cells itself"):
        kvsim.validate(odd, calibrated.profile, ["llama.cpp-b6975", "paged"], engine="llamacpp", library=FOLDER)


@pytest.mark.slow
def test_a_batch_has_no_more_tokens_than_the_cache_has_cells(world, calibrated):
    """As in llama-server; more would abort the process."""
    wide = load_scenario(world, server__n_batch=8192, cache__cells=1024)
    validation = kvsim.validate(wide, calibrated.profile, engine="llamacpp", library=FOLDER, requests=8)
    assert validation.scenario.n_batch == 1024


def test_more_threads_than_cores_are_refused(world):
    with pytest.raises(UserError, match="threads: 0; from 1 to"):
        kvsim.calibrate(engine="llamacpp", threads=0, library=FOLDER)
    with pytest.raises(UserError, match="threads: 4096; from 1 to"):
        kvsim.record(world, "x.jsonl", threads=4096, library=FOLDER)


@pytest.mark.slow
def test_a_model_path_is_relative_to_the_working_directory(world, tiny, tmp_path, monkeypatch, calibrated):
    """Not to the scenario's folder; the profile names the path that was measured."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / tiny.name).write_bytes(tiny.read_bytes())
    calibrated.profile.save("mine.json")
    given = ["--engine", "llamacpp", "--profile", "mine.json", "--model", tiny.name, "--requests", "2"]
    said = command("validate", str(world), *given)
    assert said.returncode == 0, said.stderr
    assert kvsim.record(world, "a.jsonl", model=tiny.name, library=FOLDER).records > 5


@pytest.mark.slow
def test_the_command_line_does_the_same(world, calibrated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calibrated.profile.save(tmp_path / "mine.json")
    given = ["--engine", "llamacpp", "--profile", "mine.json", "--requests", "5"]
    said = command("validate", str(world), *given)
    assert said.returncode == 0, said.stderr
    assert "llama.cpp showed its cells, and they were the policy's every time" in said.stdout
    said = command("compare", str(world), "--profile", "mine.json", "--json")
    assert said.returncode == 0, said.stderr
    assert "llama.cpp-b6975" in {row["policy"] for row in json.loads(said.stdout)["policies"]}
    assert "has no kernel 'gather'" in said.stderr
