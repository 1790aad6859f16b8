"""The command in a process of its own: signals, kill -9, long bodies, streams without an end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from tests.kvsim.cli.answers import complaint
from tests.kvsim.engines.observing.servers import requests_of
from tests.paths import ROOT
from tests.worlds import command, python
from workloads import ObservedTrace

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x" * 100}]}
MB = 10**6


@contextmanager
def running(upstream, out, *options, **how):
    """The command as a process, and the address that it says."""
    words = ["observe", "--upstream", upstream, "--port", "0", "--out", str(out), *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsim", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **how,
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
        said, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    first, *rest = said.splitlines()
    assert re.fullmatch(rf"1 request in \d+ s: 1 completed, 0 cancelled; in {re.escape(str(out))}", first)
    assert rest == ["Tokens were counted: 1 by the server"]


def test_the_summary_is_one_json_object(upstream, out, client):
    with running(upstream.url, out, "--json", "--requests", "1") as (process, url):
        client.post(url + CHAT, json=BODY)
        said, _ = process.communicate(timeout=60)
    told = json.loads(said)
    assert (told["requests"], told["completed"], told["files"]) == (1, 1, [str(out)])


@contextmanager
def slow_to_count(pause_s):
    """A server whose answers have no counts, and whose tokenizer takes long or, for ever, drips."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/tokenize":
                time.sleep(pause_s)
            body = b'{"count": 77, "choices": [{"index": 0, "message": {"content": "yes"}}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        # Clients are killed. What that made it print would stand in what another test reads, maybe a minute later.
        server.handle_error = lambda *of: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def whole_requests(out):
    """The requests of a file to which a line may just be written."""
    return requests_of(map(json.loads, out.read_text().split("\n")[:-1]))


def ended(process):
    """Wait until the processes that one has started are gone."""
    return psutil.wait_procs(process, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("number", "whom", "size", "n"),
    [
        ("SIGKILL", "one", 100, 60),
        ("SIGTERM", "one", 100, 60),
        ("SIGINT", "all", 100, 60),
        ("SIGKILL", "all", 650_000, 30),
    ],
)
def test_no_signal_loses_what_was_answered(number, whom, size, n, out, client):
    """Not even to all of a terminal's processes, though the tokenizer takes a minute and prompts are long."""
    body = {"messages": [{"role": "user", "content": "x" * size}]}
    with slow_to_count(60.0) as upstream, running(upstream, out, process_group=0) as (process, url):
        beside = psutil.Process(process.pid).children()
        assert len(beside) == 1
        for _ in range(n):
            assert client.post(url + CHAT, json=body).status_code == 200
        (os.killpg if whom == "all" else os.kill)(process.pid, getattr(signal, number))
        assert ended(beside)
    lines = whole_requests(out)
    assert [line["id"] for line in lines] == list(range(n))
    assert all(line["counted"] == "estimate" for line in lines)


@pytest.mark.parametrize("whom", ["relay", "both"])
def test_kill_9_loses_nothing_that_was_answered_however_far_observing_is_behind(whom, upstream, out, client):
    """39 MB of prompts for a process that is stopped, or 130 MB in a burst for two that are both killed at once."""
    n = 60 if whom == "relay" else 200
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 650_000}]}).encode()
    with running(upstream.url, out) as (process, url):
        (beside,) = psutil.Process(process.pid).children()
        if whom == "relay":
            beside.suspend()
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda _: client.post(url + CHAT, content=body).status_code, range(n)))
        assert answers == [200] * n
        if whom == "both":
            until = time.monotonic() + 60
            while len(whole_requests(out)) < n and time.monotonic() < until:
                time.sleep(0.02)
        process.kill()
        beside.resume() if whom == "relay" else beside.kill()
        assert ended([beside])
    lines = whole_requests(out)
    assert sorted(line["id"] for line in lines) == list(range(n))
    for line in lines:
        assert (line["end"], line["status"], line["prompt_tokens"] > 0) == ("completed", 200, True)
        assert 0 <= line["arrival_s"] <= line["last_s"]
    assert sum(line.get("missed", 0) > 650_000 for line in lines) > 0
    assert len(list(ObservedTrace(out))) == n


def test_counts_that_come_in_time_amend_the_lines(out, client):
    with slow_to_count(0.01) as upstream, running(upstream, out, "--requests", "3") as (process, url):
        for _ in range(3):
            client.post(url + CHAT, json=BODY)
        said, _ = process.communicate(timeout=60)
    assert "Tokens were counted: 3 by its tokenizer" in said
    trace = ObservedTrace(out)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace] == [(77, 77)] * 3
    assert not [note for note in trace.notes if "estimated" in note]


def test_if_the_process_beside_dies_the_traffic_goes_on_and_it_is_said(upstream, out, client):
    with running(upstream.url, out) as (process, url):
        psutil.Process(process.pid).children()[0].kill()
        for _ in range(2):
            assert client.post(url + CHAT, json=BODY).status_code == 200
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert "the process that writes the file has ended" in errors
    assert "2 requests not recorded" in said
    assert "Traceback" not in errors


