"""Recommendations: known best settings are found, results are reproducible, and every setting is accounted for."""

import json
from collections import Counter

import pandas as pd
import pytest

from kvsim import Recommendation, UserError, load_scenario, recommend, run
from kvsim.advice.memory.engine_flags import flags_dict
from kvsim.advice.recommend.candidates import REASONS
from kvsim.advice.recommend.search import SearchBudget
from kvsim.advice.recommend.trials import most_doublings
from tests.kvsim.advice.recommend.worlds import BUSY, BUSY_SLO, CALMER, SHARED, SMALL, ask
from tests.kvsim.cli.answers import complaint
from tests.worlds import command


@pytest.fixture(scope="module")
def busy():
    return ask(load_scenario(BUSY, **CALMER), **BUSY_SLO)


@pytest.mark.slow
def test_the_engines_defaults_are_judged_on_a_machine_too():
    """Of a model without a context of its own, whose context is the scenario's cells."""
    tiny = SMALL._replace(screened=2, neighbours=0, kept=2, best=2, replications=1)
    found = ask({**BUSY, "cache": {"cells": 4096}}, "both", **BUSY_SLO, budget=tiny, memory="4GiB")
    llamacpp, vllm = (f.candidate for f in found.fixed)
    assert (llamacpp.family, vllm.family) == ("llama.cpp's defaults", "vLLM's defaults")
    made = llamacpp.scenario
    assert (made.cache.cells, made.server.slots, made.unified, made.server.scheduler) == (4096, 4, True, "llama-server")
    made = vllm.scenario
    assert (made.server.slots, made.n_batch, made.slot_context, made.cache.policy) == (256, 2048, 4096, "vllm")
    left = 0.92 * 2**32 - made.cache.cells * made.cell_bytes
    assert 2**29 < left < 2**31, "cells are what weights, buffers and others leave of the memory"
    assert not vllm.reason
    assert len(found.gains) == 2
    assert [f.candidate.family for f in ask(BUSY, **BUSY_SLO, budget=tiny).fixed] == ["llama.cpp's defaults"]


@pytest.mark.slow
def test_too_few_slots_queue_and_are_ruled_out():
    every = SearchBudget(999, 0, 2, 1, 2, 1, fewest=40)
    found = ask(slo="ttft_p95<250ms", requests=40, budget=every)
    assert found.met
    assert found.best[0].candidate.scenario.server.slots >= 4
    single = found.candidates[found.candidates["slots"] == 1]
    assert set(single["reason"]) == {"slo"}
    assert (single["factor"].dropna() > 1).all()


@pytest.mark.slow
def test_settings_that_exceed_the_memory_are_never_run():
    room = 30_000_000
    found = ask(engine=None, slo="ttft_p95<2s", memory=room)
    table = found.candidates
    assert found.reasons["memory"] > 0
    assert (table[table["reason"] != "memory"]["memory_bytes"] <= room).all()
    assert (table[table["reason"] == "memory"]["memory_bytes"] > 0.9 * room).all()
    assert all("needs " in detail for detail in table[table["reason"] == "memory"]["detail"])


@pytest.mark.slow
def test_shared_prefixes_need_the_prefix_cache():
    found = ask(SHARED, "vllm", slo="ttft_p95<60ms")
    assert found.met
    assert found.best[0].candidate.settings["prefix_cache"]
    assert "--enable-prefix-caching" in flags_dict(found.best[0].candidate.flags)
    table = found.candidates
    plain = table[(table["family"] == "vllm, no prefix cache") & (table["reason"] != "untried")]
    assert len(plain)
    assert set(plain["reason"]) == {"slo"}


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers(busy):
    again = ask(load_scenario(BUSY, **CALMER), **BUSY_SLO, workers=2)
    assert json.dumps(again.to_dict()) == json.dumps(busy.to_dict())
    pd.testing.assert_frame_equal(again.candidates, busy.candidates)


@pytest.mark.slow
def test_every_setting_is_among_the_best_or_has_a_reason(busy):
    assert sum(busy.reasons.values()) + len(busy.best) == len(busy.space.candidates) == len(busy.candidates)
    assert set(busy.reasons) <= set(REASONS)
    assert Counter(busy.candidates["reason"])[""] == len(busy.best)
    untouched = sum(busy.reasons.get(reason, 0) for reason in ("memory", "untried"))
    assert busy.tried == len(busy.space.candidates) - untouched
    assert {"contiguous", "paged", "ring", "oracle"} <= set(busy.space.policies_left_out)
    assert busy.space.policies_left_out["ring"][0] == busy.space.policies_left_out["h2o"][0] == "forgets"


