"""Parts of an engine's memory: measurements add up, and each remedy reduces what it should."""

import dataclasses
import json
import sys
from itertools import pairwise

import pytest

import kvsim
from kvsim.advice.memory.set_ups import REMEDIES
from kvsim.model.engine_shapes import SHAPES
from real_engine import Transformer, footprint
from real_engine.footprint import SetUp, activations, measure
from tests.gguf_files import SMOLLM2_MISSING, Small
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

MB = 1_000_000
SLACK = 3 * MB
"""Memory that Python and the C library may retain between two stages."""
REPORTED = ("small-pages", "merged-buffers", "growing-cache", "once", "f16", "int8")
PARTS = ("weights", "cache", "work")
QUICK = ("memory", "--model", "tiny", "--context", "64", "--tokens", "16", "--slots", "2")


@pytest.fixture(scope="module")
def report():
    return kvsim.memory("tiny", REPORTED)


@pytest.fixture(scope="module")
def steps(report):
    """The measured parts before and after each remedy."""
    measured = [f.measured for f in report.footprints.values()]
    return dict(zip(REPORTED, pairwise(measured), strict=True))


@pytest.mark.slow
def test_parts_add_up(report):
    for f in report.footprints.values():
        assert [reading.stage for reading in f.readings] == ["runtime", "weights", "buffers", "cache", "run"]
        assert f.runtime + f.measured.total == f.resident == f.readings[-1].peak
        assert f.peak >= f.resident
        for reading in f.readings:
            assert 0 < reading.anonymous < reading.resident <= reading.peak
            assert reading.model_file == 0


@pytest.mark.slow
def test_the_naive_set_up_holds_all_arrays(report):
    """All of their memory is resident, since all of it was written to."""
    naive = report.footprints["naive"]
    for part in PARTS:
        asked = getattr(naive.arrays, part)
        assert asked >= 2 * getattr(naive.needed, part)
        assert asked - 0.1 * MB <= getattr(naive.measured, part) <= asked + naive.needed.work + SLACK
    shape = SHAPES["tiny"]
    assert naive.arrays.cache == 4 * 2048 * shape.cell_bytes()
    assert naive.arrays.weights == 2 * naive.needed.weights
    assert naive.needed.cache == 4 * 256 * shape.cell_bytes()


@pytest.mark.slow
def test_the_runtime_is_the_same_for_all(report):
    runtimes = [f.runtime for f in report.footprints.values()]
    assert max(runtimes) - min(runtimes) < SLACK
    assert 20 * MB < min(runtimes) < 100 * MB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remedy", "part", "saves"),
    [
        ("merged-buffers", "work", lambda before, after: before.arrays.work),
        ("growing-cache", "cache", lambda before, after: before.arrays.cache - before.needed.cache),
        ("once", "weights", lambda before, after: before.needed.weights),
        ("f16", "weights", lambda before, after: before.needed.weights - after.needed.weights),
        ("int8", "weights", lambda before, after: before.needed.weights - after.needed.weights),
    ],
)
def test_a_remedy_lowers_what_it_should_and_nothing_grows(report, steps, remedy, part, saves):
    before, after = steps[remedy]
    names = list(report.footprints)
    at = names.index(f"+ {remedy}")
    expected = saves(*(report.footprints[name] for name in names[at - 1 : at + 1]))
    assert expected > 3 * MB
    assert abs(getattr(before, part) - getattr(after, part) - expected) < SLACK
    for other in PARTS:
        assert getattr(after, other) <= getattr(before, other) + SLACK


@pytest.mark.slow
def test_all_remedies_together_leave_little_more_than_the_need(report):
    last = list(report.footprints.values())[-1]
    assert last.needed.total <= last.measured.total <= last.needed.total + 2 * SLACK
    assert last.ratio < 0.5 * report.footprints["naive"].ratio
    assert last.ratio_with_runtime == pytest.approx(last.ratio + last.runtime / last.needed.total)


@pytest.mark.slow
def test_huge_pages_are_what_keeps_a_growing_cache_large():
    """Control: huge pages, if Linux offers them, are why ``small-pages`` is a remedy."""
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        if "[never]" in file.read():
            pytest.skip("no huge pages here")
    small, huge = (measure(SetUp("tiny", cache="growing", slots=8, huge_pages=asked)) for asked in (False, True))
    assert huge.arrays == small.arrays
    assert huge.measured.cache > 2 * small.measured.cache


