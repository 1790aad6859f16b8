"""Runs of settings: the largest load, the windows of a trace, and servers that do not keep up."""

import math
from dataclasses import replace

import pytest

from kvsim import UserError, load_scenario, run
from kvsim.advice.recommend.search import Search
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
from kvsim.experiments.traffic import read_traffic
from tests.kvsim.advice.recommend.worlds import BUSY, SHARED, SMALL, space_of


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


@pytest.mark.slow
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


def test_requests_that_no_model_holds_are_left_out_of_every_replication():
    traffic = read_traffic(load_scenario(BUSY), 2, 60, 1.0)
    assert traffic.within(traffic.summary.longest, "its context") is traffic
    within = traffic.within(130, "its context")
    assert within.summary.longest <= 130 < traffic.summary.longest
    for r in within.search_replications:
        _, requests = within.part(load_scenario(BUSY), r, 1.0, 2.0)
        assert 0 < max(q.prompt_tokens + q.output_tokens for q in requests) <= 130
        assert requests.n_requests < 60
    assert "need more than the 130 tokens of its context" in within.beyond
    with pytest.raises(UserError, match=r"100.0% of the requests \(120 of 120\) need more"):
        traffic.within(10, "its context")


def test_a_server_that_does_not_keep_up_misses_the_slo():
    unstable = TrialOutcome({"ttft_p95": 0.1, "failed_share": 0.0, "truncated_share": 0.0}, settled=False)
    assert not unstable.met(read_slo("ttft_p95<1s"))
    traffic = read_traffic(load_scenario(BUSY), 1, 60, 1.0)
    choices = space_of(traffic=traffic)
    crowded = run_trial(traffic, TrialRun(0, 0, choices.candidates[0].scenario, 1.0, 1000.0))
    assert not crowded.settled


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
