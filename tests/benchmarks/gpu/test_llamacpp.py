"""llama.cpp is timed as far as time allows, and what was timed is read. With the tools, on the processor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.llamacpp import TOOLS, Recording
from kvsim.calibration.bench_files.reading import read_bench_file
from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from tests.benchmarks.gpu.test_random_gguf import EXPERTS
from tests.paths import ROOT

NAMED = "KVSIM_LLAMA_TOOLS"
"""Environment variable with the folder in whose bin the tools are, as ``--build-in`` takes it."""


def told(*words):
    module = [sys.executable, "-m", "benchmarks.gpu.llamacpp"]
    return subprocess.run([*module, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_recording_keeps_what_each_command_said(tmp_path):
    path = tmp_path / "a.jsonl"
    Recording(path).put("llama-bench -p 1", "cut after 3 s", ['{"a": 1}'])
    Recording(path).put("llama-bench -p 2", "whole", ['{"a": 2}', '{"a": 3}'])
    again = Recording(path)
    assert [again.is_whole(f"llama-bench -p {i}") for i in (1, 2, 3)] == [False, True, False]
    again.put("llama-bench -p 1", "whole", ['{"a": 4}'])
    expected = ["# whole: llama-bench -p 1", '{"a": 4}', "# whole: llama-bench -p 2", '{"a": 2}', '{"a": 3}']
    assert path.read_text().splitlines() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--types", "q4"], "no storage type called 'q4'"),
        (["--models", "llama-8"], "no model called 'llama-8'"),
        (["--source", "nowhere"], "no source of llama.cpp in nowhere; make test-llama unpacks it there"),
    ],
)
def test_wrong_input_is_one_line(words, says, tmp_path):
    done = told("--out", str(tmp_path / "out"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_tiny_model_is_timed_on_the_processor(tmp_path):
    tools = Path(os.environ.get(NAMED, "nowhere")).resolve()
    if not all((tools / "bin" / tool).is_file() for tool in TOOLS):
        pytest.skip(f"{NAMED} names no folder with bin/{', bin/'.join(TOOLS)}")
    (tmp_path / "tiny.json").write_text(json.dumps(EXPERTS))
    words = ["--out", tmp_path / "out", "--models", tmp_path / "tiny.json", "--types", "q4_k_m", "--cpu"]
    words += ["--build-in", tools, "--prompts", "32", "--depths", "0,64", "--streams", "1,2", "--requests", "8"]
    words += ["--minutes", "4", "--threads", "1"]
    done = told(*map(str, words))
    assert done.returncode == 0, done.stderr
    assert "1 of 1 are whole" in done.stdout
    points = read_bench_file(tmp_path / "out" / "tiny-q4_k_m.jsonl")
    found = {(p.kind, p.prompt, p.new, p.depth, p.sequences, p.set_up.flash) for p in points}
    decodes = {("decode", 0, 64, depth, 1.0, flash) for depth in (0, 64) for flash in (True, False)}
    prompts = {("prompt", 32, 0, depth, 1.0, flash) for depth in (0, 64) for flash in (True, False)}
    assert decodes | prompts <= found
    assert {n for kind, _, new, _, n, _ in found if (kind, new) == ("decode", 32)} == {1, 2}
    assert {p.set_up.weights for p in points} == {"q4_k_m"}
    agreement = conform(LlamaServerReplay, tmp_path / "out" / "tiny-q4_k_m.load.jsonl.gz")
    assert agreement.first is None
    assert agreement.agree == agreement.total > 0
    assert told(*map(str, words)).stdout == f"1 of 1 are whole in {tmp_path / 'out'}\n"
