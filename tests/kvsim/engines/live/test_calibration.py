"""Calibration of servers over HTTP, on one whose steps take known times."""

import json
import os

import numpy as np
import pytest

from kvsim.costs.cost_model import CostModel
from kvsim.costs.load_profile import load_profile
from kvsim.engines.live import measuring, steps_seen
from kvsim.engines.live.address import Address
from kvsim.engines.live.bounded import Deadline
from kvsim.engines.live.calibration import calibrate_server
from kvsim.engines.live.load_measurement import is_busy
from kvsim.engines.live.load_runs import samples_of
from kvsim.engines.live.measuring import measure_server
from kvsim.engines.live.served import LiveServer, Served, find_server
from kvsim.engines.live.settings import ServerSettings
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.run import run
from kvsim.simulation.set_up import build_policy
from policies import Chunk
from policies.placement.rule import PassReads
from tests.kvsim.cli.answers import complaint
from tests.kvsim.engines.live.fake_server import fake_server
from tests.kvsim.engines.live.own_time import own_time
from tests.kvsim.engines.live.stepping_server import STEP_S, SteppingServer
from tests.kvsim.engines.live.test_calibration_samples import SCENARIO, staircase
from tests.worlds import command

FLAGS = "-np 2 -c 4096 -t 1 -fa on"
LONG_S = 120.0
"""More than any of these takes; they end by what they have seen."""


@pytest.fixture
def ends_when_seen(monkeypatch):
    """Calibrations end when they have seen so many steps of each kind."""

    def end(steps):
        def ended(is_known):
            return lambda found: min(measuring._kinds(measuring.samples_in(found)).values()) >= steps

        monkeypatch.setattr(measuring, "_ending", ended)

    return end


def prices(profile, scenario):
    """The price of a step by its chunks, on an empty cache whose sequences first get what the chunks begin behind."""

    def price(*chunks):
        policy = build_policy(scenario)
        for chunk in chunks:
            if chunk.start:
                policy.allocate([Chunk(chunk.seq, 0, chunk.start)])
        passes = CostModel(profile).pass_price(policy.kernel, policy.groups)
        return sum(passes.seconds(PassReads.of(batch)) for batch in policy.allocate(chunks))

    return price


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-server", "vllm"])
def test_the_fit_recovers_the_costs_of_the_steps(kind, tmp_path, ends_when_seen):
    ends_when_seen(60)
    with fake_server(SteppingServer(kind=kind)) as server, own_time(server):
        flags = FLAGS if kind == "llama-server" else "--max-num-seqs 2 --max-num-batched-tokens 2048"
        found = find_server(server.url, model="smollm2", flags=flags)
        done = calibrate_server(found, seconds=LONG_S, journal=tmp_path / "p.part")
    assert set(done.profile.held_out) == {"decode", "mixed"}
    assert done.profile.served_as == (("fake.gguf",) if kind == "llama-server" else ("fake",))
    price, ratios = prices(done.profile, found.served.scenario), {"alone": [], "both": [], "prompt": []}
    for prompt, contexts, seconds in server.steps:
        if not prompt:
            step = [Chunk(seq, cells - 1, 1) for seq, cells in enumerate(contexts)]
            ratios["alone" if len(step) == 1 else "both"].append(price(*step) / seconds)
        elif len(contexts) == 1:
            ratios["prompt"].append(price(Chunk(0, 0, prompt)) / seconds)
    for name, each in ratios.items():
        assert len(each) > 5
        # A prompt alone is never seen apart from the front end where the server tells no times.
        assert np.median(each) == pytest.approx(1, abs=0.005 if name != "prompt" or kind == "llama-server" else 0.1)
    assert done.profile.front_end_s is not None
    assert done.profile.front_end_s.value < 1e-6
    assert not done.shared
    done.plot()


@pytest.mark.slow
def test_the_prompts_of_a_server_that_serves_one_at_a_time_are_known_by_their_first_tokens(tmp_path, ends_when_seen):
    ends_when_seen(60)
    with fake_server(SteppingServer(kind="vllm")) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags="--max-num-seqs 1 --max-num-batched-tokens 2048")
        done = calibrate_server(found, seconds=LONG_S, journal=tmp_path / "p.part")
    assert {len(contexts) for _, contexts, _ in server.steps} == {1}
    price = prices(done.profile, found.served.scenario)
    ratios = [price(Chunk(0, 0, prompt)) / took for prompt, _, took in server.steps if prompt > 1]
    # Those of one token, by which the front end is known, are few.
    assert ratios == pytest.approx([1] * len(ratios), abs=0.05)
    # A second sequence was never seen.
    assert price(Chunk(0, 99, 1), Chunk(1, 99, 1)) > price(Chunk(0, 99, 1))
    assert [line for line in done.profile.assumed if "one was served at once" in line]


@pytest.mark.slow
def test_a_client_without_a_processor_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(steps_seen, "_AT_ONCE_S", 1.0)  # All steps of the stand-in are shorter.
    with fake_server(SteppingServer(kind="vllm")) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags="--max-num-seqs 2")
        with pytest.raises(
            UserError, match=r"0 decode steps and 0 mixed steps .* [89].% of the tokens came at once with"
        ):
            measure_server(found, Deadline(3.0), bool, journal=tmp_path / "p.part")


