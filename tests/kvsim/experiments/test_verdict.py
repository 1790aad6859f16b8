"""Conclusions from given numbers, and measures of runs."""

import json
import math

import numpy as np
import pandas as pd
import pytest

import kvsim
from kvsim import UserError
from kvsim.experiments.interval_text import from_to
from kvsim.experiments.measures import (
    MEASURES,
    Objectives,
    latencies_by_arrival,
    measures,
    share_of_requests,
    whole_run_measures,
)
from kvsim.experiments.ranking import pareto, rank
from kvsim.experiments.verdict import judge
from tests.worlds import command


def given(*e2e, **others):
    """Runs of one policy with these mean latencies."""
    keys = {"failed_share": 0.0, "unstable": 0, "too_short": 0, "requests": 400, "memory_bytes": 1e6} | others
    return [{**dict.fromkeys(MEASURES), "e2e_mean": value, **keys} for value in e2e]


COMMON = np.array([1.0, 1.4, 0.8, 1.2, 0.9])


def test_a_conclusion_from_one_run_says_so():
    line = judge({"paged": given(0.88), "fill-holes": given(1.0), "oracle": given(0.8)}).line
    assert line == (
        "paged has the lowest mean end-to-end latency of all policies: 12 % below fill-holes; 1.10 × oracle; "
        "this is one run: ask for --replications 5 to see whether the differences hold"
    )


def test_a_difference_that_holds_has_its_interval():
    noise = np.array([0.01, -0.01, 0.0, 0.005, -0.005])
    verdict = judge({"a": given(*COMMON), "b": given(*(1.2 * COMMON + noise)), "oracle": given(*COMMON)})
    assert verdict.line == (
        "a has the lowest mean end-to-end latency of all policies: 17 % (155 to 269 ms) below b; 1.00 × oracle"
    )
    assert verdict.ranking.holds
    assert verdict.from_best["b"].low > 0
    assert from_to(verdict.from_best["b"], 1e3) in verdict.line, "the interval of the table"
    assert (verdict.from_best["a"].low, verdict.from_best["a"].high) == (0, 0)
    assert verdict.from_bound["a"].value == pytest.approx(1)


def test_a_difference_that_may_be_chance_gives_no_clear_best():
    noise = np.array([0.2, -0.2, 0.1, -0.15, 0.1])
    line = judge({"a": given(*COMMON), "b": given(*(COMMON + noise)), "c": given(*(3 * COMMON))}).line
    assert line == (
        "no clear best: a has the lowest mean end-to-end latency of all policies; no difference that 5 replications "
        "can show: 0.9 % (-260 to 280 ms) below b; clearly 67 % (1,370 to 2,870 ms) below c"
    )


def test_the_oracle_and_failing_policies_are_not_ranked():
    verdict = judge({"drops": given(0.1, failed_share=0.2), "a": given(0.5), "b": given(1.0), "oracle": given(0.2)})
    assert verdict.ranking.best == "a"
    assert "among policies without failed requests" in verdict.line
    assert "; left out: drops failed 80 of 400 requests (20.0 %); --max-failed 20% would include it" in verdict.line
    assert verdict.from_best["drops"].value < 0


def test_policies_that_failed_few_requests_can_be_ranked():
    runs = {"a": given(0.5, failed_share=16 / 400), "b": given(1.0), "c": given(0.1, failed_share=0.5)}
    asked = judge(runs, max_failed=0.05)
    assert asked.line == (
        "a (which failed 4.0 %) has the lowest mean end-to-end latency among policies that failed at most 5 % of the "
        "requests: 50 % below b; left out: c failed 200 of 400 requests (50.0 %); "
        "this is one run: ask for --replications 5 to see whether the differences hold"
    )
    assert asked.to_dict()["not_ranked"] == {"c": "failed 200 of 400 requests (50.0 %)"}
    assert (asked.front, asked.failing) == (("a",), ("a", "c"))
    assert "left out: a failed 16 of 400 requests (4.0 %), c failed" in judge(runs).line
    assert "; --max-failed 4% would include a" in judge(runs).line
    assert judge(runs, max_failed=0.04).ranking.best == "a"


@pytest.mark.parametrize(("given_as", "share"), [("5%", 0.05), ("0.05", 0.05), (0.05, 0.05), ("0", 0), ("100 %", 1)])
def test_shares_of_requests(given_as, share):
    assert share_of_requests("--max-failed", given_as) == pytest.approx(share)


@pytest.mark.parametrize("wrong", ["5", "-1%", "five", "", "101%", "nan", True])
def test_what_is_no_share_is_refused_in_one_line(wrong):
    with pytest.raises(
        UserError, match=r"^--max-failed: '.*': a share of the requests is expected, such as 5% or 0\.05$"
    ):
        share_of_requests("--max-failed", wrong)


