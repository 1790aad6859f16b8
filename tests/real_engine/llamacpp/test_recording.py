"""``kvsim record`` writes what ``kvsim conform`` reads, and every record agrees."""

import json

import pytest

from real_engine.llama_library import Context
from real_engine.llamacpp import POLICIES
from tests.real_engine.llamacpp.conftest import FOLDER
from tests.worlds import command

pytestmark = pytest.mark.llama

SCENARIO = """
[workload]
rate = 20.0
requests = {requests}
prompt_tokens = {{ kind = "lognormal", mu = 3.5, sigma = 0.9, min = 4, max = 200 }}
output_tokens = {{ kind = "lognormal", mu = 3.0, sigma = 0.8, min = 1, max = 60 }}

[server]
slots = {slots}
slot_context = 256
{server}

[cache]
cells = {cells}
{cache}
"""


@pytest.fixture
def record(library, tiny, tmp_path):
    """Writes a scenario and records it; returns the finished process and the output path."""

    def run(*options, requests=20, slots=4, cells=1024, server="", cache="", model=tiny, engine="llamacpp"):
        keys = {"requests": requests, "slots": slots, "cells": cells, "server": server, "cache": cache}
        path, out = tmp_path / "mine.toml", tmp_path / "there" / "mine.jsonl.gz"
        path.write_text(SCENARIO.format(**keys))
        where = () if FOLDER is None else ("--library", str(FOLDER))
        finished = command("record", engine, str(path), "--model", str(model), "--out", str(out), *where, *options)
        return finished, out

    return run


def worlds(era):
    """Pairs of a policy of an era and scenario settings."""
    yield POLICIES[era][0], {}
    yield POLICIES[era][0], {"slots": 12, "cells": 512, "server": "context_shift = true", "cache": 'kernel = "tiled"'}
    if era == "B":
        yield "streams", {"cache": "unified = false", "requests": 30}


@pytest.mark.slow
def test_what_is_recorded_agrees_in_every_record(record, library):
    for policy, keys in worlds(library.era):
        finished, out = record("--policy", policy, "--json", **keys)
        assert (finished.returncode, finished.stderr) == (0, "")
        saved = json.loads(finished.stdout)
        assert saved["file"] == str(out)
        assert (saved["engine"], saved["policy"], saved["divergence"]) == (library.name, policy, None)
        assert saved["seen"] > 100
        read = command("conform", "llamacpp", str(out), "--json")
        assert read.returncode == 0, read.stdout
        found = json.loads(read.stdout)
        assert found["agree"] is True
        (file,) = found["files"]
        assert (file["file"], file["era"]) == (out.name, library.era)
        assert saved["seen"] <= file["agree"] == file["total"] <= saved["records"]


def test_the_output_says_how_to_replay_the_recording(record, library):
    finished, out = record(requests=3)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith(f"Saved {out}: ")
    assert finished.stdout.splitlines()[1].endswith(f"kvsim conform llamacpp {out}")
    assert library.name in finished.stdout


@pytest.mark.slow
def test_requests_and_seed_can_be_changed(record):
    ends = [record("--json", *options)[0] for options in (("--requests", "2"), (), ("--seed", "5"))]
    counts = [json.loads(finished.stdout)["records"] for finished in ends]
    assert counts[0] < counts[1] != counts[2]


def test_the_builtin_tiny_model_is_replaced_by_smollm2_unless_asked_for(record, tmp_path):
    finished, out = record(model="tiny")
    assert finished.returncode == 2
    assert finished.stderr.strip().endswith("model tiny: llama.cpp needs a GGUF file (FILE.gguf, or smollm2)")
    assert not out.parent.exists()


REFUSED = {
    "an engine": ({"engine": "vllm"}, (), "no recordable engine called 'vllm'; there are llamacpp, router"),
    "a policy that does not describe it": ({}, ("--policy", "paged"), "llama.cpp hands out its cells itself"),
    "a policy of no era": ({}, ("--policy", "nothing"), "no policy called 'nothing'"),
    "cells": ({"cells": 1000, "server": 'scheduler = "static"'}, (), "it makes multiples of"),
    "V": ({"cache": 'kernel = "masked"\ntype_v = "q8_0"'}, (), "V in q8_0 needs flash attention"),
    "a model that is not there": ({"model": "nowhere.gguf"}, (), "nowhere.gguf"),
    "a kernel": ({"cache": 'kernel = "gather"'}, (), "llama.cpp has no kernel 'gather'"),
}


@pytest.mark.parametrize(("keys", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_refused_in_one_line(record, keys, options, why):
    finished, out = record(*options, **keys)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert why in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert not out.parent.exists()


def test_a_policy_of_another_era_is_refused_in_one_line(record, library):
    other = POLICIES["B" if library.era == "A" else "A"][0]
    finished, out = record("--policy", other)
    assert finished.returncode == 2
    assert finished.stderr.strip().endswith(
        f"this version does it as {' or '.join(POLICIES[library.era])}, not as {other}"
    )
    assert len(finished.stderr.splitlines()) == 1
    assert not out.parent.exists()


def test_a_window_needs_a_model_that_has_one(record, only):
    only("B")
    finished, _ = record("--policy", "sliding-window")
    assert finished.returncode == 2
    assert "llama.cpp makes caches of 256 cells, policy sliding-window of 256 and 256" in finished.stderr


def test_an_unwritable_file_is_named_and_nothing_is_left_behind(record, tmp_path):
    (tmp_path / "there" / "mine.jsonl.gz").mkdir(parents=True)
    finished, out = record(requests=2)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"{out}: cannot write" in finished.stderr
    assert list(out.parent.iterdir()) == [out]


def test_a_divergent_run_is_recorded_and_detected(record, monkeypatch):
    """The control: one removal is skipped in llama.cpp, so that its cells differ from the operations."""
    calls, remove = [], Context.remove

    def forgetful(self, *arguments):
        calls.append(arguments)
        return len(calls) == 5 or remove(self, *arguments)

    monkeypatch.setattr(Context, "remove", forgetful)
    ended, out = record("--json", requests=40)
    assert ended.returncode == 0
    read = command("conform", "llamacpp", str(out), "--json")
    assert read.returncode == 1
    assert json.loads(read.stdout)["agree"] is False
