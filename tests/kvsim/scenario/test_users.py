"""Traffic in its users' own words: the section that is made of it, the requests, and the commands that take it."""

import json
from itertools import pairwise

import numpy as np
import pytest

import kvsim
from kvsim.errors import UserError
from kvsim.experiments.traffic import read_traffic
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.named_workloads import scale_rate
from kvsim.scenario.scenario import load_scenario
from kvsim.scenario.users import users_section
from tests.worlds import command
from workloads import Segment

TWELVE = {"users": 12, "prompt": 6000, "shared": 2000, "output": 300, "think": "30s"}
TYPED = ("--users", "12", "--prompt", "6000", "--shared", "2000", "--output", "300", "--think", "30s")
SERVED = ("--model", "qwen3-14b", "--device", "rtx4090")


def requests_of(**changes):
    scenario = load_scenario({"name": "users", "workload": users_section(**{**TWELVE, **changes})})
    workload = scenario.build_workload()
    return workload, list(workload)


def test_each_prompt_begins_with_the_shared_tokens_and_has_the_mean_that_was_said():
    workload, requests = requests_of()
    assert workload.users == 12
    assert len(requests) == 400
    assert {request.content[0] for request in requests} == {Segment(0, 0, 2000)}
    assert len({request.content[1].source for request in requests}) == 400
    prompts, outputs, thinks = np.array([(r.prompt_tokens, r.output_tokens, r.think_s) for r in requests]).T
    own = prompts - 2000
    assert own.mean() == pytest.approx(4000, rel=0.1)
    assert own.std() / own.mean() == pytest.approx(0.5, rel=0.15)
    assert outputs.mean() == pytest.approx(300, rel=0.1)
    assert thinks.mean() == pytest.approx(30, rel=0.15)
    assert thinks.min() > 0


def test_a_length_may_be_the_same_for_all_or_have_a_spread_of_its_own():
    _, fixed = requests_of(prompt="6000:0", output="300:0")
    assert {(r.prompt_tokens, r.output_tokens) for r in fixed} == {(6000, 300)}
    _, wide = requests_of(prompt="6000:80%")
    assert np.std([r.prompt_tokens for r in wide]) > 1.3 * np.std([r.prompt_tokens for r in requests_of()[1]])


def test_conversations_of_users_grow_turn_by_turn():
    _, requests = requests_of(turns=4, prompt="6000:0", output="300:0", growth="800:0", tool_share=0.5, tool_time="1s")
    later = [(a, b) for a, b in pairwise(requests) if a.session == b.session]
    assert len(later) == 3 * len({r.session for r in requests})
    assert {b.prompt_tokens - a.prompt_tokens for a, b in later} == {800}
    assert all(b.content[: len(a.content) + 1] == (*a.content, a.answer) for a, b in later)
    assert np.mean([b.think_s for _, b in later]) == pytest.approx(15.5, rel=0.2)


def test_a_user_has_one_request_at_a_time_and_keeps_to_his_conversation():
    section = users_section(3, "100:0", "20:0", think="1s", turns=3, growth="50:0")
    served = {"server": {"slots": 3}, "cache": {"cells": 4096}}
    scenario = load_scenario({"workload": {**section, "sessions": 30}, **served})
    rows = kvsim.run(scenario, detail="tables").requests.sort_values("arrival_s")
    assert len(rows) == 90
    began, ended = rows["arrival_s"].to_numpy(), np.sort((rows["arrival_s"] + rows["e2e_s"]).to_numpy())
    # Never more requests than users at a time.
    assert all(i + 1 - np.searchsorted(ended, at, side="right") <= 3 for i, at in enumerate(began))
    by_number = rows.sort_values("id")
    turns = by_number["arrival_s"].to_numpy().reshape(30, 3)
    assert (np.diff(turns, axis=1) > 0).all()