def test_identical_policies_are_called_identical():
    runs = {"a": given(0.5), "b": given(0.5), "c": given(1.0)}
    verdict = judge(runs, times={"a": ["x"], "b": ["x"], "c": ["y"]})
    assert verdict.identical == (("a", "b"),)
    assert verdict.line.startswith(
        "a and b are identical in every request and have the lowest mean end-to-end latency of all policies: "
        "50 % below c; this is one run"
    )


def test_more_replications_are_not_asked_for_where_all_policies_are_identical():
    verdict = judge({"a": given(0.5), "b": given(0.5), "oracle": given(0.1)}, times={"a": ["x"], "b": ["x"]})
    assert verdict.line == "no difference: a and b are identical in every request"


def test_equal_means_are_not_identical_requests():
    """The same mean of other requests: nothing but the times of the requests says identical."""
    verdict = judge({"a": given(0.5), "b": given(0.5)}, times={"a": ["x"], "b": ["y"]})
    assert verdict.identical == ()
    assert ": less than 0.1 % below b" in verdict.line
    several = judge({"a": given(0.5, 0.6), "b": given(0.5, 0.6)}, times={"a": ["x", "z"], "b": ["x", "w"]})
    assert several.identical == ()


def test_identical_policies_are_not_told_apart_by_replications():
    verdict = judge(
        {"a": given(*COMMON), "b": given(*COMMON), "c": given(*(2 * COMMON))},
        times={"a": list("vwxyz"), "b": list("vwxyz"), "c": list("12345")},
    )
    assert verdict.ranking.holds
    assert verdict.line.endswith("of all policies: 50 % (760 to 1,360 ms) below c")
    assert (verdict.from_best["b"].low, verdict.from_best["b"].high) == (0, 0)


def test_a_difference_too_small_to_be_shown_is_not_zero():
    assert ": less than 0.1 % below b;" in judge({"a": given(1.0), "b": given(1.0002)}).line
    assert ": more than 99 % below b;" in judge({"a": given(1.0), "b": given(5000.0)}).line


def test_a_policy_that_drops_tokens_is_marked():
    line = judge({"ring": given(0.1), "b": given(0.5)}, ["ring"]).line
    assert line.startswith("ring (which drops tokens) has the lowest")


def test_where_the_best_drops_tokens_the_best_of_the_others_is_named_too():
    runs = {"ring": given(1.0), "paged": given(2.0), "vllm": given(3.0)}
    line = judge(runs, ("ring",)).line
    assert line.startswith("ring (which drops tokens) has the lowest")
    assert "; of those that drop none, paged has the lowest mean end-to-end latency: " in line
    assert "of those that drop none" not in judge(runs, ("vllm",)).line


def test_policies_that_know_lengths_in_advance_are_not_ranked():
    runs = {"first-fit": given(0.5), "buddy": given(0.7), "paged": given(2.0), "vllm": given(3.0)}
    verdict = judge(runs, clairvoyant=("first-fit", "buddy"))
    assert verdict.line.startswith("paged has the lowest")
    assert "left out: first-fit and buddy are told lengths in advance" in verdict.line


def test_identical_replications_support_no_difference():
    verdict = judge({"a": given(1.0, 1.0, 1.0), "b": given(2.0, 2.0, 2.0)})
    assert not verdict.ranking.holds
    assert verdict.line == (
        "a has the lowest mean end-to-end latency of all policies: 50 % below b; all replications are identical: "
        "this workload does not depend on the seed"
    )


def test_unstable_policies_are_not_ranked():
    line = judge({"a": given(0.1, unstable=1), "b": given(0.5), "c": given(0.6)}).line
    assert line.startswith("b has the lowest")
    assert "; left out: a is unstable; this is one run" in line
    assert judge({"a": given(0.1, unstable=1), "b": given(0.5, unstable=1)}).line.startswith(
        "unstable: arrivals outpace"
    )


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ({"a": given(1.0, requests=10), "b": given(2.0)}, "too short: 10 requests say little about latency"),
        ({"a": given(1.0, 1.0, too_short=1), "b": given(2.0, 2.1)}, "too short: under a latencies do not settle"),
        ({"a": given(1.0)}, "a has no competitor: there is nothing to compare it with"),
        ({"a": given(1.0, failed_share=0.5)}, "no conclusion: every policy failed requests"),
        ({"a": given(None, failed_share=1.0)}, "no conclusion: every policy failed requests"),
    ],
)
def test_unsupported_conclusions_are_not_drawn(runs, line):
    assert judge(runs).line.startswith(line)


