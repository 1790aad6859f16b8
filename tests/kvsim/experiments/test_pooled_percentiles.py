"""Percentiles of all requests of several runs, and how often their intervals contain the true one."""

import math

import numpy as np
import pytest

import kvsim
from kvsim.experiments.estimates import replication_interval
from kvsim.experiments.pooled_percentiles import LatencySketch, pooled_percentile, sketch
from kvsim.experiments.sweep import sweep
from tests.kvsim.experiments.small_sweeps import base


def pooled(runs, share=0.95):
    return pooled_percentile([np.quantile(run, share) for run in runs], [sketch(run) for run in runs], share)


def bursty(rng, runs, requests=150):
    """Latencies of which some runs have several times those of others; shape (runs, requests)."""
    return rng.lognormal(-1, 0.6, (runs, 1)) * rng.gamma(2, 0.3, (runs, requests))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_intervals_cover_the_percentile_of_all_requests(share):
    rng = np.random.default_rng(4)
    truth = np.quantile(bursty(rng, 20_000), share)
    groups = bursty(rng, 5 * 250).reshape(250, 5, 150)
    found = [pooled(runs, share) for runs in groups]
    low, high = np.array([(each.low, each.high) for each in found]).T
    assert ((low <= truth) & (truth <= high)).mean() >= 0.91
    if share > 0.5:  # What t intervals of the runs' own percentiles do not.
        own = [replication_interval(np.quantile(runs, share, axis=1)) for runs in groups]
        assert np.mean([each.excludes(truth) for each in own]) > 0.2


def test_the_estimate_is_the_percentile_of_the_requests_of_all_runs():
    runs = list(bursty(np.random.default_rng(5), 8, 400))
    runs[3] = np.tile(runs[3], 4)  # A run of more requests counts for more.
    for share in (0.5, 0.95, 0.99):
        found = pooled(runs, share)
        assert found.value == pytest.approx(np.quantile(np.concatenate(runs), share), rel=0.02)
        assert found.low < found.value < found.high
        assert found == pooled(runs, share)


@pytest.mark.slow
def test_a_thousand_runs_are_known_well():
    runs = bursty(np.random.default_rng(6), 1000, 60)
    found = pooled(runs)
    assert found.value == pytest.approx(np.quantile(runs, 0.95), rel=0.02)
    assert found.relative < 0.12


def test_few_or_equal_runs():
    run, other = bursty(np.random.default_rng(7), 2)
    single = pooled([run])
    assert (single.value, single.half_width) == (np.quantile(run, 0.95), math.inf)
    same = pooled([run] * 4)
    assert (same.value, same.half_width) == (np.quantile(run, 0.95), 0)
    two, own = pooled([run, other]), replication_interval([np.quantile(each, 0.95) for each in (run, other)])
    assert (two.low, two.high) == (own.low, own.high)
    assert min(run.max(), other.max()) > two.value > min(np.quantile(run, 0.95), np.quantile(other, 0.95))
    nothing = pooled([np.zeros(60), np.zeros(60), run])
    assert nothing.low <= nothing.value <= nothing.high


def test_a_single_request_is_its_own_percentile():
    assert sketch(np.array([2.0])) == LatencySketch(1, [2.0] * len(sketch(np.ones(9)).quantiles))
    found = pooled([np.array([2.0]), np.array([3.0]), np.array([5.0])])
    assert 3.0 < found.value <= 5.0


@pytest.mark.slow
def test_comparisons_and_sweeps_have_the_percentile_of_all_requests(tmp_path):
    """The same one, as the runs are the same: of whole runs, with the seeds that follow the scenario's."""
    scenario = base(requests=80)
    compared = kvsim.compare(kvsim.load(scenario), ["paged", "ring"], replications=4)
    file = {"name": "same", "base": scenario, "policies": ["paged", "ring"], "replications": 4, "warmup": "none"}
    swept = sweep(file, out=tmp_path / "a.sqlite", workers=1)
    for row in swept.table.to_dict("records"):
        seeds = [kvsim.run(kvsim.load(scenario | {"seed": 1 + r}), row["policy"], detail="rows") for r in range(4)]
        for measure in ("ttft_p95", "e2e_p50", "tpot_p99"):
            latency, statistic = measure.split("_")
            known = np.concatenate([run.requests[f"{latency}_s"].dropna() for run in seeds])
            found = compared.verdict.intervals[row["policy"]][measure]
            assert found.value == pytest.approx(np.quantile(known, int(statistic[1:]) / 100), rel=0.05)
            assert found.columns(measure) == {key: row[key] for key in found.columns(measure)}
    best = swept.best("ttft_p95").iloc[0]
    values = swept.table.set_index("policy")["ttft_p95"]
    assert best["value"] == values[best["best"]]