def test_a_higher_load_is_more_users():
    section = users_section(12, 6000, 300, think=30)
    assert scale_rate(section, 1.5) == {**section, "users": 18}
    traffic = read_traffic(load_scenario({"workload": section}), 1, 120, 1.0)
    assert (traffic.users, traffic.largest_factor, traffic.offered) == (12, 10.0, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared": 6000}, "--shared: 6000 of a prompt of 6000 tokens; 0 to 5999 are accepted"),
        ({"prompt": "many"}, "--prompt: 'many': tokens are expected, such as 6000, or 6000:0.8 with their spread"),
        ({"think": "30 days"}, "--think: '30 days': a time is expected, such as 30s, 500ms or 2min"),
        ({"turns": 5}, "--turns: say how much longer each further prompt is too, such as --growth 500"),
        ({"turns": 5, "growth": 300}, "--growth: 300 tokens; a further prompt is longer by the answer before it, 300"),
        ({"growth": 500}, "--growth, --tool-share: of the turns after the first"),
    ],
)
def test_what_cannot_be_asked_takes_one_line(changes, said):
    with pytest.raises(UserError) as caught:
        users_section(**{**TWELVE, **changes})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_the_spread_that_is_assumed_is_said():
    lines = assumptions(load_scenario({"workload": users_section(**TWELVE)}))
    assert any("output_tokens 300, first_tokens 4,000: lognormal, with a standard deviation of 50%" in s for s in lines)
    stated = assumptions(load_scenario({"workload": users_section(12, "6000:0.8", "300:0")}))
    assert not any("lognormal" in line for line in stated)


@pytest.mark.parametrize(
    ("model", "on", "weights"),
    [
        ("qwen3-14b", {}, "fp8"),
        ("qwen3-14b", {"machine__engine": "llamacpp"}, "q4_K_M"),
        ("qwen3-8b", {}, None),
    ],
)
def test_weights_are_smaller_only_where_the_model_s_own_do_not_fit(model, on, weights):
    scenario = load_scenario("chat", model=model, device="rtx4090", **on)
    assert scenario.machine.weights == weights
    said = f"weights in {weights}, since the model's own do not fit (--weights)"
    assert (said in assumptions(scenario)[0]) == (weights is not None)


def test_commands_take_users(tmp_path):
    ran = command("run", *TYPED, *SERVED, "--requests", "24", "--json")
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["completed"] == 24
    shown = command("scenario", "show", *TYPED, *SERVED)
    (tmp_path / "team.toml").write_text(shown.stdout)
    again = command("run", str(tmp_path / "team.toml"), "--requests", "24", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["ttft_s"] == summary["ttft_s"]
    described = command("workload", "describe", *TYPED)
    assert "400 requests in 400 sessions of 12 users, each after the answer to the one before" in described.stdout
    planned = command("plan", "--model", "qwen3-8b", *TYPED)
    assert "12 sequences of 18,209 tokens" in planned.stdout
    drawn = "note: the longest of 400 requests drawn has 18,209 tokens, their mean 6,470"
    assert drawn in planned.stdout
    checked = command("check", "llama-server -c 65536 -np 12", "--model", "qwen3-8b", "--device", "rtx3090", *TYPED)
    assert drawn in checked.stdout
    assert "a request of 18,209 tokens does not fit" in checked.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--users", "12"), "--users: say --prompt too, such as --prompt 6000"),
        (("run", "--prompt", "100"), "--prompt: say --users too, such as --users 12"),
        (("run", *TYPED), "--users: say what serves them, --model and --device, or name a scenario that does"),
        (("plan", "--model", "qwen3-8b", "--ctx", "4096", *TYPED), "--ctx: with --users, as many and as long as"),
        (("check", "llama-server", "--tokens", "9", *TYPED), "--tokens: of the longest request, which --prompt"),
        (("workload", "describe", "chat", *TYPED), "chat, --users: both say what is asked; give one of them"),
        (("recommend", "--slo", "ttft_p95<1s"), "--trace, --scenario, --users: 0 of them; one is expected"),
    ],
)
def test_commands_say_what_is_missing_in_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvsim: {said}")
    assert done.stderr.count("\n") == 1
