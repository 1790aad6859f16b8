"""Recommendations: known best settings are found, results are reproducible, and every setting is accounted for."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import Recommendation, UserError, load_scenario, recommend, run
from kvsim.advice.memory.engine_flags import command_line, flags_dict
from kvsim.advice.recommend.candidates import REASONS, build_search_space, measured_engine
from kvsim.advice.recommend.finalists import RULE, Finalist, rank
from kvsim.advice.recommend.search import Search, SearchBudget
from kvsim.advice.recommend.slo import read_slo
from kvsim.advice.recommend.trials import (
    MOST_DOUBLINGS,
    FindLargestLoad,
    LoadSearch,
    TrialOutcome,
    TrialRun,
    most_doublings,
    run_trial,
)
from kvsim.costs.load_profile import load_profile
from kvsim.experiments.traffic import TrafficSummary, read_traffic
from kvsim.model.memory_shapes import memory_shape
from policies import available
from tests.kvsim.cli.answers import complaint
from tests.worlds import command

SMALL = SearchBudget(10, 2, 4, 3, 3, 2, fewest=30)

BUSY = {
    "name": "busy",
    "workload": {
        "rate": 25.0,
        "requests": 60,
        "prompt_tokens": {"kind": "lognormal", "mu": 4.0, "sigma": 0.5, "min": 4, "max": 150},
        "output_tokens": {"kind": "fixed", "value": 60},
    },
}
"""A request takes about 0.1 s by itself, so a single slot cannot keep up."""
CALMER = {"workload__rate": 12.0}
"""Traffic with which even the few settings of a small search can keep up."""

SHARED = {
    "name": "shared",
    "workload": {
        "kind": "sessions",
        "rate": 3.0,
        "sessions": 20,
        "system_prompts": 1,
        "system_tokens": {"kind": "fixed", "value": 900},
        "turns": {"kind": "fixed", "value": 4},
        "user_tokens": {"kind": "fixed", "value": 20},
        "output_tokens": {"kind": "fixed", "value": 8},
        "think_s": 0.5,
    },
}
"""Long prompts with a common prefix."""

PROFILE = load_profile("default")
SUMMARY = TrafficSummary(100, 700, 500, 400, 200.0, False)


def space_of(
    engine="llamacpp", *, base=None, traffic=None, reuse=False, profile=PROFILE, model="tiny", memory=None, **more
):
    """The settings for some traffic; by default that of ``SUMMARY``."""
    if traffic is not None:
        base, summary = traffic.scenario, traffic.summary
    else:
        base, summary = base or load_scenario({}), replace(SUMMARY, reuse=reuse)
    return build_search_space(base, summary, engine, profile, memory_shape(model), memory, **more)


def ask(source=BUSY, engine="llamacpp", **asked):
    """A small search for a scenario."""
    return recommend(load_scenario(source), **{"engine": engine, "budget": SMALL, "workers": 1, **asked})


BUSY_SLO = {"slo": "ttft_p95<250ms,tpot_p95<20ms"}


@pytest.fixture(scope="module")
def busy():
    return ask(load_scenario(BUSY, **CALMER), **BUSY_SLO)


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


def test_only_types_of_k_and_v_that_the_profile_measured_are_tried():
    for room in (10**9, 30_000_000):
        space = space_of("both", memory=room)
        assert {(c.settings["type_k"], c.settings["type_v"]) for c in space.candidates} == {("f32", "f32")}
    narrow = PROFILE.model_copy(update={"type_k": "q8_0", "type_v": "q8_0"})
    space = space_of("both", profile=narrow)
    assert {c.reason for c in space.candidates if c.engine == "vllm"} == {"engine"}
    assert {c.reason for c in space.candidates if c.engine == "llamacpp"} == {""}


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


def test_every_policy_is_searched_or_left_out_with_a_reason():
    everything = space_of("any")
    searched = {family.keys["cache__policy"] for family in everything.families}
    covered = {"streams", "paged", "layer-groups", "uniform-pages"}
    assert searched | set(everything.policies_left_out) | covered >= set(available())
    assert not searched & set(everything.policies_left_out)
    windows = space_of(model="gemma-3-27b")
    assert {c.scenario.cache.window for c in windows.candidates if c.family == "sliding-window"} == {1024}


@pytest.mark.slow
def test_largest_loads_rise_with_the_limit():
    traffic = read_traffic(load_scenario(BUSY), 2, 40, 1.0)
    candidate = space_of(traffic=traffic).candidates[20]
    for r in range(2):
        loads = [
            FindLargestLoad(traffic, read_slo(f"e2e_p95<{limit}ms"), 3)(
                LoadSearch(TrialRun(0, r, candidate.scenario, 1.0, 1.0))
            )[1]
            for limit in (1, 200, 400, 800, 3200)
        ]
        assert loads == sorted(loads)
        assert loads[0] == 0
        assert loads[-1] > loads[1]


def test_the_largest_load_meets_the_bound_and_a_slightly_larger_one_does_not():
    traffic, slo = read_traffic(load_scenario(BUSY), 1, 60, 1.0), read_slo("ttft_p95<200ms")
    choices = space_of("vllm", traffic=traffic)
    scenario = next(c for c in choices.candidates if c.scenario.server.slots == 4).scenario
    trial = TrialRun(0, 0, scenario, 1.0, 1.0)
    find = FindLargestLoad(traffic, slo, 5)
    _, most, runs = find(LoadSearch(trial))
    assert run_trial(traffic, replace(trial, load=most)).met(slo)
    assert not run_trial(traffic, replace(trial, load=most * 2 ** (1 / 32))).met(slo)
    for about in (-2.0, math.log2(most) - 0.1, math.log2(most), 9.0):
        assert find(LoadSearch(trial, about=about))[1] == most
    assert find(LoadSearch(trial, False, math.log2(most)))[2] < runs


def test_flags_agree_with_the_scenario():
    for c in space_of("both", reuse=True).candidates:
        server, cache, flags = c.scenario.server, c.scenario.cache, flags_dict(c.flags)
        if c.engine == "vllm":
            prefix = "--enable-prefix-caching" if c.settings["prefix_cache"] else "--no-enable-prefix-caching"
            chunked = "--enable-chunked-prefill" if server.chunked_prefill else "--no-enable-chunked-prefill"
            assert flags == {
                "--max-model-len": str(c.scenario.slot_context),
                "--max-num-seqs": str(server.slots),
                "--max-num-batched-tokens": str(server.n_batch),
                "--block-size": str(cache.block_size),
                "--num-gpu-blocks-override": str(cache.cells // cache.block_size),
                prefix: True,
                chunked: True,
            }
            assert c.scenario.slot_context >= 700
        else:
            expected = {
                "--ctx-size": str(cache.cells),
                "--parallel": str(server.slots),
                "--batch-size": str(min(server.n_batch, cache.cells)),
                "--ubatch-size": str(server.n_ubatch),
                "--cache-type-k": "f32",
                "--cache-type-v": "f32",
            }
            if cache.policy == "llama.cpp-b4666":
                expected["--defrag-thold"] = f"{cache.threshold:g}"
                assert "b4666 to b4880" in " ".join(c.notes)
            else:
                expected |= {"--flash-attn": "on", "--cache-ram": str(server.cache_ram)}
                if cache.unified:
                    expected["--kv-unified"] = True
            assert flags == expected
            assert cache.cells % (256 * (1 if cache.unified else server.slots)) == 0


def test_narrow_values_and_windows_have_their_flags():
    narrow = PROFILE.model_copy(update={"type_k": "q4_0", "type_v": "q4_0"})
    gemma = space_of(profile=narrow, model="gemma-3-27b", memory=18 * 2**30, weights="q4_k_m")
    fit = [c for c in gemma.candidates if not c.reason]
    assert fit
    assert all(("--flash-attn", "on") in c.flags for c in fit if "b4666" not in c.family)
    whole = {c.family for c in fit if "--swa-full" in command_line(c.flags)}
    assert whole
    assert "sliding-window" not in whole


def test_windows_of_a_trace_are_disjoint_and_run_like_the_file(tmp_path):
    path = tmp_path / "mine.csv"
    lines = [f"{0.11 * i + 0.01 * (i % 7):.3f},{20 + i % 50},{5 + i % 9}" for i in range(300)]
    path.write_text("arrival,prompt,output\n" + "\n".join(lines) + "\n")
    base = load_scenario({"name": "mine", "workload": {"kind": "table", "path": str(path)}})
    traffic = read_traffic(base, 3, None, 2.0)
    assert [len(window.requests) for window in traffic.windows] == [100, 100, 100]
    assert len({request.id for window in traffic.windows for request in window.requests}) == 300
    assert all(window.requests[0].arrival_s == 0 for window in traffic.windows)
    choices = space_of(traffic=traffic)
    for factor in (1.0, 4.0):
        trial = TrialRun(0, 0, choices.candidates[9].scenario, 1.0, factor)
        ours = run_trial(traffic, trial).measures
        theirs = run(load_scenario(trial.scenario, workload__rate_scale=2.0 * factor), detail="requests").summary
        for key in ("ttft", "tpot", "e2e"):
            assert ours[f"{key}_p95"] == pytest.approx(theirs[f"{key}_s"]["p95"], rel=1e-9)
    short = read_traffic(load_scenario(base, workload__limit=60), 3, None, 1.0)
    assert short.replications == 1
    assert "nothing is known about chance" in short.note


@pytest.mark.slow
def test_a_recommendation_for_a_trace_can_be_run_again(tmp_path):
    path = tmp_path / "mine.csv"
    lines = [f"{0.1 * i:.3f},{20 + i % 50},{5 + i % 9}" for i in range(240)]
    path.write_text("arrival,prompt,output\n" + "\n".join(lines) + "\n")
    found = recommend(trace=path, slo="ttft_p95<300ms", engine="llamacpp", budget=SMALL, requests=60, workers=1)
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


def test_a_batch_has_no_load_to_change():
    found = ask("batch", slo="e2e_p95<60s", requests=30, budget=SMALL._replace(screened=4))
    assert found.met
    assert all(f.sustained is None and not f.loads for f in found.best)
    assert "There is no load to change" in found.conclusion


def test_the_host_cache_is_searched_where_prompts_share_text():
    for reuse, expected in ((True, {0, 8192}), (False, {0}), (None, {8192})):
        space = space_of(reuse=reuse)
        today = [c for c in space.candidates if c.scenario.server.scheduler == "llama-server"]
        assert {c.scenario.unified for c in today} == {True, False}
        assert {c.settings["cache_ram"] for c in today} == expected
        assert {c.settings["cache_ram"] for c in space.candidates if c not in today} == {None}
        assert len({c.label for c in space.candidates if "host cache on" in c.label}) * 2 <= len(space.candidates) * (
            2 if reuse is None else 1
        )


def test_a_scenarios_own_host_cache_is_searched_too():
    space = space_of(reuse=True, base=load_scenario({}, server__cache_ram=512))
    assert {c.host_bytes for c in space.candidates} == {0, 512 * 2**20, 8 * 2**30}


@pytest.mark.parametrize(
    ("measured", "target"),
    [
        ("numpy", None),
        ("llama-server 0.5.0-dev", "llamacpp"),
        ("llama.cpp b8992", "llamacpp"),
        ("llama-cpp-python 0.3.36", "llamacpp"),
        ("vllm 0.32.0", "vllm"),
        ("vLLM 0.10.0", "vllm"),
    ],
)
def test_the_engine_of_a_profile_is_known_by_its_name(measured, target):
    assert measured_engine(PROFILE.model_copy(update={"engine": measured})) == target


def test_the_profile_of_a_live_server_decides_what_is_searched(tmp_path):
    """Neither vLLM nor llama.cpp of early 2025 is what such a user runs."""
    live = PROFILE.model_copy(update={"engine": "llama-server 0.5.0-dev"})
    space = space_of(profile=live)
    assert "llama.cpp-b4666" not in {family.name for family in space.families}
    assert "llama-server 0.5.0-dev" in space.policies_left_out["llama.cpp-b4666"][1]
    (tmp_path / "mine.json").write_text(live.model_dump_json())
    asked = {"slo": "e2e_p95<60s", "requests": 30, "budget": SMALL._replace(screened=2, neighbours=0), "workers": 1}
    found = recommend("batch", profile=str(tmp_path / "mine.json"), **asked)
    assert found.engine == "llamacpp"
    assert {c.engine for c in found.space.candidates} == {"llamacpp"}
    assert any("llama.cpp alone was searched" in line for line in found.limits)
    assert recommend("batch", **asked).engine == "both"


def test_fair_rules_have_no_program():
    fair = load_scenario("batch", server__scheduler="llama-server-fair")
    asked = {"slo": "e2e_p95<60s", "requests": 30, "budget": SMALL._replace(screened=2, neighbours=0), "workers": 1}
    for engine, said in (("llamacpp", True), ("vllm", False)):
        found = recommend(fair, engine=engine, **asked)
        assert any("no program has the scheduler llama-server-fair" in line for line in found.limits) == said


@cache
def choices_of_llamacpp():
    return space_of().candidates


def finalist(number, *values, loads, memory=0, limit=1.0):
    choices = choices_of_llamacpp()
    shares = {"failed_share": 0.0, "truncated_share": 0.0}
    outcomes = tuple(TrialOutcome({"ttft_p95": value, **shares}, True) for value in values)
    candidate = replace(choices[number], memory_bytes=memory)
    return Finalist(candidate, read_slo(f"ttft_p95<{limit}s"), outcomes, loads)


def test_the_ranking_goes_by_certainty_then_load_then_memory():
    sure = finalist(0, 0.4, 0.5, 0.45, loads=(1.1, 1.2, 1.1))
    likely = finalist(1, 0.5, 1.1, 0.7, loads=(3.0, 3.0, 3.0))
    missing = finalist(2, 2.0, 2.1, 2.2, loads=(0.5, 0.5, 0.5))
    more = finalist(3, 0.4, 0.5, 0.45, loads=(2.0, 2.1, 2.0), memory=9)
    equal = finalist(4, 0.4, 0.5, 0.45, loads=(1.95, 2.05, 2.0), memory=5)
    assert [f.verdict for f in (sure, likely, missing)] == ["surely", "likely", "not"]
    order = rank([missing, likely, sure, more, equal])
    assert [f.candidate.number for f in order] == [4, 3, 0, 1, 2]
    assert sure.sustained.value == pytest.approx(math.exp(sum(map(math.log, sure.loads)) / 3))
    assert finalist(0, 0.4, loads=(0.0,)).sustained is None
    assert finalist(0, 0.4, loads=(2.0,)).verdict == "likely"


@given(st.lists(st.tuples(st.floats(0.1, 2), st.floats(0, 4), st.integers(0, 3)), min_size=2, max_size=6))
def test_next_to_each_other_equals_go_by_memory(worlds):
    """Equal is what is within 5 % by load or, where no load is sustained, by the worst bound."""
    made = [
        finalist(i, value, loads=(round(load, 1),), memory=memory) for i, (value, load, memory) in enumerate(worlds)
    ]
    for first, second in pairwise(rank(made)):
        if first.verdict != second.verdict:
            assert first.verdict == "likely"
        elif first.sustained and second.sustained:
            ratio = first.sustained.value / second.sustained.value
            assert ratio >= 0.949
            assert ratio > 1.05 or first.candidate.memory_bytes <= second.candidate.memory_bytes
        elif first.sustained or second.sustained:
            assert first.sustained
        else:
            ratio = second.worst[1] / first.worst[1]
            assert ratio >= 0.949
            assert ratio > 1.05 or first.candidate.memory_bytes <= second.candidate.memory_bytes


def test_the_rule_says_what_counts_where_no_load_is_sustained():
    near, far = finalist(0, 1.5, loads=(0.0,), memory=9), finalist(1, 3.0, loads=(0.0,), memory=1)
    assert rank([far, near]) == [near, far]
    assert "or, where there is none, by the worst bound over its limit" in RULE


def test_of_settings_with_the_same_memory_the_smaller_host_cache_comes_first():
    space = space_of(reuse=True)
    first = next(c for c in space.candidates if c.settings["cache_ram"] == 0)
    large = next(c for c in space.candidates if c.settings["cache_ram"] == 8192)
    made = finalist(0, 0.5, loads=(2.0,))
    without = replace(made, candidate=replace(first, number=7, memory_bytes=5))
    kept = replace(made, candidate=replace(large, number=3, memory_bytes=5))
    assert rank([kept, without]) == [without, kept]


def test_a_server_that_does_not_keep_up_misses_the_slo():
    unstable = TrialOutcome({"ttft_p95": 0.1, "failed_share": 0.0, "truncated_share": 0.0}, settled=False)
    assert not unstable.met(read_slo("ttft_p95<1s"))
    traffic = read_traffic(load_scenario(BUSY), 1, 60, 1.0)
    choices = space_of(traffic=traffic)
    crowded = run_trial(traffic, TrialRun(0, 0, choices.candidates[0].scenario, 1.0, 1000.0))
    assert not crowded.settled


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
        (["--slo", "ttft_p95<1s"], "--trace, --scenario: one of them is needed"),
        (["--slo", "ttft_p95<1s", "--scenario", "chat", "--trace", "x"], "not both"),
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
        *("basis", "interrupted", "met", "conclusion", "compared", "lead", "rule", "best", "searched", "limits"),
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
@pytest.mark.parametrize(
    ("share", "stage"), [(0.0, "screening"), (0.55, "comparing the better"), (0.85, "judging the")]
)
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
    with pytest.raises(UserError, match="give either a scenario or a trace"):
        recommend(slo="ttft_p95<1s")


@pytest.mark.slow
def test_settings_that_met_every_load_go_on_by_memory_even_if_few_loads_can_be_tried():
    """Conversations may not make 64 times their load; what met the most that they do make is equal all the same."""
    traffic = read_traffic(load_scenario(SHARED), 1, 12, 1.0)
    most = most_doublings(traffic)
    assert most < MOST_DOUBLINGS
    space = space_of(traffic=traffic)
    budget = SMALL._replace(screened=16, neighbours=0, kept=3)
    search = Search(traffic, read_slo("ttft_p95<100s"), space, budget, 1, None)
    kept = search._screen()
    assert {search._ladders[c.number].met for c in kept} == {most}
    by_memory = sorted((space.candidates[n] for n in search.tried), key=lambda c: c.memory_order)
    assert min(kept, key=lambda c: c.memory_order) == by_memory[0]
