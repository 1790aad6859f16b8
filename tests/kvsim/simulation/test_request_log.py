"""What is kept of a run while it goes on: figures of its requests, whether arrivals outpace service, and no more."""

import gc
import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import simpy

from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from kvsim.simulation.request_log import LatencyStats, QueueMonitor
from kvsim.simulation.run import run
from tests.worlds import command
from workloads import Request


def lengths(tokens):
    return {"kind": "fixed", "value": tokens}


def world(rate, requests, **more):
    workload = {"kind": "poisson", "rate": rate, "requests": requests}
    workload |= {"prompt_tokens": lengths(40), "output_tokens": lengths(20)}
    return load_scenario(
        {"workload": workload, "server": {"scheduler": "vllm", "n_batch": 64}, "cache": {"policy": "paged"}, **more}
    )


def test_figures_are_those_of_the_table():
    result = run(world(30.0, 300), detail="tables")
    table, summary = result.requests, result.summary
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert summary[name]["mean"] == pytest.approx(table[name].mean(), rel=1e-12)
        for q in (50, 95, 99):
            assert summary[name][f"p{q}"] == np.quantile(table[name], q / 100)
    assert summary["makespan_s"] == table["finished_s"].max() - table["arrival_s"].min()
    assert summary["output_tokens"] == table["output_tokens"].sum()


def test_means_of_the_cache_are_those_of_the_table():
    result = run(world(30.0, 100), detail="tables")
    cache, figures = result.cache, result.summary["cache"]
    times = np.maximum(cache["time_s"].to_numpy(), result.requests["arrival_s"].min())
    for name, column in (
        ("utilization_mean", "utilization"),
        ("span_cells_mean", "span"),
        ("free_extents_mean", "free_extents"),
    ):
        expected = np.average(cache[column].to_numpy()[:-1], weights=np.diff(times))
        assert figures[name] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["paged", "contiguous", "oracle"])
def test_how_requests_fare_does_not_depend_on_what_is_kept(policy):
    watched, whole, least = (run(world(30.0, 60), policy, detail=d).summary for d in ("cache", "tables", "requests"))
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for summary in (whole, least):
            assert summary[name] == pytest.approx(watched[name], rel=1e-12)
    assert watched["cache"] == pytest.approx(whole["cache"], rel=1e-12)
    assert least["cache"]["utilization_mean"] is None
    assert least["forward_passes"] == watched["forward_passes"]


def test_tables_are_there_when_they_are_asked_for():
    result = run(world(30.0, 5))
    with pytest.raises(UserError, match='ask for them with detail="tables"'):
        _ = result.requests


def test_requests_and_states_can_be_kept_without_passes():
    whole, brief, rows = (run(world(30.0, 60), detail=detail) for detail in ("tables", "states", "rows"))
    pd.testing.assert_frame_equal(brief.requests, whole.requests)
    pd.testing.assert_frame_equal(brief.cache, whole.cache)
    pd.testing.assert_frame_equal(rows.requests, whole.requests, rtol=1e-9)
    with pytest.raises(UserError, match='ask for them with detail="states"'):
        _ = rows.cache
    for table in ("passes", "causes"):
        with pytest.raises(UserError, match=r'not kept; ask for (them|it) with detail="tables"'):
            getattr(brief, table)


def test_what_else_could_be_kept_is_refused():
    with pytest.raises(UserError, match="no detail called 'all'; there are requests, cache, rows, states, tables"):
        run(world(30.0, 5), detail="all")


def test_a_failed_request_counts_but_has_no_latency():
    latencies = LatencyStats()
    good, bad = (Job(Request(i, 1.0, 4, 2), 1.0 + i) for i in range(2))
    good.status, good.first_token_s, good.finished_s, good.generated = "completed", 2.0, 3.0, 2
    bad.status, bad.finished_s = "failed", 9.0
    latencies.add(good)
    latencies.add(bad)
    summary = latencies.summary()
    assert (summary["requests"], summary["completed"], summary["failed"], summary["makespan_s"]) == (2, 1, 1, 8.0)
    assert summary["e2e_s"] == {"mean": 2.0, "p50": 2.0, "p95": 2.0, "p99": 2.0}


