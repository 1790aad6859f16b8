"""Recordings of running servers: what is in them, what is kept of one that ended early, and how it goes on."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvsim.engines.live import server_recording
from kvsim.engines.live.address import Address
from kvsim.engines.live.recorded_meta import Asking
from kvsim.engines.live.server_recording import record_server
from kvsim.engines.recordings.validation import read_recording
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from tests.kvsim.cli.answers import complaints
from tests.kvsim.engines.live.fake_server import BUILD, CONTEXT, SLOTS, FakeServer, fake_server
from tests.paths import ROOT

SINGLE = {
    "kind": "closed-loop",
    "users": 1,
    "think_s": 0.0,
    "requests": 8,
    "prompt_tokens": {"kind": "fixed", "value": 12},
    "output_tokens": {"kind": "fixed", "value": 3},
}
SESSIONS = {
    "kind": "sessions",
    "sessions": 4,
    "rate": 50.0,
    "turns": {"kind": "fixed", "value": 3},
    "think_s": 0.001,
    "output_tokens": {"kind": "fixed", "value": 3},
}


def scenario(**workload):
    return load_scenario({"name": "ours", "workload": SINGLE | workload, "cache": {"cells": 4096}})


def recorded(server, path, given=None, **asking):
    return record_server(given or scenario(), path, Asking(Address(server.url), **{"timeout_s": 5, **asking}))


def lines(path):
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def requests_of(path):
    return [line for line in lines(path) if line["type"] == "request"]


# What is recorded


def test_a_recording_of_llama_server(tmp_path):
    with fake_server() as server:
        done = recorded(server, tmp_path / "a.jsonl.gz")
    meta, *rest = lines(done.path)
    assert (done.form, done.requests, done.ended, done.failed, done.stopped) == ("llama-server", 8, 8, 0, None)
    assert (meta["scenario"], meta["seed"], meta["requests"], meta["prompts"]) == ("ours", 1, 8, "token ids")
    assert meta["server"] == {
        "version": [f"build: {BUILD}"],
        "n_ctx": CONTEXT,
        "slots": SLOTS,
        "n_ctx_slot": CONTEXT // SLOTS,
    }
    assert meta["flags"] == ["-np", str(SLOTS), "-c", str(CONTEXT)]
    assert meta["model"] == {"file": "fake.gguf"}
    assert list(done.assumed) == meta["assumed"] != []
    assert meta["tokens"]["counted"] == meta["tokens"]["ours"] == 8 * 15
    texts = {line["name"]: line["tokens"] for line in rest if line["type"] == "source"}
    for number, request in enumerate(r for r in rest if r["type"] == "request"):
        ((source, start, n),) = request["prompt"]
        assert texts[source][start : start + n] == server.asked[number]["prompt"]
        assert server.asked[number]["logit_bias"] == [[request["answer"], 1000.0]]
        assert "output" not in request
        assert request["result"]["prompt_n"] == request["prompt_tokens"] == 12
        assert request["send_s"] <= request["headers_s"] <= request["token_s"][0] <= request["done_s"]
        assert len(request["token_s"]) == request["n_predict"] == 3
        assert request.get("after") == (None if number == 0 else number - 1)
    assert not (tmp_path / "a.jsonl.gz.part").exists()


def test_a_recording_has_the_model_by_the_name_that_a_profile_of_the_server_has(tmp_path):
    for named, model in {"meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "my own": "my own"}.items():
        with fake_server(kind="vllm", name=named) as server:
            done = recorded(server, tmp_path / "a.jsonl", load_scenario({"workload": SESSIONS}))
        assert lines(done.path)[0]["engine"]["model"] == model


def test_a_recording_of_vllm(tmp_path):
    given = load_scenario({"workload": SESSIONS, "cache": {"cells": 4096}})
    with fake_server(kind="vllm") as server:
        done = recorded(server, tmp_path / "a.jsonl", given)
    meta = lines(done.path)[0]
    assert done.form == "vllm"
    assert (meta["vllm"], meta["engine"]["block_size"], meta["engine"]["num_blocks"]) == ("0.32.0", 16, 256)
    assert meta["tokens"]["counted"] == meta["tokens"]["ours"]
    requests = requests_of(done.path)
    assert [r["id"] for r in requests] == list(range(12))
    for r in requests:
        assert sum(n for _, _, n in r["prompt"]) == r["prompt_tokens"]
        assert r.get("at", 0.0) <= r["send_s"] <= r["token_s"][0] <= r["token_s"][-1] <= r["done_s"]
        assert len(r["token_s"]) == r["n_predict"] == 3
        if "after" in r:
            assert [f"out:{r['after']}", 0, 3] in r["prompt"]
            assert r["result"]["cache_n"] == requests[r["after"]]["prompt_tokens"] + 2
    assert sum("after" in r for r in requests) == 8
    read = read_recording(done.path)
    assert [request.id for request in read.requests] == [str(r["id"]) for r in requests]
    first, last = ([(r.first_token_s, r.last_token_s) for r in read.requests][i] for i in (0, -1))
    assert first == pytest.approx((requests[0]["token_s"][0], requests[0]["token_s"][-1]))
    assert last == pytest.approx((requests[-1]["token_s"][0], requests[-1]["token_s"][-1]))
    assert read.clients.after == {r["id"]: ((r["after"],), r["think"]) for r in requests if "after" in r}


def test_prompts_of_text_are_said_to_be_text(tmp_path):
    with fake_server(kind="plain", takes_ids=False) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert done.text
    assert lines(done.path)[0]["prompts"] == "text"
    assert [r["prompt_tokens"] for r in requests_of(done.path)] == [12] * 8


def test_flags_that_were_given_are_in_the_file(tmp_path):
    with fake_server() as server:
        done = recorded(server, tmp_path / "a.jsonl", flags=("-np", "2", "-c", "4096", "-fa", "on"))
        assert lines(done.path)[0]["flags"] == ["-np", "2", "-c", "4096", "-fa", "on"]
        assert done.assumed == ()
        with pytest.raises(UserError, match=r"--flags: .*many"):
            recorded(server, tmp_path / "b.jsonl", flags=("-np", "many"))


def test_others_who_use_the_server_are_noticed(tmp_path):
    with fake_server(others=100) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    (warning,) = done.warnings
    assert "it computed 920 tokens, and 120 tokens were ours" in warning
    assert lines(done.path)[0]["tokens"] == {"counted": 920, "ours": 120}


@pytest.mark.slow
def test_a_cache_that_knows_the_prompts_already_is_noticed(tmp_path):
    with fake_server() as server:
        assert recorded(server, tmp_path / "a.jsonl").warnings == ()
        (warning,) = recorded(server, tmp_path / "b.jsonl").warnings
        assert "its cache held 11 tokens of the first prompt already; start it anew" in warning
        other = load_scenario({"seed": 2, "workload": SINGLE, "cache": {"cells": 4096}})
        assert recorded(server, tmp_path / "c.jsonl", other).warnings == ()
        assert recorded(server, tmp_path / "d.jsonl", texts=1).warnings == ()


def test_a_server_that_does_not_count_is_not_asked_for_it(tmp_path):
    with fake_server(counts=False) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert done.warnings == ()
    assert "tokens" not in lines(done.path)[0]


def test_failures_are_counted_and_kept(tmp_path):
    with fake_server(refuses=400, faulty_from=3) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert (done.ended, done.failed, done.stopped) == (8, 5, None)
    assert done.first_failure == "request 3: HTTP 400: no, not this one"
    assert [r["status"] for r in requests_of(done.path)] == [200] * 3 + [400] * 5


def test_shorter_answers_are_failures(tmp_path):
    with fake_server(answers_at_most=2, faulty_from=7) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert done.first_failure == "request 7: 2 of 3 tokens came back; the server cut the answer"


def test_failures_are_told_by_cause(tmp_path):
    with fake_server(refuses=400, faulty_from=1) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert done.why_failed == "HTTP 400: no, not this one (requests 1, 2, 3, 4, 5 and 2 more)"


@pytest.mark.parametrize("later", ["0", "Thu, 26 Nov 2026 10:00:00 GMT"])
def test_a_server_that_asks_for_patience_is_asked_again(tmp_path, later):
    with fake_server(refuses=429, faulty_from=1, retry_after=later) as server:
        done = recorded(server, tmp_path / "a.jsonl")
    assert (done.ended, done.failed, len(server.asked)) == (8, 0, 15)
    assert "7 requests sent again, as it asked for by Retry-After" in done.warnings[0]


def test_a_server_that_asks_for_more_patience_than_there_is(tmp_path):
    with fake_server(refuses=503, faulty_from=6, retry_after="4000") as server:
        done = recorded(server, tmp_path / "a.jsonl", limit_s=3600.0)
    assert "it wants to be asked again in 4,000 s, after the end of --limit" in done.why_failed


# What ended early


def test_a_server_that_goes_leaves_a_recording_that_is_whole_and_can_go_on(tmp_path):
    path = tmp_path / "a.jsonl"
    with fake_server(is_gone=True, faulty_from=3) as server:
        done = recorded(server, path)
        port = server.port
    assert "cannot be reached" in done.stopped
    assert (done.ended, done.failed, done.requests) == (4, 1, 8)
    assert lines(path)[0]["ended"] == 4
    with fake_server(FakeServer(port=port)) as server:
        with pytest.raises(UserError, match="--resume goes on with it"):
            recorded(server, path)
        done = recorded(server, path, resume=True)
    assert (done.ended, done.failed, done.stopped, len(server.asked)) == (8, 0, None, 5)
    meta, requests = lines(path)[0], requests_of(path)
    assert [r["id"] for r in requests] == list(range(8))
    (resumed_s,) = meta["resumed_s"]
    assert requests[2]["done_s"] <= resumed_s <= requests[3]["send_s"]
    assert not (tmp_path / "a.jsonl.part").exists()


@pytest.mark.parametrize("counts", [True, False])
def test_a_server_that_goes_when_all_has_been_sent(tmp_path, counts):
    path = tmp_path / "a.jsonl"
    with fake_server(is_gone=True, faulty_from=1, counts=counts) as server:
        done = recorded(server, path, scenario(requests=2))
    assert "cannot be reached" in done.stopped
    assert (done.ended, done.failed) == (2, 1)
    assert (tmp_path / "a.jsonl.part").exists()


@pytest.mark.slow
def test_resumed_prompts_are_those_of_a_run_that_never_stopped(tmp_path):
    given = load_scenario({"workload": SESSIONS, "cache": {"cells": 4096}})
    with fake_server() as server:
        whole = recorded(server, tmp_path / "whole.jsonl", given)
    with fake_server(is_gone=True, faulty_from=7) as server:
        cut = recorded(server, tmp_path / "cut.jsonl", given)
        port = server.port
    assert cut.stopped is not None
    with fake_server(FakeServer(port=port)) as server:
        recorded(server, tmp_path / "cut.jsonl", given, resume=True)

    def sources(path):
        return sorted((line["name"], line["tokens"]) for line in lines(path) if line["type"] == "source")

    assert sources(whole.path) == sources(cut.path)
    prompts = [len(asked["prompt"]) for asked in server.asked]
    assert min(prompts) in [r["prompt_tokens"] for r in requests_of(cut.path) if "after" not in r]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda part: part.unlink(), "nothing was begun"),
        (lambda part: part.write_text("what\n"), "not what kvsim record --url begins"),
        (lambda part: part.write_text('{"journal": "another"}\n'), "not what kvsim record --url begins"),
        (lambda part: part.write_text(part.read_text() + '{"request": 99}\n'), "damaged"),
    ],
)
def test_what_cannot_be_resumed_is_said_in_a_line(tmp_path, break_it, says):
    path = tmp_path / "a.jsonl"
    with fake_server(is_gone=True, faulty_from=2) as server:
        recorded(server, path)
        port = server.port
    break_it(tmp_path / "a.jsonl.part")
    with fake_server(FakeServer(port=port)) as server, pytest.raises(UserError, match=says):
        recorded(server, path, resume=True)


def test_another_scenario_or_server_cannot_go_on(tmp_path):
    path = tmp_path / "a.jsonl"
    with fake_server(is_gone=True, faulty_from=2) as server:
        recorded(server, path)
        port = server.port
    with (
        fake_server(FakeServer(port=port)) as server,
        pytest.raises(UserError, match="of other requests than these"),
    ):
        recorded(server, path, scenario(requests=9), resume=True)
    with fake_server(kind="vllm") as server, pytest.raises(UserError, match=r"begun with llama-server .* is vllm"):
        recorded(server, path, resume=True)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"refuses": 503}, "3 requests in a row failed: HTTP 503: no, not this one; nothing was gathered"),
        ({"says": "html"}, "answered by text/html, not by a stream of events; nothing was gathered"),
        ({"is_gone": True}, "nothing was gathered"),
        ({"key": "secret"}, r"wants a key \(HTTP 401\); give it by --key-env NAME"),
    ],
)
def test_nothing_is_left_where_nothing_was_gathered(tmp_path, fault, says):
    with fake_server(**fault) as server, pytest.raises(UserError, match=says):
        recorded(server, tmp_path / "a.jsonl")
    assert [*tmp_path.iterdir()] == []


def test_a_single_request_that_fails(tmp_path):
    with fake_server(cuts_at=1) as server, pytest.raises(UserError, match="none of 1 request was answered"):
        recorded(server, tmp_path / "a.jsonl", scenario(requests=1))


def test_a_log_that_is_missing_or_of_another_server(tmp_path, monkeypatch):
    monkeypatch.setattr(server_recording, "_LOG_WAITS_S", (0.0,))
    log = tmp_path / "server.log"
    with fake_server() as server:
        with pytest.raises(UserError, match="there is no such log"):
            recorded(server, tmp_path / "a.jsonl", log=log)
        log.write_text("nothing")
        done = recorded(server, tmp_path / "a.jsonl", log=log)
    assert "not a log of llama-server" in done.warnings[0]
    assert done.steps is None
    assert done.ended == 8
    with fake_server(kind="vllm") as server, pytest.raises(UserError, match="read of llama-server only"):
        recorded(server, tmp_path / "b.jsonl", log=log)


# The command


def record(server, folder, *options):
    """The command in a process of its own."""
    file = folder / "ours.toml"
    file.write_text(
        '[workload]\nkind = "closed-loop"\nusers = 1\nthink_s = 0.0\nrequests = 30\n'
        'prompt_tokens = { kind = "fixed", value = 12 }\noutput_tokens = { kind = "fixed", value = 3 }\n'
    )
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim", "record", "--url", server.url, str(file), "--out", "a.jsonl", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OUR_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """What a process printed when it has ended, and what it complained of."""
    output, errors = process.communicate()
    return output, complaints(subprocess.CompletedProcess((), process.returncode, output, errors))


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_loses_at_most_the_last_line(tmp_path, by):
    """The server answers no more when eight requests have come, however long that takes."""
    with fake_server(key="secret", is_silent=True, faulty_from=7) as server:
        process = record(server, tmp_path, "--key-env", "OUR_KEY")
        while len(server.asked) < 8 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(by)
        _, errors = ended(process)
        part = tmp_path / "a.jsonl.part"
        kept = sum('"request"' in line for line in part.read_text().splitlines())
        assert 6 <= kept <= 7
        assert "secret" not in part.read_text()
        if by == signal.SIGINT:
            assert process.returncode == 130
            (told,) = errors
            assert told.startswith("kvsim: interrupted; ")
            assert told.endswith(
                "of 30 requests that were answered are in a.jsonl; the same command with --resume sends the others"
            )
        with part.open("a") as file:
            file.write('{"request": 7, "cut')
        before, server.is_silent = len(server.asked), False
        process = record(server, tmp_path, "--key-env", "OUR_KEY", "--resume", "--json")
        output, errors = ended(process)
    assert (process.returncode, errors) == (0, [])
    assert json.loads(output)["ended"] == 30
    assert len(server.asked) - before == 30 - kept
    assert len(requests_of(tmp_path / "a.jsonl")) == 30
