"""Where no profile speaks for the model, nothing is said of times: memory is, and how to get the times."""

import json
import shlex

import pytest

from kvsim import compare, load_scenario, recommend, run
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.costs.memory_plan import plan
from kvsim.errors import NoTimes, UserError
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

SLO = "ttft_p99<1s,tpot_p99<50ms"
TIMES = ("TTFT P", "TPOT P", "sustains", "surely", "likely", " x ", "meets")
"""Words of an answer that knows times."""


@pytest.fixture(scope="module")
def llama():
    return recommend("chat", slo=SLO, model="llama-3.1-8b", weights="q4_k_m", memory="16GB")


def test_a_profile_of_another_model_gives_no_times(llama):
    assert isinstance(llama, MemoryAnswer)
    assert llama.no_times.startswith("no times for llama-3.1-8b: profile default was measured on tiny; ")
    assert "kvsim calibrate" in llama.no_times
    assert llama.met is None
    assert llama.conclusion.startswith(f"Whether {llama.slo.text} can be met is unknown. 14.90 GiB holds ")


@pytest.mark.parametrize("name", ["longest", "p95", "mean"])
def test_what_fits_is_what_the_memory_plan_says(llama, name):
    length = getattr(llama.traffic.summary, name)
    for fit in llama.fits:
        ctx = -(-length // 256) * 256 if fit.engine == "llamacpp" else -(-length // 1)
        asked = {"type_k": fit.type_k, "type_v": fit.type_v, "engine": fit.engine, "weights": "q4_k_m"}
        n = getattr(fit, name)
        assert plan("llama-3.1-8b", ctx=int(ctx), parallel=n, **asked).fits(fit.engine, 16 * 10**9)
        if n < 256 or fit.engine == "vllm":
            assert not plan("llama-3.1-8b", ctx=int(ctx), parallel=n + 1, **asked).fits(fit.engine, 16 * 10**9)
        if name == "longest":
            assert plan("llama-3.1-8b", ctx=int(ctx), parallel=n, **asked).total(fit.engine) == fit.memory_bytes


def test_what_is_typed_is_for_the_users_that_were_asked_for(llama):
    """The most that fit are shown, and settings are typed for those asked for."""
    for fit in llama.fits:
        typed = dict(fit.flags)
        assert typed.get("--parallel", typed.get("--max-num-seqs")) == ("4" if fit.engine == "llamacpp" else "256")
        assert fit.longest > 4
    assert any("how many users there are is not said" in line for line in llama.limits)
    users = load_scenario("chat", workload={"kind": "closed-loop", "users": 12})
    asked = recommend(users, slo=SLO, model="llama-3.1-8b", weights="q4_k_m", memory="24GiB", engine="llamacpp")
    assert {dict(fit.flags)["--parallel"] for fit in asked.fits} == {"12"}
    assert not any("how many users" in line for line in asked.limits)


@pytest.mark.parametrize(("users", "kind"), [(2, "f16"), (18, "q8_0")])
def test_narrower_types_are_typed_only_where_they_hold_more_of_the_users(users, kind):
    lengths = {"prompt_tokens": {"kind": "fixed", "value": 6000}, "output_tokens": {"kind": "fixed", "value": 100}}
    traffic = load_scenario("chat", workload={"kind": "closed-loop", "users": users, **lengths})
    found = recommend(traffic, slo=SLO, model="llama-3.1-8b", weights="q4_k_m", memory="10GiB", engine="llamacpp")
    (typed,) = found.typed
    held = {fit.type_k: fit.longest for fit in found.fits if fit.type_k == fit.type_v}
    assert 2 < held["f16"] < held["q8_0"] < held["q4_0"]
    assert (typed.type_k, dict(typed.flags)["--parallel"]) == (kind, str(min(users, held[kind])))


def test_without_a_memory_it_says_what_some_numbers_of_requests_need():
    found = recommend("chat", slo=SLO, model="llama-3.1-8b", engine="vllm")
    assert [fit.longest for fit in found.fits] == [1, 4, 16, 64]
    assert sorted(fit.memory_bytes for fit in found.fits) == [fit.memory_bytes for fit in found.fits]
    assert "no memory was given" in found.limits[-1]


def test_a_memory_too_small_for_the_weights_holds_nothing():
    found = recommend("chat", slo=SLO, model="llama-3.1-8b", memory="8GB")
    assert {fit.longest for fit in found.fits} == {0}
    assert {fit.flags for fit in found.fits} == {()}


@pytest.mark.slow
def test_the_command_says_first_that_there_are_no_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ("recommend", "--scenario", "chat", "--slo", SLO, "--model", "llama-3.1-8b", "--memory", "80GB")
    printed = command(*asked)
    assert printed.returncode == 0
    assert printed.stdout.startswith("No times for llama-3.1-8b: ")
    assert not [word for word in TIMES if word in printed.stdout]
    assert command("report", "results/recommend-chat").returncode == 0
    page = (tmp_path / "results/recommend-chat/report.html").read_text()
    assert "No times for llama-3.1-8b" in page
    found = json.loads(command(*asked, "--json").stdout)
    assert found["met"] is None
    assert found == json.loads((tmp_path / "results/recommend-chat/recommendation.json").read_text())


@pytest.mark.slow
def test_a_trace_without_a_model_is_answered_for_the_profiles_own_and_says_so(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("arrival,prompt,output\n" + "".join(f"{i},20,5\n" for i in range(60)))
    asked = {"trace": path, "slo": SLO, "memory": 1 << 20, "profile": "default"}
    assert recommend(**asked).basis.startswith("A trace names no model, so tiny is assumed (--model). Times are those")
    assert recommend(**asked, model="tiny").basis.startswith("Times are those of profile default: model tiny")


SCENARIO = """
name = "mine"
[model]
name = "llama-3.1-8b"
"""
SWEEP = """
scenario = "mine.toml"
policies = ["paged"]
[axes]
"server.slots" = [2, 4]
"""


@pytest.mark.parametrize("line", ["run mine.toml", "compare mine.toml", "why mine.toml", "sweep sweep.toml"])
def test_every_command_says_what_memory_says_and_nothing_of_times(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SCENARIO)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    printed = command(*line.split())
    assert (printed.returncode, printed.stdout) == (2, "")
    why, memory = printed.stderr.splitlines()
    assert "no times for llama-3.1-8b: profile default was measured on tiny; " in why
    assert "memory of llama-3.1-8b, 16,384 cells for 4 slots" in memory
    assert "weights 14.96 GiB" in memory
    assert not (tmp_path / "results").exists()


def test_the_error_carries_the_scenario():
    asked = load_scenario({"model": {"name": "small"}})
    with pytest.raises(NoTimes, match="no times for small") as raised:
        run(asked)
    assert raised.value.scenario == asked


def test_other_types_of_k_and_v_have_no_times_either():
    with pytest.raises(
        NoTimes, match="no times for K in q8_0 and V in q8_0: profile default was measured with K in f32"
    ):
        compare(load_scenario({"cache": {"type_k": "q8_0", "type_v": "q8_0"}}), ["paged"])


def test_the_command_asks_the_same_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("ts,in,out\n" + "".join(f"{i},20,5\n" for i in range(60)))
    asked = [
        "--trace",
        "mine.csv",
        "--columns",
        "arrival=ts,prompt=in,output=out",
        "--slo",
        SLO,
        "--model",
        "llama-3.1-8b",
    ]
    first = json.loads(command("recommend", *asked, "--json").stdout)
    again = json.loads(command(*shlex.split(first["command"])[1:], "--json").stdout)
    assert again == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-3.1-8b", "--weights", "banana"], "--weights: no type called 'banana'"),
        (["--weights", "q4_K_M"], "--weights: name the model whose weights these are (--model)"),
        (["--model", "llama-3.1-8b", "--memory", "80"], "--memory is 80 bytes; at least 1 MiB is expected"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_not_answered(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(command("recommend", "--scenario", "chat", "--slo", SLO, *options))


def test_nothing_of_an_earlier_answer_is_left_in_the_folder(tmp_path):
    for name in ("recommendation.json", "best-1.toml", "best-12.toml", "candidates.csv", "mine.toml"):
        (tmp_path / name).write_text("{}")
    recommend("chat", slo=SLO, model="llama-3.1-8b").save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"recommendation.json", "recommendation.csv", "mine.toml"}


def test_failed_calls_of_a_trace_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = [
        f"{i},ChatGPT,{0 if i == 7 else 20},{0 if i == 7 else 5},{0 if i == 7 else 25},API log\n" for i in range(60)
    ]
    (tmp_path / "calls.csv").write_text(head + "".join(rows))
    asked = ["recommend", "--trace", "calls.csv", "--slo", SLO, "--model", "llama-3.1-8b", "--json"]
    refused = command(*asked)
    assert refused.returncode == 2
    assert "--drop-failed" in refused.stderr
    found = json.loads(command(*asked, "--drop-failed").stdout)
    assert found["command"].endswith("--drop-failed")
    assert any("1 failed call dropped" in line for line in found["limits"])


def test_what_cannot_be_removed_is_reported_in_one_line(tmp_path):
    (tmp_path / "recommendation.json").write_text("{}")
    (tmp_path / "best-1.toml").mkdir()
    with pytest.raises(UserError, match="cannot write results: "):
        recommend("chat", slo=SLO, model="llama-3.1-8b").save(tmp_path)
