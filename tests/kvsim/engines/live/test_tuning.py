"""Tuning a server: the stages one after another, what is kept of them, and what is said at the end."""

import json
import shlex
import sys
from functools import partial

import pytest

from kvsim.advice.recommend.search import SearchBudget
from kvsim.advice.recommend.slo import read_slo
from kvsim.costs.load_profile import load_profile
from kvsim.engines.live import tuning
from kvsim.engines.live.held import Held
from kvsim.engines.live.tuning import Trial, Tuned
from kvsim.reports.tuning_report import tuning_report
from tests.kvsim.cli.answers import complaint
from tests.kvsim.engines.live.fake_server import fake_server
from tests.kvsim.engines.live.stepping_server import SteppingServer
from tests.kvsim.engines.live.test_verification import PROGRAM
from tests.worlds import ROOT, command

TRAFFIC = ("--users", "2", "--prompt", "40", "--output", "5", "--think", "0.1s")
SERVER = ("--model", "smollm2", "--flags", "-np 2 -c 4096 -t 1 -fa on")
BOUND = "ttft_p95<1s"


def best(ttft=0.1, **keys):
    made = {
        "measures": {"ttft_p95": {"low": 0.9 * ttft, "high": 1.1 * ttft}},
        "verdict": "surely",
        "flags": {"--parallel": "4"},
        "typed": "--parallel 4",
        "command": "llama-server",
    }
    return {**made, "scenario": "best-1.toml", "place": 1, "label": "label", "notes": [], **keys}


def tuned(gain=None, now="surely", measured=(), refused=None, flags=(("--parallel", "1"),), **keys):
    """What was found, by the gain of the best, the verdict on what runs, and the TTFT of both when tried."""
    worst = {"measure": "ttft_p95"}
    fixed = [{**best(), "name": "now", "verdict": now, "gain": gain, "worst": worst}]
    advice = {"best": [best(**keys)], "fixed": fixed, "gains": [], "limits": [], "conclusion": ""}
    names = zip(("now", "then"), measured, strict=False)
    shares = {"failed_share": 0.0, "truncated_share": 0.0}
    slo = read_slo(BOUND)
    tried = {
        name: Trial(9, Held({"ttft_p95": 0.1}, {"ttft_p95": value, **shares}, {}, None, None, slo.bounds), None)
        for name, value in names
    }
    return Tuned("server", (), flags, slo, False, "profile", refused, advice, tried, tuning.Path("x"))


class Measured:
    """A measurement of a server that takes no time."""

    def __init__(self, server, **options):
        self.profile = load_profile(str(ROOT / "examples/own-server/team.profile.json"))

    def refusal(self):
        return None


@pytest.mark.slow
def test_a_server_is_measured_and_the_best_settings_are_tried_and_nothing_is_done_twice(port, tmp_path, monkeypatch):
    quick = partial(tuning.recommend, budget=SearchBudget(3, 0, 2, 2, 1, 1, fewest=8), requests=8, workers=1)
    monkeypatch.setattr(tuning, "recommend", quick)
    monkeypatch.setattr(tuning, "calibrate_server", Measured)
    verify = shlex.join([sys.executable, str(PROGRAM), "--port", str(port)])
    with fake_server(SteppingServer(factor=0.25)) as server:
        asked = ("tune", "--url", server.url, *SERVER, *TRAFFIC, "--verify", verify)
        asked += ("--verify-requests", "6", "--slo", "ttft_p95<30s", "--out", str(tmp_path / "out"), "--json")
        first = command(*asked)
        assert first.returncode == 0, first.stderr
        found = json.loads(first.stdout)
        assert set(found["seconds"]) == {"calibrate", "recommend", "now", "then"}
        assert found["tried"]["then"]["met"]
        assert [found["tried"][name]["requests"] for name in ("now", "then")] == [6, 6]
        assert found["assumed"] == list(Measured(None).profile.assumed)
        assert found["typed"] == found["recommendation"]["best"][0]["typed"]
        assert len(server.asked) == 6
        again = json.loads(command(*asked).stdout)
        assert again == {**found, "seconds": {}}
        assert len(server.asked) == 6
        # Only what rests on the service level is done anew.
        other = json.loads(command(*asked, "--slo", "ttft_p95<20s").stdout)
        assert set(other["seconds"]) == {"recommend", "now", "then"}


@pytest.mark.slow
def test_too_little_observed_traffic_is_kept_and_said(tmp_path):
    with fake_server(SteppingServer(factor=0.1)) as server:
        asked = ("tune", "--url", server.url, *SERVER, "--observe", "1", "--port", "0", "--out", str(tmp_path))
        done = command(*asked)
    assert done.returncode == 2
    assert "0 requests came, and at least 20 are needed: the same command observes on" in done.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--trace", "a.csv", "--scenario", "chat"), "--trace, --scenario, --users: 2 of them"),
        (("--columns", "a=b"), "for a trace given by --trace only"),
        (("--users", "3"), "--users: say --prompt too"),
    ],
)
def test_a_mistake_is_one_line(typed, said):
    assert said in complaint(command("tune", "--url", "http://127.0.0.1:9", *typed))


GAIN = {"value": 2.0, "low": 1.5, "high": 2.5}
LESS = {"value": 0.8, "low": 0.7, "high": 0.9}
SMALL = {"value": 1.1, "low": 0.9, "high": 1.3}


@pytest.mark.parametrize(
    ("found", "better", "said"),
    [
        (tuned(GAIN), True, "Change --parallel 1 → 4."),
        (tuned(SMALL), False, "Keep what runs: nothing that was found is surely better."),
        (tuned(SMALL, ttft=0.05), True, "Change --parallel 1 → 4."),
        (tuned(None, ttft=0.05), True, "Change --parallel 1 → 4."),
        (tuned({"value": 1.1, "low": None, "high": None}), False, "Keep what runs: nothing that was found is surely"),
        (tuned(LESS, ttft=0.05), False, "Keep what runs: nothing that was found is surely better."),
        (tuned(SMALL, now="likely"), True, "Change --parallel 1 → 4."),
        (tuned(None, now="not"), True, "Change --parallel 1 → 4."),
        (tuned(GAIN, flags=(("--parallel", "4"),)), False, "Keep what runs: it is the best that was found."),
        (tuned(GAIN, measured=(0.9, 0.3)), True, "Change --parallel 1 → 4."),
        (tuned(GAIN, measured=(0.3, 0.9)), None, "No verdict: the recommended settings should be better, and were not"),
        (tuned(SMALL, measured=(0.9, 0.3)), None, "No verdict: the recommended settings should be no better, and were"),
        (tuned(SMALL, refused="busy"), None, "No verdict: the server's times could not be measured well (busy)."),
        (tuned(GAIN, refused="busy"), None, "No verdict: the server's times could not be measured well (busy)."),
        (tuned(GAIN, refused="busy", measured=(0.9, 0.3)), True, "Change --parallel 1 → 4."),
    ],
)
def test_the_verdict_needs_the_prediction_and_the_trial_where_there_is_one(found, better, said):
    assert found.better is better
    assert tuning_report(found).conclusions[0].startswith(said)


def test_a_trial_that_misses_the_service_level_is_said():
    found = tuned(GAIN, measured=(9.0, 3.0))
    assert found.missed
    assert "ttft p95 9 s now, 3 s as recommended, which missed" in tuning_report(found).conclusions[-1]