def test_the_front_of_latency_against_memory():
    assert pareto({"a": (1, 9), "b": (2, 5), "c": (3, 6), "d": (4, 1), "e": (1, 10)}) == ["a", "b", "d"]
    verdict = judge({"a": given(1.0, memory_bytes=9.0), "b": given(2.0, memory_bytes=9.5), "oracle": given(0.1)})
    assert verdict.front == ("a",)
    assert set(verdict.latency_and_memory()) == {"a", "b", "oracle"}


def test_ranking_where_higher_is_better():
    found = rank({"a": [1.0, 2.0], "b": [3.0, 4.5], "c": [2.9, 4.4]}, "throughput_tokens_per_s")
    assert (found.best, found.runner_up) == ("b", "c")
    assert found.comparison.ratios[0].value < 1


def test_only_common_replications_are_compared():
    found = rank({"a": [1.0, 2.0, 99.0], "b": [3.0, 4.0]}, "e2e_mean")
    assert (found.best, found.replications) == ("a", 2)
    with pytest.raises(ValueError, match="no policies"):
        rank({}, "e2e_mean")


# Measures


@pytest.fixture(scope="module")
def chat():
    return kvsim.run(kvsim.load("chat", workload__requests=300), "paged", detail="tables")


@pytest.mark.slow
def test_measures_without_warmup_are_those_of_the_summary(chat):
    full, short = measures(chat, "none"), measures(kvsim.run(chat.scenario, "paged"), "none")
    assert tuple(full) == MEASURES
    for name, value in short.items():
        if value is not None:
            assert full[name] == pytest.approx(value, rel=1e-9), name
    assert 0 < full["memory_bytes"] < full["cache_bytes"]
    assert full["goodput_requests_per_s"] is None


def test_measures_of_a_whole_run_need_no_states(chat):
    rows, whole = kvsim.run(chat.scenario, "paged", detail="rows"), whole_run_measures(chat)
    found = whole_run_measures(rows)
    assert {name: found[name] is None for name in MEASURES} == {name: whole[name] is None for name in MEASURES}
    assert {k: v for k, v in found.items() if v is not None} == pytest.approx(
        {k: v for k, v in whole.items() if v is not None}, rel=1e-9
    )


@pytest.mark.slow
def test_measures_after_a_warmup_need_no_table_of_the_cache(chat):
    for policy in ("paged", "streams", "contiguous", "fill-holes"):
        whole, brief = (kvsim.run(chat.scenario, policy, detail=detail) for detail in ("tables", "rows"))
        for cut in (1, 20, 77):
            assert brief.tables.cache is None
            found, known = ({k: v for k, v in measures(run, cut).items() if v is not None} for run in (brief, whole))
            assert found == pytest.approx(known, rel=1e-9, abs=1e-12), (policy, cut)


def test_measures_after_a_warmup_need_requests(chat):
    with pytest.raises(UserError, match='detail="rows"'):
        measures(kvsim.run(chat.scenario, detail="cache"), 20)


def test_requests_of_the_warmup_do_not_count(chat):
    cut = measures(chat, 50)
    table = chat.requests.sort_values("arrival_s").iloc[50:]
    assert (cut["requests"], cut["warmup_requests"]) == (250, 50)
    assert cut["e2e_p95"] == pytest.approx(table["e2e_s"].quantile(0.95))
    seconds = table["finished_s"].max() - table["arrival_s"].min()
    assert cut["throughput_tokens_per_s"] == pytest.approx(table["output_tokens"].sum() / seconds)
    assert measures(chat, 1000)["e2e_mean"] is None


def test_mser_cuts_where_latencies_settle(chat):
    latencies = latencies_by_arrival(chat.tables.requests)
    assert len(latencies) == 300
    tables = chat.tables
    columns, late = tables.requests.columns, np.append(np.linspace(30, 1, 30), np.zeros(270))
    moved = {name: columns[name] + late for name in ("first_token_s", "finished_s", "e2e_s")}
    slow = tables.requests.with_columns(moved)
    transient = kvsim.Result(chat.scenario, "paged", chat.summary, chat.ended_s, tables._replace(requests=slow))
    found = measures(transient)
    assert 25 <= found["warmup_requests"] <= 40
    assert found["too_short"] == 0


def test_goodput_counts_requests_within_the_objectives(chat):
    all_good, none_good = (measures(chat, "none", Objectives(e2e_s=limit)) for limit in (1e6, 1e-9))
    assert (all_good["slo_share"], none_good["slo_share"]) == (1.0, 0.0)
    half = measures(chat, "none", Objectives(ttft_s=float(chat.requests["ttft_s"].median())))
    assert half["slo_share"] == pytest.approx(0.5, abs=0.01)


def test_a_batch_has_no_warmup():
    batch = kvsim.run(kvsim.load("batch", workload__requests=60), "paged", detail="tables")
    assert measures(batch)["warmup_requests"] == 0


