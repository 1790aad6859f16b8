"""Conclusions from given numbers, and measures of runs."""

import json
import math

import numpy as np
import pandas as pd
import pytest

import kvsim
from kvsim import UserError
from kvsim.experiments.measures import MEASURES, Objectives, latencies_by_arrival, measures
from kvsim.experiments.verdict import judge, pareto, rank
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
        "a has the lowest mean end-to-end latency of all policies: 17 % (16 to 17 %) below b; 1.00 × oracle"
    )
    assert verdict.ranking.holds
    assert verdict.from_best["b"].low > 0
    assert (verdict.from_best["a"].low, verdict.from_best["a"].high) == (0, 0)
    assert verdict.from_bound["a"].value == pytest.approx(1)


def test_a_difference_that_may_be_chance_gives_no_single_best():
    noise = np.array([0.2, -0.2, 0.1, -0.15, 0.1])
    line = judge({"a": given(*COMMON), "b": given(*(COMMON + noise)), "c": given(*(3 * COMMON))}).line
    assert line == (
        "no single best: a has the lowest mean end-to-end latency of all policies, but 5 replications cannot "
        "distinguish it from b; all others are slower"
    )


def test_the_oracle_and_failing_policies_are_not_ranked():
    verdict = judge({"drops": given(0.1, failed_share=0.2), "a": given(0.5), "b": given(1.0), "oracle": given(0.2)})
    assert verdict.ranking.best == "a"
    assert "among policies without failed requests" in verdict.line
    assert "1 with failed requests left out" in verdict.line
    assert verdict.from_best["drops"].value < 0


def test_a_policy_that_drops_tokens_is_marked():
    line = judge({"ring": given(0.1), "b": given(0.5)}, ["ring"]).line
    assert line.startswith("ring (which drops tokens) has the lowest")


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
    assert "1 unstable left out" in line
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


def test_measures_without_warmup_are_those_of_the_summary(chat):
    full, short = measures(chat, "none"), measures(kvsim.run(chat.scenario, "paged"), "none")
    assert tuple(full) == MEASURES
    for name, value in short.items():
        if value is not None:
            assert full[name] == pytest.approx(value, rel=1e-9), name
    assert 0 < full["memory_bytes"] < full["cache_bytes"]
    assert full["goodput_requests_per_s"] is None


def test_requests_of_the_warmup_do_not_count(chat):
    cut = measures(chat, 50)
    table = chat.requests.sort_values("arrival_s").iloc[50:]
    assert (cut["requests"], cut["warmup_requests"]) == (250, 50)
    assert cut["e2e_p95"] == pytest.approx(table["e2e_s"].quantile(0.95))
    seconds = table["finished_s"].max() - table["arrival_s"].min()
    assert cut["throughput_tokens_per_s"] == pytest.approx(table["output_tokens"].sum() / seconds)
    assert measures(chat, 1000)["e2e_mean"] is None


def test_mser_cuts_where_latencies_settle(chat):
    latencies = latencies_by_arrival(chat.requests)
    assert len(latencies) == 300
    tables = chat.tables
    slow = tables.requests.copy()
    slow.loc[:29, ["first_token_s", "finished_s"]] += np.linspace(30, 1, 30)[:, None]
    slow["e2e_s"] = slow["finished_s"] - slow["arrival_s"]
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
    finished = within("compare", "chat", *THREE, "--replications", "3")
    assert (finished.returncode, finished.stderr) == (0, "")
    printed = " ".join(finished.stdout.split())
    assert "3 replications, 95% intervals (t)" in printed
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


def test_results_are_those_of_the_first_replication():
    scenario = kvsim.load("chat", workload__requests=30)
    one = kvsim.compare(scenario, ["paged", "ring"], snapshots=False)
    three = kvsim.compare(scenario, ["paged", "ring"], snapshots=False, replications=3)
    assert one.table.equals(three.table)
    assert three.replications == 3
    assert math.isfinite(three.verdict.intervals["ring"]["e2e_p99"].high)
    with pytest.raises(UserError, match="replications: 0; a whole number from 1 to 1000 is accepted"):
        kvsim.compare(scenario, replications=0)
