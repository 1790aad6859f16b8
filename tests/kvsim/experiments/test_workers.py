import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvsim
from kvsim.errors import NoTimes, UserError
from kvsim.experiments.workers import can_fork, map_ordered, map_unordered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are not forked here")

HERE = []
"""Filled by a test: forked processes have what this one has."""


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    """Other tests may have left threads, of which none is in the way here."""
    monkeypatch.setattr("kvsim.experiments.workers.usable_processors", lambda: 2)
    monkeypatch.setattr("kvsim.experiments.workers.can_fork", lambda: True)


def double(number):
    """By two processes at a time: each waits for another here."""
    for barrier in HERE:
        barrier.wait(60)
    return 2 * number + len(HERE), os.getpid()


def fail_at_three(number):
    if number == 3:
        raise ValueError("three")
    return number


def kill_at_three(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_forked_processes_do_the_jobs_with_what_is_here(monkeypatch):
    barrier = multiprocessing.get_context("fork").Barrier(2)
    monkeypatch.setattr("tests.kvsim.experiments.test_workers.HERE", [barrier])
    done = list(map_ordered(double, range(20)))
    assert [value for value, _ in done] == [2 * number + 1 for number in range(20)]
    assert len({process for _, process in done} - {os.getpid()}) == 2
    assert sorted(value for value, _ in map_unordered(double, range(20), workers=3)) == [value for value, _ in done]


def test_an_error_in_a_forked_process_is_raised_here():
    with pytest.raises(ValueError, match="three") as raised:
        list(map_ordered(fail_at_three, range(6)))
    assert "fail_at_three" in str(raised.value.__cause__)


def test_an_error_that_cannot_be_sent_says_the_same():
    def work(number):
        raise NoTimes(f"no times for {number}", threading.Lock())

    with pytest.raises(RuntimeError, match=r"NoTimes: no times for [01]"):
        list(map_ordered(work, range(2)))


def test_a_forked_process_that_dies_is_told():
    with pytest.raises(UserError, match=r"a worker died, .*; finished runs are kept; try fewer than 2 workers"):
        list(map_unordered(kill_at_three, range(6), workers=2))


@pytest.mark.slow
def test_processes_end_with_the_last_job_that_is_wanted():
    jobs = map_unordered(double, range(100), workers=2)
    _, process = next(jobs)
    jobs.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_no_process_is_forked_beside_another_thread():
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        assert not can_fork()
    finally:
        over.set()
        waiting.join()


@pytest.mark.slow
def test_forked_or_new_the_processes_give_the_same(monkeypatch):
    monkeypatch.setattr("kvsim.experiments.comparison._WORTH_PROCESSES", 1)
    scenario, policies = kvsim.load("chat", workload__requests=40), ["paged", "contiguous"]
    forks = kvsim.compare(scenario, policies, snapshots=False)
    monkeypatch.setattr("kvsim.experiments.workers.can_fork", lambda: False)
    new = kvsim.compare(scenario, policies, snapshots=False)
    assert forks.outcomes == new.outcomes


FOREVER = """
import ctypes
from kvsim.experiments.workers import map_unordered

def work(number):
    print(number, flush=True)
    ctypes.PyDLL(None).sleep(600)  # With Python's lock, so that no other thread of the worker runs.

list(map_unordered(work, [0, 1], workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(signalled):
    environment = os.environ | {"PYTHONPATH": str(Path(kvsim.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", FOREVER],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        for _ in range(2):
            running.stdout.readline()
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert len(children) == 2
        running.send_signal(signalled)
        running.wait(60)
    until = time.monotonic() + 60
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children):
        assert time.monotonic() < until, "workers outlive what started them"
        time.sleep(0.01)