@pytest.mark.slow
def test_a_recommendation_for_a_trace_can_be_run_again(tmp_path):
    path = tmp_path / "mine.csv"
    lines = [f"{0.1 * i:.3f},{20 + i % 50},{5 + i % 9}" for i in range(240)]
    path.write_text("arrival,prompt,output\n" + "\n".join(lines) + "\n")
    with pytest.raises(UserError, match="--model: a trace does not say which model serves; name it"):
        recommend(trace=path, slo="ttft_p95<300ms")
    asked = {"slo": "ttft_p95<300ms", "engine": "llamacpp", "budget": SMALL, "requests": 60, "workers": 1}
    found = recommend(trace=path, model="tiny", **asked)
    # The tail of these lengths is short: room for what was not seen costs little.
    assert found.traffic.summary.longest < found.traffic.summary.needed < 2 * found.traffic.summary.longest
    assert found.limits[0].startswith("context: room for ")
    names = [file.name for file in found.save(tmp_path / "out")]
    assert names[:4] == ["recommendation.json", "recommendation.csv", "candidates.csv", "recommendation.png"]
    assert names[4:] == [f"best-{place}.toml" for place in range(1, len(found.best) + 1)]
    again = run(tmp_path / "out" / "best-1.toml", detail="requests").summary
    assert again["ttft_s"]["p95"] == pytest.approx(found.best[0].outcomes[0].measures["ttft_p95"])
    assert len(pd.read_csv(tmp_path / "out" / "candidates.csv")) == len(found.candidates)


@pytest.mark.slow
def test_if_nothing_meets_the_slo_the_nearest_setting_is_shown_with_its_limit():
    found = ask(engine="vllm", slo="tpot_p95<1ms")
    assert not found.met
    assert found.conclusion.startswith("Nothing meets tpot_p95<1ms. The nearest setting is vllm serve ")
    assert "It misses tpot_p95<1ms most, by " in found.conclusion
    assert all(f.verdict == "not" for f in found.best)
    nothing = ask(engine=None, slo="ttft_p95<1s", memory=1 << 20)
    assert nothing.conclusion.startswith("Nothing can be recommended: all ")
    assert nothing.to_dict()["best"] == []
    assert nothing.compared == ""


@pytest.mark.slow
def test_a_batch_has_no_load_to_change():
    found = ask("batch", slo="e2e_p95<60s", requests=30, budget=SMALL._replace(screened=4))
    assert found.met
    assert all(f.sustained is None and not f.loads for f in found.best)
    assert "There is no load to change" in found.conclusion


@pytest.mark.slow
def test_a_load_in_users_is_said_in_users_and_an_edge_is_said():
    loop = {**BUSY, "workload": {**BUSY["workload"], "kind": "closed-loop", "users": 20}}
    del loop["workload"]["rate"]
    found = ask(loop, slo="tpot_p95<12ms", budget=SMALL._replace(best=1))
    load = found.best[0].sustained.value
    assert f" {int(load * 20)} users" in found.conclusion
    assert not any(" × were not tried" in line for line in found.limits)
    most = int(20 * 2.0 ** most_doublings(found.traffic))
    runs_dry = "users were not tried: a run has 60 requests, and each user needs one"
    assert any(line == f"more than {most} {runs_dry}" for line in found.limits)
    c = found.best[0].candidate
    ends = {64: "64/64 is the least", 2048: "2048/512 is the most"}
    said = [line for line in found.limits if line.startswith("tokens in a batch: ")]
    assert bool(said) == (c.scenario.server.n_batch in ends)


@pytest.mark.slow
def test_the_object_and_tables_are_complete(busy, tmp_path):
    assert isinstance(busy, Recommendation)
    printed = busy.to_dict()
    assert json.loads(json.dumps(printed, allow_nan=False)) == printed
    assert busy.conclusion.startswith("Run llama-server --ctx-size ")
    first = printed["best"][0]
    assert {"place", "engine", "verdict", "settings", "flags", "measures", "sustained_load", "memory_bytes"} <= set(
        first
    )
    assert first["measures"]["ttft_p95"]["limit"] == 0.25
    assert printed["lead"]["measure"] == "load"
    assert list(busy.table["place"]) == [1, 2, 3]
    assert {"ttft_p95", "ttft_p95_low", "ttft_p95_high", "sustained_load", "flags"} <= set(busy.table)
    assert any("memory" in line for line in busy.limits)
    assert busy.plot().axes