@pytest.mark.slow
def test_measurements_compute_the_same_every_time():
    setup = SetUp("tiny", cache="paged", slots=2, context=64, tokens=32, type_k="q8_0", type_v="f16")
    one, two = measure(setup), measure(setup)
    assert (one.needed, one.arrays, one.generated) == (two.needed, two.arrays, two.generated)


@pytest.mark.slow
def test_set_ups_with_the_same_weights_generate_the_same(report):
    outputs = [f.generated for f in report.footprints.values()]
    assert all(len(slot) == footprint.DECODES + 1 for slot in outputs[0])
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3] == outputs[4]


@pytest.mark.slow
def test_caches_hold_every_number_of_tokens():
    """Doubling a growing buffer needs further cells; all three forms generate the same."""
    model = Transformer.random(footprint._MINIATURE, seed=1)
    for slots in (1, 2, 3, 5, 8):
        for context, tokens in ((2, 2), (20, 17), (36, 36), (64, 40), (70, 66), (128, 128)):
            outputs = set()
            for cache in footprint._POLICIES:
                setup = SetUp("tiny", cache=cache, slots=slots, context=context, tokens=tokens, n_ubatch=7)
                policy, engine = footprint._engine(setup, model)
                outputs.add(footprint._serve(setup, policy, engine))
                assert policy.usage().stored == slots * tokens
            assert len(outputs) == 1


def test_activations_by_hand():
    shape = dataclasses.replace(SHAPES["tiny"], d_model=8, n_heads=2, n_kv_heads=1, d_head=4, d_ff=16, vocabulary=100)
    residual, qkv, attended, ffn, scores = 2 * 8, 8 + 4 + 4, 8, 3 * 16, 2 * 10
    assert activations(shape, 3, 1, 10) == 4 * (3 * (residual + qkv + attended + ffn + scores) + 100)


def test_remedies_apply_in_their_order_each_once(monkeypatch):
    monkeypatch.setattr(sys.modules["kvsim.advice.memory.set_ups"], "measure", lambda setup: setup)
    chosen = ["int8", "paged-cache", "int8", "growing-cache", "f16"]
    report = kvsim.memory("tiny", chosen, slots=1, context=32, tokens=16)
    setups = report.setups
    assert setups == report.footprints
    assert list(setups) == ["naive", "+ int8", "+ paged-cache", "+ growing-cache", "+ f16"]
    assert [s.weights for s in setups.values()] == ["f32", "int8", "int8", "int8", "f16"]
    assert [s.cache for s in setups.values()] == ["reserved", "reserved", "paged", "growing", "growing"]
    assert all(s.twice and s.huge_pages and s.buffers == "repeated" for s in setups.values())


@pytest.mark.slow
def test_no_remedies_is_the_naive_set_up_alone():
    assert list(kvsim.memory("tiny", [], slots=1, context=8, tokens=2).footprints) == ["naive"]


@pytest.mark.slow
def test_a_mapped_file(tmp_path):
    path = Small(seed=3).write(tmp_path / "a model.gguf")
    report = kvsim.memory(str(path), ["once", "mapped"], slots=2, context=64, tokens=16)
    once, mapped = (report.footprints[name] for name in ("+ once", "+ mapped"))
    assert once.readings[-1].model_file == 0
    assert 0 < mapped.readings[-1].model_file <= path.stat().st_size + 2**16
    assert mapped.generated == once.generated


@pytest.mark.slow
@pytest.mark.skipif(bool(SMOLLM2_MISSING), reason=SMOLLM2_MISSING)
def test_a_real_model_is_within_a_tenth_of_its_need():
    f = measure(SetUp("smollm2", weights="mapped", slots=1, tokens=2))
    assert f.ratio < 1.08
    assert f.readings[-1].model_file >= f.needed.weights
    # How much of the file is mapped at once is the kernel's affair; none of it may be copied into memory of our own.
    runtime, loaded, *_ = f.readings
    assert loaded.anonymous - runtime.anonymous < 0.2 * f.needed.weights


