"""The command in a process of its own: signals, kill -9, long bodies, streams without an end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from tests.kvsim.cli.answers import complaint
from tests.paths import ROOT
from tests.worlds import command, python

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x" * 100}]}
MB = 10**6


@contextmanager
def running(upstream, out, *options):
    """The command as a process, and the address that it says."""
    words = ["observe", "--upstream", upstream, "--port", "0", "--out", str(out), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsim", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        line = process.stderr.readline()
        yield process, re.search(r"can now use (http://127\.0\.0\.1:\d+);", line)[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_summary(number, upstream, out, client):
    with running(upstream.url, out) as (process, url):
        client.post(url + CHAT, json=BODY)
        process.send_signal(number)
        said, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    first, *rest = said.splitlines()
    assert re.fullmatch(rf"1 request in \d+ s: 1 completed, 0 cancelled, 0 failed; in {re.escape(str(out))}", first)
    assert rest == ["Tokens were counted: 1 by the server"]


def test_the_summary_is_one_json_object(upstream, out, client):
    with running(upstream.url, out, "--json", "--requests", "1") as (process, url):
        client.post(url + CHAT, json=BODY)
        said, _ = process.communicate(timeout=20)
    told = json.loads(said)
    assert (told["requests"], told["completed"], told["files"]) == (1, 1, [str(out)])


def test_a_kill_loses_at_most_the_line_that_was_being_written(upstream, out, client):
    for run in range(2):
        with running(upstream.url, out) as (process, url):
            for _ in range(20):
                client.post(url + CHAT, json=BODY)
            time.sleep(0.1)
            process.kill()
            process.wait(10)
        if run == 0:
            with out.open("ab") as file:
                file.write(b'{"kind":"requ')  # as a line that was being written
    lines = out.read_text().split("\n")
    assert lines.pop() == ""
    torn = [line for line in lines if not line.endswith("}")]
    assert torn == ['{"kind":"requ']
    kinds = [json.loads(line)["kind"] for line in lines if line not in torn]
    assert kinds == [*["observed"], *["request"] * 20] * 2


def test_a_body_of_100_mb_passes_in_little_memory(upstream, out, client):
    with running(upstream.url, out) as (process, url):
        client.post(url + CHAT, json=BODY)
        before = psutil.Process(process.pid).memory_info().rss
        piece = b"x" * MB
        most = Most(process.pid)
        for path in ("/upload", CHAT):
            start = b'{"messages": [{"role": "user", "content": "'
            pieces = [start, *[piece] * 100, b'"}]}']
            told = client.post(url + path, content=iter(pieces))
            assert told.status_code == 200
            if path == "/upload":
                assert told.json() == {"bytes": sum(map(len, pieces))}
        assert most.end() - before < 40 * MB
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert "1 request without hashes: too long, or not understood" in said


def test_a_stream_without_an_end_takes_little_memory(upstream, out, client):
    with running(upstream.url, out) as (process, url):
        client.post(url + CHAT, json=BODY)
        before = psutil.Process(process.pid).memory_info().rss
        most, received = Most(process.pid), 0
        with client.stream("POST", url + CHAT, json=BODY | {"model": "endless", "stream": True}) as told:
            for piece in told.iter_raw():
                received += len(piece)
                if received > 150 * MB:
                    break
        assert most.end() - before < 60 * MB
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert "2 requests" in said
    assert "1 cancelled" in said


class Most:
    """The most memory that a process had since this was made."""

    def __init__(self, pid):
        self._process, self._most, self._over = psutil.Process(pid), 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._over.wait(0.01):
            self._most = max(self._most, self._process.memory_info().rss)

    def end(self):
        self._over.set()
        self._thread.join()
        return self._most


def test_wrong_input_is_one_line(out, tmp_path):
    for words, said in {
        ("--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "no" / "x")): "cannot be written: No such file",
        ("--upstream", "http://10.0.0.1", "--out", str(out)): "--allow-remote lets kvsim contact others",
        ("--upstream", "http://127.0.0.1:9", "--out", str(out), "--rotate", "much"): "--rotate: 'much'; a size such as",
    }.items():
        assert said in complaint(command("observe", "--port", "0", *words))


def test_a_package_that_is_missing_is_named_with_what_to_type(out, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("kvsim.engines.observing.", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = command("observe", "--upstream", "http://127.0.0.1:9", "--out", str(out))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "kvsim: kvsim observe needs a package that is not installed (uvicorn); install it with"
    )
    assert done.stderr.rstrip().endswith('[serve]"')


def test_the_benchmark_measures():
    done = python("-m", "benchmarks.observe", "--pairs", "6", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["prompt_bytes"], row["others"]) for row in rows] == [(2000, 0), (100000, 0), (2000, 4)]
    assert all(row["low_ms"] <= row["added_ms"] <= row["high_ms"] and row["direct_ms"] > 0 for row in rows)
