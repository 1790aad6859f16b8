"""Verifying a recommendation: what is sent to the server that was started, and what is said of it."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from kvsim import UserError, load_scenario, recommend
from kvsim.advice.recommend.search import SearchBudget
from kvsim.engines.live.client import Answer
from kvsim.engines.live.processor_share import ProcessorShare, ProcessorWatch
from kvsim.engines.live.prompts import Prompt
from kvsim.engines.live.started_server import read_command
from kvsim.engines.live.traffic import Exchange
from kvsim.engines.live.verification import measures_of, verify
from kvsim.reports.held_report import verification_report
from tests.kvsim.cli.answers import complaint
from tests.worlds import command
from workloads import Request

PROGRAM = Path(__file__).parent / "fake_program.py"
SMALL = SearchBudget(3, 0, 2, 2, 1, 1, fewest=8)
WORLD = {
    "name": "world",
    "workload": {
        "rate": 40.0,
        "requests": 20,
        "prompt_tokens": {"kind": "fixed", "value": 40},
        "output_tokens": {"kind": "fixed", "value": 5},
    },
}
ASKED = {"engine": "llamacpp", "budget": SMALL, "workers": 1}


@pytest.fixture(scope="module")
def found():
    return recommend(load_scenario(WORLD), slo="ttft_p95<30s,e2e_mean<60s", **ASKED)


def fake(port, *options):
    return shlex.join([sys.executable, str(PROGRAM), "--port", str(port), *map(str, options)])


def exchange(id, sent_s=0.0, token_s=(0.5, 0.7), output=2, **keys):
    answer = Answer(sent_s, token_s=list(token_s), done_s=token_s[-1], status=200, output_tokens=len(token_s), **keys)
    return Exchange(Request(id, sent_s, 10, output), Prompt((1,), ()), answer, sent_s)


# What was measured


def test_measures_are_of_requests_that_were_answered_in_full():
    cut = exchange(2, token_s=(9.0,), result={"truncated": True})
    failed = exchange(3, token_s=(9.0,), error="HTTP 500")
    measures = measures_of([exchange(0), exchange(1, 1.0, (1.1, 1.2)), cut, failed])
    assert measures["ttft_mean"] == pytest.approx(0.3)
    assert measures["ttft_p50"] == pytest.approx(0.3)
    assert measures["ttft_p95"] == pytest.approx(0.1 + 0.95 * 0.4)
    assert measures["tpot_mean"] == pytest.approx(0.15)
    assert measures["e2e_p99"] == pytest.approx(0.2 + 0.99 * 0.5)
    assert (measures["failed_share"], measures["truncated_share"]) == (0.25, 0.25)


def test_without_answers_there_are_no_latencies():
    measures = measures_of([exchange(0, error="HTTP 500")])
    assert measures["ttft_p95"] is None
    assert measures["failed_share"] == 1


# The server that was started


@pytest.mark.slow
def test_the_recommended_server_is_started_and_sent_the_first_requests(found, port, tmp_path):
    shares = []
    done = verify(found, read_command(fake(port, "--argv", tmp_path / "argv")), requests=12, progress=shares.append)
    assert done.met
    assert (done.place, done.requests, len(shares), shares[-1]) == (1, 12, 12, 1.0)
    assert done.engine == "llama-server b1-fake"
    flags = [word for pair in found.best[0].candidate.flags for word in pair if word]
    assert json.loads((tmp_path / "argv").read_text())[-len(flags) :] == flags == list(done.typed)[-len(flags) :]
    assert [each.bound.measure for each in done.checked] == ["ttft_p95", "e2e_mean", "failed_share", "truncated_share"]
    assert all(each.predicted is not None and each.measured is not None for each in done.checked)
    assert json.loads(json.dumps(done.to_dict(), allow_nan=False)) == done.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processors", "met", "says"),
    [
        (
            ProcessorShare(0.6, 1.8, 0.0, 0.0, 9.0, 2),
            None,
            "No verdict: other work kept the server from its processors",
        ),
        (
            ProcessorShare(0.0, 0.0, 0.5, 0.0, 1.0, 2),
            False,
            "was not met, although the prediction was that it would be.",
        ),
    ],
)
def test_a_starved_server_gives_no_verdict(found, port, monkeypatch, processors, met, says):
    """A token of the fake server takes a multiple of what the profile says, whatever else the machine does."""
    monkeypatch.setattr(ProcessorWatch, "share", lambda self: processors)
    slow = recommend(load_scenario(WORLD), slo="tpot_p95<40ms", **ASKED)
    told = []
    done = verify(slow, read_command(fake(port, "--token-s", 0.05)), requests=2, told=told.append)
    assert done.met is met
    assert done.held.pace > 2
    assert done.held.predicted_met
    assert done.held.at_pace["tpot_mean"] > done.held.predicted["tpot_mean"]
    report = verification_report(done)
    assert says in report.conclusions[0]
    cause = " ".join(report.sections[1].text)
    assert ("Other work had the processors" in cause) is (met is None)
    assert ("not of this server as it was started" in cause) is (met is False)
    assert told[1].startswith("sending 2 requests to http://127.0.0.1:")
    assert done.to_dict()["starved"] is (met is None)


def test_a_server_that_ends_meanwhile_is_a_fault_in_one_line(found, port):
    with pytest.raises(UserError, match=r"the server ended with code 3; it said last: out of luck$"):
        verify(found, read_command(fake(port, "--ends-after", 6)), requests=12)


def test_a_command_of_an_engine_that_was_not_recommended_starts_nothing(found, tmp_path, port):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\ntouch started\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"nothing of .*vllm is among the best"):
        verify(found, read_command(f"{program} serve --port {port}"))


# The command


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a scenario, and a search that is soon over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SMALL)
    (tmp_path / "world.toml").write_text(
        "[workload]\nrate = 40.0\nrequests = 20\n"
        'prompt_tokens = { kind = "fixed", value = 40 }\noutput_tokens = { kind = "fixed", value = 5 }\n'
    )
    return ("recommend", "--scenario", "world.toml", "--engine", "llamacpp", "--workers", "1")


@pytest.mark.slow
def test_the_command_says_what_was_predicted_and_measured(world, port):
    done = command(*world, "--slo", "ttft_p95<30s", "--verify", fake(port), "--verify-requests", "8")
    assert done.returncode == 0
    said = done.stdout.splitlines()
    began = f"Verified place 1 on llama-server b1-fake at http://127.0.0.1:{port}: 8 requests in "
    (verified,) = [number for number, line in enumerate(said) if line.startswith(began)]
    assert said[verified + 1] == "The service level was met, as predicted."
    assert "starting " in done.stderr
    assert "sending 8 requests to http" in done.stderr
    (saved,) = [number for number, line in enumerate(said) if line.startswith("Saved ")]
    assert saved < verified


@pytest.mark.slow
def test_the_exit_code_is_1_if_the_level_is_not_met(world, port):
    asked = ("--verify", fake(port, "--token-s", 0.05), "--verify-requests", "4", "--json")
    done = command(*world, "--slo", "e2e_p95<50ms", *asked)
    assert done.returncode == 1
    verification = json.loads(done.stdout)["verification"]
    assert verification["met"] is not True
    assert [bound["met"] for bound in verification["bounds"]] == [False, True, True]
    assert verification["bounds"][0]["measured"] > 0.2


@pytest.mark.slow
def test_a_fault_keeps_the_recommendation(world, port):
    done = command(*world, "--slo", "ttft_p95<30s", "--verify", fake(port, "--ends", 5), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["verification"] is None
    assert done.stderr.splitlines()[-1].endswith("the server ended with code 5; it said last: error: no such model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--verify", "no-such-program"), "no-such-program: there is no such program"),
        (("--verify-url", "http://127.0.0.1:1"), "--verify-url: of the server that --verify COMMAND starts"),
        (("--verify", "sh", "--verify-url", "ftp://127.0.0.1"), "not the address of a server"),
    ],
)
def test_what_cannot_be_verified_is_told_before_the_search(world, tmp_path, options, message):
    assert message in complaint(command(*world, "--slo", "ttft_p95<30s", *options))
    assert not (tmp_path / "results").exists()


def test_memory_alone_recommends_nothing_to_start(world, port):
    asked = ("--slo", "ttft_p95<30s", "--model", "llama-3.1-8b", "--verify", fake(port))
    done = command(*world, *asked)
    assert done.returncode == 2
    assert "no setting is recommended here" in done.stderr
