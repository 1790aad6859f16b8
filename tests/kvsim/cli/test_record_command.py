"""``kvsim record``: what is accepted, and what is said of a server."""

import json

import pytest

import kvsim.cli.servers as servers
from tests.kvsim.cli.answers import complaint
from tests.kvsim.engines.live.fake_server import fake_server
from tests.worlds import command

SMALL = """
[workload]
kind = "closed-loop"
users = 1
think_s = 0.0
requests = 4
prompt_tokens = { kind = "fixed", value = 12 }
output_tokens = { kind = "fixed", value = 3 }
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A scenario in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_a_server_is_recorded_and_what_was_assumed_is_said(small, tmp_path):
    with fake_server(refuses=400, faulty_from=3) as server:
        done = command("record", "--url", server.url, small)
    assert done.returncode == 1
    failed = "1 of 4 requests failed: HTTP 400: no, not this one (request 3); the others are in small.jsonl.gz"
    assert done.stderr == f"kvsim: {failed}\n"
    assert done.stdout.startswith("Saved small.jsonl.gz: 4 requests to llama-server b1-fake.\n")
    assert "Assumed: 2 slots of 2,048 tokens, as the server says" in done.stdout
    assert (tmp_path / "small.jsonl.gz").exists()


def test_json_is_one_object(small):
    with fake_server(kind="plain", takes_ids=False) as server:
        done = command("record", "--url", f"{server.url}/v1", small, "--requests", "2", "--out", "a.jsonl", "--json")
    told = json.loads(done.stdout)
    assert (told["file"], told["requests"], told["text"], told["form"]) == ("a.jsonl", 2, True, "vllm")


def test_of_a_recording_that_ended_early_the_object_is_printed_too(small):
    with fake_server(is_gone=True, faulty_from=2) as server:
        done = command("record", "--url", server.url, small, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["stopped"]
    assert len(done.stderr.splitlines()) == 1


def test_a_silent_server(small):
    with fake_server(is_silent=True, faulty_from=1) as server:
        done = command("record", "--url", server.url, small, "--timeout", "0.05")
    assert done.returncode == 2
    assert (
        "3 requests in a row failed: no answer for 0.05 s; the 1 of 4 requests that were answered are in small.jsonl.gz"
        in done.stderr
    )


def test_a_limit(small):
    with fake_server(is_silent=True, faulty_from=1) as server:
        done = command("record", "--url", server.url, small, "--limit", "0.5")
    assert done.returncode == 2
    assert "not done after 0.5 s; the 1 of 4 requests that were answered are in small.jsonl.gz" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llamacpp"], "which scenario?"),
        (["chat"], "no recordable engine called 'chat'"),
        (["llamacpp", "chat", "--resume"], "--resume: only with --url"),
        (["llamacpp", "chat", "--flags", "-np 2"], "--flags: only with --url"),
        (["--url", "http://127.0.0.1:9", "llamacpp", "chat"], "give the scenario alone"),
        (["--url", "http://127.0.0.1:9", "chat", "-p", "streams"], "--policy: a server is recorded as it runs"),
        (["--url", "http://192.0.2.1:8080", "chat"], "--allow-remote"),
        (["--url", "127.0.0.1:8080", "chat"], "not the address of a server"),
        (["--url", "http://127.0.0.1:9", "chat"], "cannot be reached"),
        (["--url", "http://127.0.0.1:9", "chat", "--flags", "'"], "--flags"),
        (["--url", "http://127.0.0.1:9", "chat", "--key-env", "NOT_THERE"], "no such environment variable"),
        (["--url", "http://127.0.0.1:9", "no-such"], "no-such"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(small, arguments, says):
    assert says in complaint(command("record", *arguments))


def test_a_missing_package_is_named_with_what_to_type(small, monkeypatch):
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    done = command("record", "--url", "http://127.0.0.1:9", small)
    assert done.returncode == 2
    assert "needs httpx; install it with:" in done.stderr
    assert "[serve]" in done.stderr
