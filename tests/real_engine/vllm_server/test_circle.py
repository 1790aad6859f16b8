"""Measuring a real vLLM, recording it, and holding its times against what was predicted: every command runs through.

How close they come is not looked at: other work on the machine would decide that.
"""

import gzip
import json

import pytest

from kvsim.costs.load_profile import load_profile
from tests.real_engine.vllm_server.conftest import BLOCK_SIZE, BLOCKS, SEATS
from tests.real_engine.vllm_server.model import CONTEXT
from tests.worlds import command

pytestmark = pytest.mark.slow
FLAGS = f"--max-num-seqs {SEATS} --max-num-batched-tokens 2048 --dtype float32"
REQUESTS = 5


def said(*words):
    done = command(*map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def profile(server, tmp_path_factory):
    """The file of a profile that was measured in 20 s, or on a busy machine in several times as many."""
    file = tmp_path_factory.mktemp("profile") / "mine.profile.json"
    # Saved however large the error is, which a busy machine makes large.
    words = ("calibrate", "--url", server.address, "--flags", FLAGS, "--seconds", 20, "--out", file, "--force")
    for _ in range(8):
        done = command(*map(str, words))
        if "it goes on from" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return file


def test_calibrate_gives_a_profile_of_the_server(profile, server):
    found = load_profile(str(profile))
    assert found.engine.startswith("vllm ")
    assert found.model == f"{server.model}/config.json"
    assert (found.type_k, found.type_v) == ("f32", "f32")
    assert found.samples > 10
    assert found.tokens.high <= CONTEXT


def test_record_writes_every_token_that_vllm_counted(server, tmp_path):
    file = tmp_path / "mine.jsonl.gz"
    told = said("record", "chat", "--url", server.address, "--requests", REQUESTS, "--out", file)
    assert (told["requests"], told["ended"], told["failed"], told["text"]) == (REQUESTS, REQUESTS, 0, False)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        meta, *requests = map(json.loads, lines)
    engine = meta["engine"]
    assert (engine["max_model_len"], engine["block_size"], engine["num_blocks"]) == (CONTEXT, BLOCK_SIZE, BLOCKS)
    tokens = sum(request["prompt_tokens"] + request["n_predict"] for request in requests)
    assert meta["tokens"] == {"counted": tokens, "ours": tokens}
    assert all(len(request["token_s"]) == request["n_predict"] for request in requests)


def test_validate_asks_twice_and_compares(profile, server, tmp_path):
    words = ["chat", "--requests", REQUESTS, "--url", server.address, "--flags", FLAGS, "--profile", profile]
    told = said("validate", *words, "--seed", 7, "--out", tmp_path)
    assert len(told["runs"]) == 2
    assert all(run["steps"] and run["measures"] for run in told["runs"])
    assert told["left_out"] == []