@pytest.mark.slow
def test_the_command_prints_one_object():
    ended = command(*QUICK, "--remedy", "merged-buffers", "--cache-type-k", "q8_0", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = json.loads(ended.stdout)
    assert printed["model"] == "tiny"
    assert [one["name"] for one in printed["setups"]] == ["naive", "+ merged-buffers"]
    for one in printed["setups"]:
        keys = ["name", "setup", "measured", "needed", "arrays", "resident", "peak"]
        assert list(one) == [*keys, "ratio", "ratio_with_runtime", "stages"]
        assert list(one["measured"]) == [*PARTS, "runtime"]
        assert list(one["needed"]) == list(one["arrays"]) == [*PARTS]
        assert sum(one["measured"].values()) == one["resident"]
        assert one["setup"]["type_k"] == "q8_0"
        assert len(one["stages"]) == 5


@pytest.mark.slow
def test_the_command_saves_tables_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command(*QUICK, "--remedy", "once", "--out", "here")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "+ once" in ended.stdout
    assert "Saved memory.csv, memory-stages.csv, memory.png in here/memory-tiny/" in ended.stdout
    assert {file.name for file in (tmp_path / "here/memory-tiny").iterdir()} == {
        "memory.csv",
        "memory-stages.csv",
        "memory.png",
    }


@pytest.mark.slow
def test_the_table_and_the_picture(report):
    table = report.table
    assert list(table.index) == ["naive", *(f"+ {name}" for name in REPORTED)]
    assert (table[["weights", "cache", "work", "runtime"]].sum(axis=1) == table["resident"]).all()
    assert (table[["needed_weights", "needed_cache", "needed_work"]].sum(axis=1) == table["needed"]).all()
    (axis,) = report.plot().axes
    heights = [bar.get_y() + bar.get_height() for bar in axis.containers[-1]]
    assert heights == pytest.approx([size / MB for size in table["resident"]])
    assert len(report.stages) == 5 * len(table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remedy", "magic"], f"no remedy called 'magic'; there are {', '.join(REMEDIES)}"),
        (["--remedy", "mapped"], "remedy mapped: the weights of tiny are random, not read from a file"),
        (["--slots", "0"], "slots is 0; a whole number from 1 to 1048576 is accepted"),
        (["--ubatch", "-1"], "n_ubatch is -1; a whole number from 1"),
        (["--context", "1"], "context is 1; a whole number from 2"),
        (["--tokens", "65"], "65 tokens in each slot; from 2 to its context, 64, are accepted"),
        (["--cache-type-k", "f8"], "--cache-type-k: no type called 'f8'"),
        (["--model", "huge"], "no model called 'huge'; there are tiny, small"),
        (["--model", "none.gguf"], "none.gguf: cannot be read"),
        (["--slots", "1000000", "--context", "1000000"], "try fewer slots, a smaller context or a smaller model"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(command(*QUICK, *arguments))
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_reported_before_any_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kvsim.advice.memory.set_ups"], "measure", None)
    (tmp_path / "file").write_text("")
    assert "cannot write results" in complaint(command(*QUICK, "--out", str(tmp_path / "file")))


def test_unknown_types_are_refused_in_python_too():
    with pytest.raises(kvsim.UserError, match="type_v: no type called 'f8'; there are f32, f16, q8_0, q4_0"):
        kvsim.memory("tiny", type_v="f8")


@pytest.mark.slow
def test_errors_of_the_measured_process_are_reported(tmp_path):
    path = Small(d_head=16).write(tmp_path / "narrow.gguf")
    with pytest.raises(kvsim.UserError, match="cannot be cut into blocks of 32"):
        kvsim.memory(str(path), [], slots=1, context=8, tokens=4, type_k="q4_0")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "it was ended by signal 9, as Linux does when memory runs out"),
        ("echo first >&2; echo then this >&2; exit 1", "failed: then this"),
        ("echo half an answ", "failed: it said nothing"),
    ],
)
def test_a_measured_process_that_fails(script, message, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat >/dev/null\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(kvsim.UserError, match=message) as refused:
        measure(SetUp("tiny"))
    assert "\n" not in str(refused.value)


def test_systems_without_proc_are_reported(monkeypatch):
    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(footprint, "open", absent, raising=False)
    with pytest.raises(kvsim.UserError, match="memory is read from /proc, which this system does not have; Linux does"):
        measure(SetUp("tiny"))
