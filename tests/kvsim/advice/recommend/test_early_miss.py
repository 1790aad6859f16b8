"""Runs that have missed a service level are ended, and no others."""

import pytest

from kvsim.advice.recommend.early_miss import MissedEarly, MissWatch
from kvsim.advice.recommend.slo import read_slo
from kvsim.advice.recommend.trials import TrialRun, run_trial
from kvsim.experiments.traffic import read_traffic
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.job import Job
from workloads import Request

BUSY = load_scenario("chat", workload__requests=80, workload__rate=14.0, server__slot_context=768)


def finished(number, ttft=1.0, tokens=3, e2e=5.0, status="completed", truncated=False):
    job = Job(Request(number, 0.0, 4, tokens), 0.0)
    job.status, job.first_token_s, job.finished_s, job.generated, job.truncated = status, ttft, e2e, tokens, truncated
    return job


def ended_until_certain(slo, jobs, total):
    """How many of the jobs had ended when it was certain that the level is missed; None if it never was."""
    watch = MissWatch(read_slo(slo), total)
    for i, job in enumerate(jobs, 1):
        try:
            watch(job)
        except MissedEarly:
            return i
    return None


@pytest.mark.parametrize(
    ("slo", "job", "least"),
    [
        ("ttft_p95<500ms", {}, 6),  # Of 100 values, rank 94.05 is the quantile: 6 above make sure of it, 5 do not.
        ("ttft_p50<500ms", {}, 51),
        ("ttft_p95<2s", {}, None),
        ("ttft_p95<500ms", {"status": "failed"}, 1),
        ("tpot_p99<1s", {}, 2),
        ("tpot_p99<1s", {"tokens": 1}, None),
        ("e2e_mean<1s", {}, 21),
        ("e2e_p95<9s,failed<10%", {"status": "failed"}, 11),
        ("e2e_p95<9s", {"truncated": True}, 1),
        ("e2e_p95<9s,truncated<1%", {"truncated": True}, 2),
    ],
)
def test_when_it_is_certain(slo, job, least):
    assert ended_until_certain(slo, [finished(i, **job) for i in range(100)], 100) == least


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["ttft_p95<100ms,tpot_p95<4ms", "e2e_mean<300ms", "e2e_p50<150ms", "ttft_p99<60ms"])
def test_the_verdict_is_that_of_the_whole_run(slo):
    traffic, level = read_traffic(BUSY, 1, 80, 1.0), read_slo(slo)
    seen = set()
    for policy in ("paged", "contiguous"):
        for load in (0.25, 0.5, 1.0, 2.0):
            trial = TrialRun(0, 0, load_scenario(BUSY, cache__policy=policy), 1.0, load)
            met = run_trial(traffic, trial).met(level)
            assert run_trial(traffic, trial, level).met(level) == met
            seen.add(met)
    assert seen == {True, False}