def test_where_observing_cannot_keep_up_the_traffic_does_and_the_lines_say_so(upstream, out, client):
    """The process beside is stopped while more passes than may wait."""
    with running(upstream.url, out) as (process, url):
        beside = psutil.Process(process.pid).children()[0]
        beside.suspend()
        before, received = psutil.Process(process.pid).memory_info().rss, 0
        with client.stream("POST", url + CHAT, json=BODY | {"model": "endless", "stream": True}) as told:
            for piece in told.iter_raw():
                received += len(piece)
                if received > 100 * MB:
                    break
        assert psutil.Process(process.pid).memory_info().rss - before < 60 * MB
        beside.resume()
        until = time.monotonic() + 60  # Until it has caught up, further texts are dropped too.
        while "cancelled" not in out.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        client.post(url + CHAT, json=BODY)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert "1 request not looked at in full, since observing could not keep up" in said
    lines = whole_requests(out)
    assert [(line["end"], line.get("missed", 0) > 0) for line in lines] == [("cancelled", True), ("completed", False)]


def test_a_line_that_is_torn_is_ended_by_the_next_run(upstream, out, client):
    for run in range(2):
        with running(upstream.url, out) as (process, url):
            for _ in range(20):
                client.post(url + CHAT, json=BODY)
            beside = psutil.Process(process.pid).children()
            process.kill()
            process.wait(60)
            assert ended(beside)
        if run == 0:
            with out.open("ab") as file:
                file.write(b'{"kind":"requ')  # as a line that was being written
    lines = out.read_text().split("\n")
    assert lines.pop() == ""
    torn = [line for line in lines if not line.endswith("}")]
    assert torn == ['{"kind":"requ']
    told = [json.loads(line) for line in lines if line not in torn]
    second = next(n for n, line in enumerate(told) if n and line["kind"] == "observed")
    assert [len(requests_of(run)) for run in (told[:second], told[second:])] == [20, 20]


def test_a_body_of_100_mb_passes_in_little_memory(upstream, out, client):
    with running(upstream.url, out) as (process, url):
        client.post(url + CHAT, json=BODY)
        piece = b"x" * MB
        most = Most(process.pid)
        for path in ("/upload", CHAT):
            start = b'{"messages": [{"role": "user", "content": "'
            pieces = [start, *[piece] * 100, b'"}]}']
            told = client.post(url + path, content=iter(pieces))
            assert told.status_code == 200
            if path == "/upload":
                assert told.json() == {"bytes": sum(map(len, pieces))}
        assert most.end() < 200 * MB
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert "1 request without hashes: too long, or not understood" in said


def test_a_stream_without_an_end_takes_little_memory(upstream, out, client):
    with running(upstream.url, out) as (process, url):
        client.post(url + CHAT, json=BODY)
        most, received = Most(process.pid), 0
        with client.stream("POST", url + CHAT, json=BODY | {"model": "endless", "stream": True}) as told:
            for piece in told.iter_raw():
                received += len(piece)
                if received > 150 * MB:
                    break
        assert most.end() < 200 * MB
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert "2 requests" in said
    assert "1 cancelled" in said


class Most:
    """The most memory that a process and those that it has started had since this was made."""

    def __init__(self, pid):
        self._process, self._most, self._over = psutil.Process(pid), 0, threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _now(self):
        return sum(each.memory_info().rss for each in (self._process, *self._process.children()))

    def _look(self):
        while not self._over.wait(0.01):
            self._most = max(self._most, self._now())

    def end(self):
        """How much more than at first."""
        self._over.set()
        self._thread.join()
        return self._most - self._before


def test_wrong_input_is_one_line(out, tmp_path):
    assert "x.localhost: not an address of this machine" in complaint(
        command("observe", "--upstream", "http://x.localhost:1", "--out", str(out))
    )
    for words, said in {
        ("--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "no" / "x")): "cannot be written: No such file",
        ("--upstream", "http://10.0.0.1", "--out", str(out)): "--allow-remote lets kvsim contact others",
        ("--upstream", "http://127.0.0.1:9", "--out", str(out), "--rotate", "much"): "--rotate: 'much'; a size such as",
    }.items():
        assert said in complaint(command("observe", "--port", "0", *words))


@pytest.mark.parametrize(("mode", "said"), [(0o666, "others may read or write it (mode 0666)"), (0o600, "")])
def test_a_file_that_others_may_read_is_said(upstream, out, mode, said):
    out.touch()
    out.chmod(mode)
    done = command("observe", "--upstream", upstream.url, "--port", "0", "--out", str(out), "--seconds", "0.2")
    assert done.returncode == 0
    assert said in done.stderr
    assert ("others may" in done.stderr) is bool(said)


def test_a_package_that_is_missing_is_named_with_what_to_type(out, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("kvsim.engines.observing.", "httptools"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httptools", None)
    done = command("observe", "--upstream", "http://127.0.0.1:9", "--out", str(out))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "kvsim: kvsim observe needs a package that is not installed (httptools); install it with"
    )
    assert done.stderr.rstrip().endswith('[serve]"')


def test_the_benchmark_measures():
    done = python("-m", "benchmarks.observe", "--pairs", "6", "--seconds", "0.2", "--most", "8", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["streams"] for row in rows] == [1, 8]
    for row in rows:
        assert row["added_p50_ms"][1] <= row["added_p50_ms"][0] <= row["added_p50_ms"][2]
        assert row["direct_p99_ms"] >= row["direct_p50_ms"] > 0
        assert row["cpu_us"] > 0
