"""What a server had of the processors: between two readings, and which process is whose."""

import os
import socket
import subprocess
import sys

import pytest

from kvsim import machine
from kvsim.engines.live.address import address_of
from kvsim.engines.live.listening import server_process
from kvsim.engines.live.processor_share import ProcessorShare, ProcessorWatch, Reading, share_between

S = 10**9
"""Nanoseconds of a second."""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


def reading(at_s, user=0, idle=0, steal=0, own_s=0.0, server_s=0.0, threads=None):
    ticks = tuple(n * machine.ticks_per_s() for n in (user, 0, 0, idle, 0, 0, 0, steal))
    return Reading(at_s, ticks, own_s, server_s, {} if threads is None else threads)


def test_waiting_others_and_stolen_time_are_told_apart():
    """Ten seconds on two processors: a second was stolen, the server ran 6, 5 of which waited 2 more, we ran 1."""
    before = reading(100, user=50, idle=50, own_s=3, server_s=7, threads={"1": (7 * S, S), "2": (0, 0)})
    after = reading(
        110, user=65, idle=54, steal=1, own_s=4, server_s=13, threads={"1": (12 * S, 3 * S), "2": (S, 0), "9": (S, S)}
    )
    share = share_between(before, after)
    assert share.waited == pytest.approx(5 / 6 * 2 / 7)
    assert share.others == pytest.approx((15 - 6 - 1) / 10)
    assert (share.idle, share.stolen) == pytest.approx((4 / 20, 1 / 20))
    assert share.busy


def test_threads_that_hardly_run_say_nothing_of_one_that_does():
    def threads(ran_s, waited_s):
        polling = {str(i): (10_000_000 * bool(ran_s), int(waited_s * 1e9)) for i in range(14)}
        return reading(ran_s, threads={**polling, "worker": (int(ran_s * 1e9), 0)})

    assert share_between(threads(0, 0), threads(10, 7)).waited == pytest.approx(0, abs=0.02)
    alone = {"worker": (0, 10**9)}
    assert share_between(reading(0, threads={"worker": (0, 0)}), reading(1, threads=alone)).waited == 1


def test_of_a_server_that_is_not_seen_only_stolen_time_is_known():
    share = share_between(reading(0), reading(10, user=19, idle=1))
    assert (share.waited, share.others, share.stolen) == (None, None, 0)
    assert not share.is_known
    assert not share.busy


def test_without_counters_nothing_is_known():
    nothing = Reading(0.0, None, 0.0, 0.0, {})
    share = share_between(nothing, nothing._replace(at_s=1.0))
    assert (share.waited, share.others, share.idle, share.stolen) == (None, None, None, None)


@pytest.mark.parametrize(
    ("waited", "others", "idle", "stolen", "busy"),
    [
        (0.09, 0.4, 0.0, 0.04, False),
        (0.1, 0.0, 0.5, 0.0, True),
        (0.0, 0.5, 0.1, 0.0, True),
        (0.0, 0.5, 0.2, 0.0, False),
        (0.0, 0.0, 0.5, 0.05, True),
        (None, None, None, None, False),
    ],
)
def test_what_counts_as_busy(waited, others, idle, stolen, busy):
    """A quarter of two processors is half of one."""
    assert ProcessorShare(waited, others, idle, stolen, 1.0, 2).busy is busy


@linux
def test_the_process_that_listens_is_found_and_its_children_count():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = address_of(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert server_process(address) == os.getpid()
        code = "import sys\nprint(sum(range(3 * 10**6)), flush=True)\nsys.stdin.read()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
            child.stdout.readline()
            watch = ProcessorWatch(os.getpid())
            assert str(child.pid) in watch.began.threads
            child.communicate()
        share = watch.share()
    assert share.cores == os.cpu_count()
    assert 0 <= share.waited <= 1
    assert server_process(address) is None


def test_a_server_elsewhere_is_not_looked_for():
    assert server_process(address_of("http://192.0.2.1:8080", allow_remote=True)) is None
