"""Progress off a terminal: a line on standard error after some seconds, then now and then."""

import pytest

from kvsim.cli import progress
from kvsim.cli.progress import RunProgress, SweepBar


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_short_run_prints_nothing(clock, capsys):
    with RunProgress("paged", 50) as told:
        for done in range(50):
            told(done, 1.0)
            clock.now += 0.09
    assert lines(capsys) == []


def test_a_long_run_says_how_far_it_is(clock, capsys):
    with RunProgress("paged", 1_000_000) as told:
        for done in range(30):
            told(1000 * done, 2.0 * done)
            clock.now += 1
    assert lines(capsys) == [
        "paged: 5,000 of 1,000,000 requests, 10.0 s simulated after 5 s",
        "paged: 15,000 of 1,000,000 requests, 30.0 s simulated after 15 s",
        "paged: 25,000 of 1,000,000 requests, 50.0 s simulated after 25 s",
    ]


def test_where_the_total_is_unknown_it_is_not_named(clock, capsys):
    with RunProgress("chat") as told:
        clock.now += 6
        told(7, 3.0)
        clock.now += 20
        told.share(0.25)
    assert lines(capsys) == [
        "chat: 7 requests, 3.0 s simulated after 6 s",
        "chat: 25% after 26 s, about 1 min 18 s left",
    ]


def test_a_sweep_counts_its_runs(clock, capsys):
    with SweepBar("rates") as told:
        told(0, 12, 0)
        clock.now += 7
        told(3, 12, 0)
        clock.now += 7
        told(4, 12, 0)
        clock.now += 7
        told(5, 12, 1)
    assert lines(capsys) == ["rates: 3 of 12 runs after 7 s", "rates: 5 of 12 runs, 1 failed after 21 s"]
