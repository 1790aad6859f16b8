"""Recording a router: what is sent, and that all of it ends. The router here is a few lines that take turns."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsim.engines.live.router_recording import prompt_text, script
from kvsim.engines.recordings.conformance import ENGINES
from tests.kvsim.cli.answers import complaint
from tests.paths import ROOT
from tests.worlds import command

ROUTER = """
import argparse, asyncio, json, os, sys
import httpx, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--worker-urls", nargs="*")
for flag in ("--host", "--prometheus-port", "--policy", "--load-monitor-interval", "--eviction-interval-secs"):
    parser.add_argument(flag)
parser.add_argument("--refuses", action="store_true")
options = parser.parse_args()
open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
turn = 0

async def ready(request):
    return JSONResponse({"healthy_workers": len(options.worker_urls)})

async def workers(request):
    return JSONResponse({"workers": [{"url": url, "id": url} for url in options.worker_urls]})

async def complete(request):
    global turn
    if options.refuses:
        return JSONResponse({"error": "not today"}, status_code=503)
    url = options.worker_urls[turn % len(options.worker_urls)]
    turn += 1
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        answer = await http.post(url + "/v1/completions", json=await request.json())
    return JSONResponse(answer.json())

routes = [Route("/readiness", ready), Route("/workers", workers), Route("/v1/completions", complete, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=options.port, log_level="error")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment with a router of our own in place of vllm-router; its process's number comes into ``pid``."""
    site = tmp_path / "site"
    (site / "vllm_router").mkdir(parents=True)
    (site / "vllm_router" / "launch_router.py").write_text(ROUTER)
    (site / "vllm_router-9.9.dist-info").mkdir()
    (site / "vllm_router-9.9.dist-info" / "METADATA").write_text("Name: vllm-router\nVersion: 9.9\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("KVSIM_ROUTERS", str(tmp_path))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECORD = ("record", "router", "--package", "vllm-router", "--policy", "round_robin")


def runs(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_router_is_recorded_and_ended(installed):
    done = command(*RECORD, "--requests", "9", "--workers", "2")
    assert done.stdout.startswith(
        "Saved vllm-router-round_robin.jsonl.gz: 9 requests that vllm-router 9.9 (round_robin)"
    )
    assert not runs(int((installed / "pid").read_text()))
    found = ENGINES["router"](installed / "vllm-router-round_robin.jsonl.gz")
    assert (found.agree, found.total, found.era) == (9, 9, "vllm-router 9.9, round_robin")


@pytest.mark.slow
def test_a_router_ends_with_the_command_that_is_killed(installed):
    words = [sys.executable, "-m", "kvsim", *RECORD, "--requests", "2000"]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not (installed / "pid").exists() or not (installed / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    router = int((installed / "pid").read_text())
    while runs(router):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not list(installed.glob("*.jsonl.gz"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--flags", "--refuses"), "the router: a request came to no worker: HTTP 503: "),
        (("--flags", "--other 1"), "the router: ended with code 2; it said last: "),
        (("--loads",), "the router: step 0 (report): it asks for no loads"),
        (("--flags", "--eviction-interval-secs 1"), "the router: step 0 (evict): it logs nothing of what it forgets; "),
        (("--policy", "manual"), "no policy of vllm-router called 'manual'"),
        (("--package", "smg"), ": smg is not installed there"),
        (("--threads", "2"), "--threads: a router is recorded with requests of our own"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(words, said, installed, monkeypatch):
    if "step 0" in said:  # It waits for what never comes.
        monkeypatch.setattr("kvsim.engines.live.router_recording.ANSWER_S", 1.0)
    assert said in complaint(command(*RECORD, *words))
    assert not list(installed.glob("*.jsonl.gz"))


def test_without_routers_it_is_said_where_they_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSIM_ROUTERS", str(tmp_path))
    assert f"{tmp_path}: no routers are installed there; make test-routers" in complaint(command(*RECORD))


def test_options_of_a_router_are_refused_elsewhere():
    assert "--package: only of a router" in complaint(command("record", "llamacpp", "chat", "--package", "smg"))
    assert "--workers: only of a router" in complaint(
        command("record", "--url", "http://127.0.0.1:9", "chat", "--workers", "2")
    )


def test_a_script_is_the_same_each_time_and_ends_what_it_starts():
    steps = list(script(3, 250, 5, loads=True))
    assert steps == list(script(3, 250, 5, loads=True))
    assert steps != list(script(3, 250, 6, loads=True))
    started = [step["request"] for step in steps if step["do"] == "start"]
    assert started == list(range(250))
    assert sorted(step["request"] for step in steps if step["do"] == "end") == started


def test_unlike_tokens_have_no_character_in_common():
    known = {}
    text = prompt_text([(1, 0, 3), (2, 0, 2)], known)
    assert [text[i : i + 4] for i in range(0, 20, 4)] == [c * 4 for c in dict.fromkeys(text)]
    assert prompt_text([(1, 1, 2)], known) == text[4:12]