@pytest.mark.slow
def test_the_command_saves_a_profile_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_server(SteppingServer(key="secret")) as server, own_time(server):
        monkeypatch.setenv("MY_KEY", "secret")
        told = ["--url", server.url, "--model", "smollm2", "--flags", FLAGS, "--key-env", "MY_KEY"]
        said = command("calibrate", *told, "--seconds", "25", "--bound", "2", "--out", "mine.profile.json")
        assert said.returncode == 0, said.stderr
    assert "kvsim recommend --trace" in said.stdout
    assert "secret" not in said.stdout + said.stderr
    assert "and mine.calibration.png" in said.stdout
    assert (tmp_path / "mine.calibration.png").exists()
    assert not (tmp_path / "mine.profile.json.part").exists()
    profile = load_profile("mine.profile.json")
    assert profile.engine == "llama-server b1-fake"
    assert profile.why_no_times("smollm2", "q8_0", "f16").endswith("measure it with: kvsim calibrate --url URL")
    assert "secret" not in profile.model_dump_json()
    served = {
        "workload": {"kind": "poisson", "rate": 2.0, "requests": 10},
        "model": {"name": "smollm2"},
        "server": {"slots": 2},
        "cache": {"policy": "llama.cpp-b6975", "cells": 4096, "type_k": "f16", "type_v": "f16"},
        "machine": {"profile": str(tmp_path / "mine.profile.json")},
    }
    assert run(load_scenario(served), detail="requests").summary["ttft_s"]["p50"] > STEP_S


@pytest.mark.slow
def test_a_calibration_goes_on_where_the_server_went(tmp_path, ends_when_seen):
    ends_when_seen(40)
    journal = tmp_path / "p.part"
    with fake_server(SteppingServer(faulty_from=8, is_gone=True)) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        with pytest.raises(UserError, match=server.url):
            calibrate_server(found, seconds=LONG_S, journal=journal)
        port = server.port
    kept = journal.read_text(encoding="utf-8").splitlines()
    assert len(kept) > 1
    with fake_server(SteppingServer(port=port)) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        done = calibrate_server(found, seconds=LONG_S, journal=journal)
    assert done.resumed == len(kept) - 1
    assert journal.read_text(encoding="utf-8").splitlines()[: len(kept)] == kept


@pytest.mark.slow
def test_what_others_disturb_is_left_out_and_said(tmp_path):
    noticed = []
    with fake_server(SteppingServer(others=50, faulty_from=6)) as server, own_time(server):
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        with pytest.raises(UserError, match="others used the server"):
            measure_server(found, Deadline(4.0), bool, journal=tmp_path / "p.part", notice=noticed.append)
    assert noticed == [f"{server.url}: computed 50 tokens for others beside ours, which then say little"]
    runs = [json.loads(line) for line in (tmp_path / "p.part").read_text(encoding="utf-8").splitlines()[1:]]
    assert all(each["shared"] for each in runs)


def test_samples_of_a_shared_run_count_for_nothing():
    seen = staircase([(20, 5)], 0.01, 0.05)
    assert samples_of(seen, SCENARIO).samples
    assert not samples_of(seen.model_copy(update={"shared": True}), SCENARIO).samples


@pytest.mark.parametrize(
    ("url", "threads", "after", "busy"),
    [
        ("http://127.0.0.1:1", 1, (102, 1200), True),
        ("http://127.0.0.1:1", 1, (180, 1200), False),
        # Of another machine nothing is known, nor where the server has all processors, nor without a count.
        ("http://10.0.0.1:1", 1, (102, 1200), False),
        ("http://127.0.0.1:1", 4, (102, 1200), False),
        ("http://127.0.0.1:1", 1, None, False),
        ("http://127.0.0.1:1", 1, (100, 1000), False),
    ],
)
def test_other_work_is_seen_where_it_takes_what_the_server_leaves(url, threads, after, busy, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    settings = ServerSettings(api="llama-server", engine="llama-server b1")
    assert is_busy(LiveServer(Address(url), settings, Served(SCENARIO, threads, ())), (100, 1000), after) is busy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "http://10.0.0.1:1"], "10.0.0.1: not an address of this machine; --allow-remote"),
        (["--url", "ftp://127.0.0.1"], "not the address of a server"),
        (["--url", "http://127.0.0.1:9", "--key-env", "NO_SUCH_KEY"], "--key-env NO_SUCH_KEY: there is no such"),
        (["--url", "http://127.0.0.1:9", "--engine", "llamacpp"], "--engine: a server is measured as it runs"),
        (["--flags", "-np 4"], "--flags: only with --url"),
        (["--allow-remote"], "--allow-remote: only with --url"),
    ],
)
def test_bad_input_is_one_line(options, said):
    assert "NO_SUCH_KEY" not in os.environ
    assert said in complaint(command("calibrate", *options))


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({}, {}, "cannot be read here; say what it is by --model"),
        ({}, {"model": "smollm2", "flags": "-np 7"}, "--flags says 7 slots .--parallel., but the server has 2"),
        ({}, {"model": "smollm2", "flags": "-np x"}, "a whole number is expected"),
        ({}, {"model": "smollm2", "flags": '-np "4'}, "No closing quotation"),
        ({}, {"model": "no-such-model"}, "no-such-model"),
        ({"key": "k"}, {"model": "smollm2"}, "wants a key"),
    ],
)
def test_what_a_server_or_its_flags_do_not_say(keys, options, said):
    with fake_server(**keys) as server, pytest.raises(UserError, match=said):
        find_server(server.url, **options)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"refuses": 500}, "no, not this one"),
        ({"cuts_at": 3}, "cut off"),
        ({"answers_at_most": 4}, "answered with 4 tokens where 12 were asked for"),
        ({"says": "nonsense"}, "not of llama-server"),
        ({"is_gone": True}, "127.0.0.1"),
    ],
)
def test_a_server_that_does_not_do_what_is_asked_is_named(keys, said, tmp_path):
    with fake_server(**keys) as server:
        found = find_server(server.url, model="smollm2", flags=FLAGS)
        with pytest.raises(UserError, match=said):
            calibrate_server(found, seconds=10.0, journal=tmp_path / "p.part")
