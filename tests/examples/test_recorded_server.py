"""The example that brings runs of LLMServingSim's benchmark into the format of recorded servers."""

import importlib.util
import json
import subprocess
import sys

import pytest

from kvsim.engines.recordings.recorded_server import read_recorded_server
from tests.paths import ROOT

FILE = ROOT / "examples" / "recorded-server" / "from_llmservingsim.py"
META = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {
        "tensor_parallel_size": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "max_model_len": None,
    },
    "kv_cache": {"num_gpu_blocks": 2588, "block_size": 4, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
}
FIRST = list(range(10))
TEXTS = [FIRST, [*FIRST[:6], 50, 51, 52, 53], [*FIRST[:6], 50, 51, 52], [*FIRST[:4], 90], [7, 8, 9]]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("from_llmservingsim", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    """A folder with a run of five requests, and what was asked beside it."""
    served = [
        {
            "request_id": f"bench-{i}",
            "input_toks": len(tokens),
            "output_toks": 3,
            "queued_ts": 100.0 + i,
            "scheduled_ts": 100.25 + i,
            "first_token_ts": 100.5 + i,
            "last_token_ts": 101.0 + i,
        }
        for i, tokens in enumerate(TEXTS)
    ]
    (tmp_path / "meta.json").write_text(json.dumps(META))
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, served)))
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"input_tok_ids": tokens}) for tokens in TEXTS))
    (tmp_path / "timeseries.csv").write_text("t,gen_throughput,running,waiting,kv_cache_pct\n1.0,2.0,3,2,13.2\n")
    return tmp_path


def test_a_run_becomes_a_recording(run):
    done = subprocess.run([sys.executable, FILE, run, run / "asked.jsonl"], capture_output=True, text=True, check=True)
    (run / "server.jsonl").write_text(done.stdout)
    recording = read_recorded_server(run / "server.jsonl")
    assert (recording.meta.num_gpu_blocks, recording.meta.device) == (2588, "NVIDIA GeForce RTX 4090")
    assert recording.meta.requests == 5
    second = json.loads(done.stdout.splitlines()[2])
    assert second["arrival_s"] == 1.0
    assert second["last_token_s"] == 2.0
    assert json.loads(done.stdout.splitlines()[-1]) == {"kind": "second", "t": 1.0, "running": 3, "waiting": 2}


def test_whole_blocks_that_prompts_share_are_equal_segments(example):
    assert example.prompts(TEXTS, 4) == [
        [["p0", 0, 10]],
        [["p0", 0, 4], ["p1", 4, 6]],
        [["p0", 0, 4], ["p1", 4, 4], ["p2", 8, 1]],
        [["p0", 0, 4], ["p3", 4, 1]],
        [["p4", 0, 3]],
    ]


def test_a_run_that_does_not_say_its_device_is_told(run):
    meta = {key: value for key, value in META.items() if key not in ("hardware", "kv_cache")}
    (run / "meta.json").write_text(json.dumps(meta))
    asked = [sys.executable, FILE, run, run / "asked.jsonl", "rtxpro6000"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    first = json.loads(done.stdout.splitlines()[0])
    assert (first["device"], first["num_gpu_blocks"], first["block_size"]) == ("rtxpro6000", None, 16)


def test_without_a_run_it_says_how_it_is_used():
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "python from_llmservingsim.py RUN DATASET [DEVICE] > server.jsonl" in done.stderr