@pytest.mark.parametrize("rule", ["mser", -1])
def test_an_unknown_warmup_rule_is_refused(chat, rule):
    with pytest.raises(UserError, match="accepted: mser-5, none, or a number of requests"):
        measures(chat, rule)


def test_warmup_needs_tables(chat):
    with pytest.raises(UserError, match="warm-up and objectives need tables"):
        measures(kvsim.run(chat.scenario, "paged"))


# kvsim compare


@pytest.fixture
def within(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return command


THREE = ("-p", "paged", "-p", "ring", "-p", "oracle", "--requests", "60")


@pytest.mark.slow
def test_compare_with_replications(within, tmp_path):
    finished = within("compare", "chat", *THREE, "--replications", "3", "--plots")
    assert (finished.returncode, finished.stderr) == (0, "")
    printed = " ".join(finished.stdout.split())
    assert (
        "3 replications, 95% intervals; latencies in milliseconds: the mean of the runs' means, percentiles" in printed
    )
    assert "Conclusion: " in printed
    folder = tmp_path / "results" / "chat"
    table = pd.read_csv(folder / "replications.csv")
    assert table.groupby("policy")["seed"].apply(list).tolist() == [[1, 2, 3]] * 3
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    printed = json.loads((folder / "comparison.json").read_text())
    (third,) = table[(table["policy"] == "paged") & (table["seed"] == 3)]["e2e_mean"]
    alone = kvsim.run(kvsim.load("chat", seed=3, workload__requests=60), "paged").summary["e2e_s"]["mean"]
    assert third == pytest.approx(alone)
    interval = printed["intervals"]["paged"]["e2e_mean"]
    assert interval["low"] < interval["value"] < interval["high"]
    assert printed["e2e_mean_over_oracle_interval"]["oracle"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert printed["e2e_mean_delta_vs_best"].keys() == {"paged", "ring", "oracle"}


def test_compare_once_concludes_too(within):
    printed = json.loads(within("compare", "chat", *THREE, "--json").stdout)
    assert printed["replications"] == 1
    assert "intervals" not in printed
    assert printed["conclusion"].endswith("ask for --replications 5 to see whether the differences hold")
    assert printed["pareto"]


@pytest.mark.slow
def test_compare_finds_identical_policies_request_by_request():
    """vllm and paged do the same under this scheduler; a budget for prompts would tell them apart."""
    scenario = kvsim.load_scenario("chat", workload__requests=60, server__scheduler="llama-server")
    compared = kvsim.compare(scenario, ["vllm", "paged", "contiguous"], snapshots=False, replications=2)
    assert compared.verdict.identical == (("vllm", "paged"),)
    vllm, paged, _ = (result.requests for result in compared.results)
    assert vllm["finished_s"].equals(paged["finished_s"])


@pytest.mark.slow
def test_warnings_that_policies_share_are_given_once():
    scenario = kvsim.load_scenario("chat", workload__requests=200, workload__rate=100.0)
    compared = kvsim.compare(scenario, ["vllm", "paged", "ring"], snapshots=False)
    (warning,) = [line for line in compared.warnings if "unstable" in line]
    assert warning.startswith("3 policies (vllm, paged, ring): unstable: arrivals outpace service; the queue grew by ")


def test_why_requests_failed_is_told_with_its_numbers(within):
    told = within("compare", "chat", "-p", "streams", "-p", "paged", "--requests", "60")
    assert "streams: " in told.stdout
    assert "failed: the prompt is too long for a slot (longest " in told.stdout
    assert "a slot has 256)" in told.stdout
    assert "to try: raise the context limit of a slot" in told.stdout
    told = within("compare", "chat", "-p", "paged", "--max-failed", "5 percent")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)


def test_results_are_those_of_the_first_replication():
    scenario = kvsim.load("chat", workload__requests=30)
    one = kvsim.compare(scenario, ["paged", "ring"], snapshots=False)
    three = kvsim.compare(scenario, ["paged", "ring"], snapshots=False, replications=3)
    assert one.table.equals(three.table)
    assert three.replications == 3
    assert math.isfinite(three.verdict.intervals["ring"]["e2e_p99"].high)
    with pytest.raises(UserError, match="replications: 0; a whole number from 1 to 1000 is accepted"):
        kvsim.compare(scenario, replications=0)


@pytest.mark.slow
def test_a_saved_comparison_has_nothing_of_an_earlier_one(tmp_path):
    short = kvsim.load_scenario("chat", workload__requests=20)
    kvsim.compare(short, ["paged", "contiguous"], replications=2).save(tmp_path)
    (tmp_path / "why.png").write_text("")
    (tmp_path / "mine.txt").write_text("")
    kept = kvsim.compare(short, ["paged"], snapshots=False).save(tmp_path)
    assert {*tmp_path.iterdir()} == {*kept, tmp_path / "mine.txt"}