@pytest.mark.slow
def test_a_higher_load_leaves_a_smaller_multiple():
    asked = {"slo": "ttft_p95<250ms", "engine": "vllm", "budget": SMALL._replace(screened=8)}
    once, twice = ask(**asked), ask(load=2.0, **asked)
    assert twice.scenario.workload.rate == 50.0
    assert max(f.score for f in twice.best) < max(f.score for f in once.best)


CHAT = ("--scenario", "chat", "--slo", "ttft_p95<1s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft_p95<1s"], "--trace, --scenario, --users: 0 of them; one is expected"),
        (
            ["--slo", "ttft_p95<1s", "--scenario", "chat", "--trace", "x"],
            "--trace, --scenario, --users: 2 of them; one is expected",
        ),
        (["--scenario", "chat"], "--slo: missing; a service level such as"),
        (["--scenario", "chat", "--slo", "ttft_p95"], "is not a bound; bounds such as"),
        (["--scenario", "nope", "--slo", "ttft_p95<1s"], "nope: no such file"),
        (["--trace", "nope.csv", "--slo", "ttft_p95<1s"], "nope.csv: no such file"),
        ([*CHAT, "--engine", "x"], "there are llamacpp, vllm, both, any"),
        ([*CHAT, "--memory", "8XB"], "a size such as 8GB"),
        ([*CHAT, "--model", "nope"], "no model called 'nope'; there are tiny, small"),
        ([*CHAT, "--load", "0"], "--load is 0.0; a number from"),
        ([*CHAT, "--load", "nan"], "--load is nan; a number from"),
        ([*CHAT, "--requests", "0"], "--requests is 0; at least 1"),
        ([*CHAT, "--workers", "0"], "--workers is 0; at least 1"),
        ([*CHAT, "--profile", "nope"], "nope: no such file, and not a shipped"),
        (["--scenario", "batch", "--slo", "ttft_p95<1s", "--load", "2"], "there is no load to change"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in complaint(command("recommend", *arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_prints_and_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recommend.__kwdefaults__, "budget", SMALL._replace(screened=6, neighbours=0, best=2))
    asked = ["--scenario", "chat", "--slo", "ttft_p95<1s,failed<5%", "--requests", "40", "--workers", "1"]
    printed = command("recommend", *asked, "--json")
    assert printed.returncode == 0
    assert not list(tmp_path.iterdir())
    found = json.loads(printed.stdout)
    assert list(found) == [
        *("command", "scenario", "seed", "engine", "load", "slo", "memory_bytes", "model", "device", "tensor_parallel"),
        *("profile", "traffic"),
        *("basis", "interrupted", "met", "conclusion", "compared", "offer", "fleet", "fleet_in_words"),
        *("lead", "rule", "best", "fixed", "gains"),
        *("searched", "limits"),
    ]
    shown = command("recommend", *asked)
    first, *others = shown.stdout.splitlines()
    assert first.startswith("Times are those of profile default: model tiny")
    assert found["conclusion"] in others
    assert "ruled out:" in shown.stdout
    for f in found["best"]:
        assert f["typed"] in shown.stdout
    saved = json.loads((tmp_path / "results" / "recommend-chat" / "recommendation.json").read_text())
    assert saved == found


@pytest.mark.slow
@pytest.mark.parametrize(("share", "stage"), [(0.0, "screening"), (0.4, "comparing the better"), (0.85, "judging the")])
def test_an_interrupt_ends_the_search_with_what_is_known_so_far(busy, share, stage):
    """A stage that has not begun makes no runs; provisional finalists come from the last finished runs."""

    def stop(done, total, failed):
        if done >= share * busy.runs:
            raise KeyboardInterrupt

    found = ask(load_scenario(BUSY, **CALMER), **BUSY_SLO, progress=stop)
    assert stage in found.interrupted
    assert found.conclusion.startswith(f"Interrupted {found.interrupted}, after {found.runs} runs. ")
    assert found.best
    assert found.to_dict()["interrupted"] == found.interrupted
    assert any("interrupted" in line for line in found.limits)
    assert len(found.best) + len(found.ruled_out) == len(found.space.candidates)


def test_an_interrupt_before_the_first_result_is_an_interrupt(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("kvsim.advice.recommend.search.map_unordered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(slo="ttft_p95<250ms")


@pytest.mark.slow
def test_each_note_and_warning_is_given_once(busy):
    lines = [*busy.notes, *busy.limits]
    assert len({line.split(": ", 1)[1] for line in lines if line.startswith("place")}) == len(
        [line for line in lines if line.startswith("place")]
    )


def test_python_needs_exactly_one_source():
    with pytest.raises(UserError, match="give either a scenario, a trace or users"):
        recommend(slo="ttft_p95<1s")