def test_nothing_can_be_said_of_nothing():
    summary = LatencyStats().summary()
    assert summary["makespan_s"] == 0
    assert summary["throughput_tokens_per_s"] is None
    assert set(summary["ttft_s"].values()) == {None}


def fill(queue, waiting, ended):
    """All of 400 arrive; at each quarter so many wait, and so many have ended."""
    for at in range(1, 401):
        quarter = at // 100 - 1
        if at % 100 == 0:
            queue.admitted = at - waiting[quarter]
        queue.arrive(ended[quarter] if at % 100 == 0 else 0)


@pytest.mark.parametrize(
    ("waiting", "ended", "growth", "unstable"),
    [
        ([60, 125, 190, 250], [40, 75, 110, 150], 125 / 200, True),
        ([5, 3, 8, 4], [90, 190, 290, 390], 1 / 200, False),
        ([60, 120, 50, 180], [40, 75, 110, 150], 60 / 200, False),  # it drained between
        ([100, 200, 300, 400], [0, 0, 0, 0], None, False),  # a batch: no request was served meanwhile
        ([1, 10, 20, 45], [90, 180, 270, 350], 35 / 200, False),  # within what a Poisson stream does
    ],
)
def test_a_queue_that_grows_all_the_time_is_unstable(waiting, ended, growth, unstable):
    queue = QueueMonitor(400)
    fill(queue, waiting, ended)
    assert queue.growth == growth
    assert queue.unstable is unstable
    assert bool(queue.warnings()) is unstable


def test_of_a_few_requests_nothing_is_said():
    queue = QueueMonitor(20)
    for _ in range(20):
        queue.arrive(10)
    assert queue.summary() == {"waiting_at_last_arrival": None, "growth_per_arrival": None, "unstable": False}


def test_overload_is_reported():
    calm, crowded = (run(world(rate, 400), detail="requests") for rate in (5.0, 300.0))
    assert not calm.summary["queue"]["unstable"]
    assert crowded.summary["queue"]["unstable"]
    assert not [line for line in calm.warnings if "unstable" in line]
    assert "unstable: arrivals outpace service" in crowded.warnings[-1]


def test_the_command_line_can_be_asked_for_less():
    out = command("run", "chat", "--requests", "20", "--policy", "paged", "--detail", "requests", "--json")
    assert json.loads(out.stdout)["cache"]["utilization_mean"] is None
    shown = command("run", "chat", "--requests", "20", "--policy", "paged", "--detail", "requests").stdout
    assert "0 failed allocations" in shown
    assert "of the cells used" not in shown
    assert command("run", "chat", "--detail", "all").returncode == 2


def peak(requests, **workload):
    scenario = load_scenario(world(20.0, requests), **workload)
    gc.collect()
    tracemalloc.start()
    run(scenario, detail="requests")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.slow
def test_memory_does_not_grow_with_what_has_passed():
    run(world(20.0, 50), detail="requests")
    # Requests are drawn, and latencies settled, 4,096 at a time. 24 bytes a request are latencies, a Job has hundreds.
    assert peak(9_000) - peak(5_000) < 4_000 * 60


@pytest.mark.slow
def test_sessions_leave_nothing_behind():
    def scenario(sessions):
        return load_scenario("assistant", workload__sessions=sessions, workload__rate=2.0)

    def most(sessions):
        gc.collect()
        tracemalloc.start()
        run(scenario(sessions), "paged", detail="requests")
        _, top = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return top

    most(10)
    assert most(240) - most(60) < 180 * 3000


def test_what_runs_leave_does_not_pile_up():
    """Cycles that hold each run's arrays are few objects: where they are among the oldest, Python hardly ever looks."""

    def clocks():
        return sum(type(each) is simpy.Environment for each in gc.get_objects())

    gc.collect()
    before = clocks()
    for _ in range(60):
        run(world(30.0, 5))
    assert clocks() < before + 30


def test_pythons_collector_is_left_as_it_was():
    before = gc.get_threshold()
    run(world(30.0, 5))
    assert gc.get_threshold() == before
