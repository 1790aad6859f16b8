"""``kvsim record --url`` with a real llama-server: what it records is what our scheduler decides."""

import json
from pathlib import Path

import pytest

from kvsim.engines.recordings.conformance import conform
from kvsim.engines.recordings.llama_server_replay import LlamaServerReplay
from kvsim.engines.recordings.recording_files import read_lines
from kvsim.model.engine_shapes import gguf_path
from tests.real_engine.llama_server.conftest import LIMIT_S, SERVER
from tests.real_engine.llama_server.server import running
from tests.worlds import command

pytestmark = [pytest.mark.llama, pytest.mark.slow]

CHATS = """
[workload]
kind = "sessions"
sessions = 5
rate = 3.0
system_prompts = 1
system_tokens = { kind = "fixed", value = 40 }
turns = { kind = "fixed", value = 3 }
user_tokens = { kind = "lognormal", mu = 2.5, sigma = 0.5, min = 2, max = 30 }
output_tokens = { kind = "lognormal", mu = 1.5, sigma = 0.5, min = 1, max = 9 }
think_s = 0.1
"""
ONE_CHAT = CHATS.replace("sessions = 5", "sessions = 1").replace("value = 3 }", "value = 5 }")
USERS = """
[workload]
kind = "closed-loop"
users = 5
think_s = 0.0
requests = 14
prompt_tokens = { kind = "lognormal", mu = 3.5, sigma = 0.8, min = 2, max = 120 }
output_tokens = { kind = "lognormal", mu = 1.5, sigma = 0.8, min = 1, max = 12 }
"""
RUNS = {
    "chats": (CHATS, ["-np", "2", "-c", "1024"]),
    "chats_automatic": (CHATS, ["-c", "1024"]),
    "one_chat": (ONE_CHAT, ["-np", "2", "-c", "1024"]),
    "users": (USERS, ["-np", "3", "-c", "1000", "-b", "64", "-ub", "32", "--cache-ram", "0"]),
    "full_pool": (USERS, ["-np", "4", "-c", "256", "--kv-unified", "--cache-ram", "0"]),
}


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory):
    """What the command printed, and the recording, of a server that was started for it."""
    folder = tmp_path_factory.mktemp(request.param)
    text, flags = RUNS[request.param]
    scenario, log, out = folder / "ours.toml", folder / "server.log", folder / "a.jsonl.gz"
    scenario.write_text(text)
    with running(SERVER, Path(gguf_path("smollm2")), ["-t", "1", "--metrics", *flags], log, LIMIT_S) as port:
        url = f"http://127.0.0.1:{port}"
        done = command("record", "--url", url, str(scenario), "--out", str(out), "--log", str(log), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def test_every_decision_of_the_recorded_server_agrees(recorded):
    told, path = recorded
    assert told["warnings"] == []
    assert told["ended"] == told["requests"]
    agreement = conform(LlamaServerReplay, path)
    assert agreement.first is None
    assert agreement.agree == agreement.total >= told["steps"] > 0


def test_a_server_of_our_own_counts_no_more_than_was_asked(recorded):
    """It may count less: what it computed of requests that failed, and pieces of prompts of several batches."""
    _, path = recorded
    tokens = next(read_lines(path))[1]["tokens"]
    assert 0.5 * tokens["ours"] < tokens["counted"] <= tokens["ours"]


def test_answers_are_quoted_as_the_server_holds_them(recorded, request):
    """Later turns find no more than the history, up to its last token; a chat alone on a server finds it all."""
    _, path = recorded
    requests = {line["id"]: line for _, line in read_lines(path) if line["type"] == "request"}
    later = [r for r in requests.values() if r["group"] and "after" in r]
    found = [r["result"]["cache_n"] - requests[r["after"]]["prompt_tokens"] for r in later]
    held = [requests[r["after"]]["n_predict"] - 1 for r in later]
    assert all(n <= most for n, most in zip(found, held, strict=True))
    # Where chats share slots, what is left of a history depends on who came between: on the speed of the machine.
    if request.node.callspec.params["recorded"] == "one_chat":
        assert later
        assert found == held
