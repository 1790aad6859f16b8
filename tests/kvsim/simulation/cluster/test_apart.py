"""Prefill and decode on servers of their own: who waits for what to the second, queues as in theory, and no leaks."""

import tomllib
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import simpy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvsim import compare, sweep, why
from kvsim.errors import UserError
from kvsim.reports.run_report import run_report
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.arrivals import send
from kvsim.simulation.cluster.apart import ApartCluster
from kvsim.simulation.cluster.exchange import Exchange
from kvsim.simulation.cluster.replica import LocalClock, LocalInbox, Replica
from kvsim.simulation.cluster.routers import make_router
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import QueueMonitor, RequestLog
from kvsim.simulation.run import run
from kvsim.simulation.schedulers import apart
from kvsim.simulation.set_up import build_policy
from kvsim.simulation.time_breakdown import SECONDS
from tests.kvsim.simulation.cluster.test_cluster import figures
from tests.kvsim.simulation.random_runs import workloads
from tests.worlds import Given, GivenTimes, scenario
from workloads import Fixed, Request, Segment, Synthetic, poisson_gaps

MS = 0.004
"""A server that has nothing to compute looks every millisecond, and a few looks may be needed."""
ROUTERS = ("round-robin", "least-load", "vllm-router/cache_aware", "vllm/data-parallel", "clairvoyant")


def story(requests, *, prefill=1, decode=1, blocks=20, slots=4, link_s=1.0, latency_s=0.0, seconds=None, **keys):
    """Serve requests on servers with blocks of four tokens; a pass takes a second, a block ``link_s`` on the link.

    ``blocks``: of each decode server, or of a prefill and of a decode server.
    """
    env, log = simpy.Environment(), RequestLog(keeps=True)
    by_role = blocks if isinstance(blocks, tuple) else (100, blocks)
    worlds = [
        scenario(
            **{
                "server__scheduler": "vllm",
                "server__slots": slots,
                "cache__policy": "vllm",
                "cache__block_size": 4,
                "cache__cells": 4 * (n + 1),
                **keys,
            }
        )
        for n in by_role
    ]
    block_bytes = 4 * worlds[0].cell_bytes
    exchange = Exchange(np.inf if link_s == 0 else block_bytes / link_s / 1e9, latency_s)
    prefills = [True] * prefill + [False] * decode
    rng = np.random.default_rng(0)
    routers = [lambda truth, n=n: make_router("round-robin", n, rng) for n in (prefill, decode)]
    cluster = ApartCluster(env, tuple(routers), log, QueueMonitor(), prefills, exchange)
    clock, backend = LocalClock(), GivenTimes(seconds or (lambda batch: 1.0))
    replicas = []
    for i, first in enumerate(prefills):
        world = worlds[0 if first else 1]
        recorder = Recorder(requests=RequestLog(ended=partial(cluster.ended, i)))
        inbox = LocalInbox(clock)
        replicas.append(Replica(world, build_policy(world), recorder, backend, 0.0, inbox=inbox, make=apart))
        exchange.join(replicas[-1])
    cluster.replicas = replicas
    cluster.run(send, Given(requests) if isinstance(requests, list) else requests)
    check_nothing_is_left(cluster)
    return exchange, {job.request.id: job for job in log.jobs}


def check_nothing_is_left(cluster):
    for replica in cluster.replicas:
        scheduler = replica.server.scheduler
        for left in (scheduler.held, scheduler._read_s, scheduler.reads.under_way, scheduler.reads.sources):
            assert not left
        assert replica.policy.sequences() == []
        assert replica.policy.usage().allocated == 0
        assert replica.in_flight == 0


def asks(number, at, prompt, output=1, source=None):
    content = () if source is None else (Segment(source, 0, prompt - 1), Segment(100 + number, 0, 1))
    return Request(number, at, prompt, output, content=content)


def test_a_request_visits_two_servers():
    """Prefilled at 1 s; three blocks are read until 4 s, the last of which is not full; then come its two tokens."""
    exchange, jobs = story([asks(0, 0.0, 9, output=2)])
    job = jobs[0]
    assert (job.arrival_s, job.started_s) == (0.0, 0.0)
    assert [job.first_token_s, job.finished_s] == pytest.approx([5.0, 6.0], abs=MS)
    assert [moved.reads for moved in exchange.moved] == [1, 1]
    assert [moved.cells for moved in exchange.moved] == [12, 12]
    assert exchange.moved[0].held_s == pytest.approx(3.0, abs=MS)


def test_reads_follow_one_another_over_the_cards_of_both_servers():
    """Both are prefilled in one step. One prefill server: the second read waits; two: only if one server reads both."""
    two = [asks(0, 0.0, 12), asks(1, 0.0, 12)]
    waits = []
    for prefill, decode in ((1, 1), (1, 2), (2, 1), (2, 2)):
        exchange, jobs = story(two, prefill=prefill, decode=decode)
        waits.append(sum(moved.link_wait_s for moved in exchange.moved[prefill:]))
        last = 5.0 if waits[-1] == 0 else 8.0
        assert max(job.first_token_s for job in jobs.values()) == pytest.approx(last, abs=MS)
    assert waits == pytest.approx([3.0, 3.0, 3.0, 0.0], abs=MS)


def test_the_latency_passes_beside_other_reads():
    two = [asks(0, 0.0, 12), asks(1, 0.0, 12)]
    _, jobs = story(two, latency_s=10.0)
    assert [jobs[i].first_token_s for i in (0, 1)] == pytest.approx([15.0, 18.0], abs=MS)


def test_a_request_that_finds_no_blocks_at_its_decode_server_waits_and_its_prefill_server_holds_them():
    """Six blocks: the first request needs four of them until 7 s, and the second has four read only from then on."""
    exchange, jobs = story([asks(0, 0.0, 12, output=3), asks(1, 0.0, 13)], blocks=6)
    assert jobs[0].finished_s == pytest.approx(7.0, abs=MS)
    assert jobs[1].first_token_s == pytest.approx(12.0, abs=MS)
    assert exchange.moved[1].block_wait_s == pytest.approx(6.0, abs=2 * MS)
    assert exchange.moved[0].held_s == pytest.approx(3.0 + 10.0, abs=2 * MS)


def test_what_is_held_is_not_given_to_others():
    """Six blocks at the prefill server: the first request's three are read from 1 s to 4 s, the second needs four."""
    _, jobs = story([asks(0, 0.0, 12), asks(1, 0.5, 13)], blocks=(6, 20))
    assert jobs[1].started_s == pytest.approx(4.0, abs=MS)
    _, roomy = story([asks(0, 0.0, 12), asks(1, 0.5, 13)], blocks=(7, 20))
    assert roomy[1].started_s == pytest.approx(1.0, abs=MS)


def test_only_what_a_decode_server_lacks_is_read():
    """The second prompt begins as the first, whose full blocks its decode server still has."""
    exchange, jobs = story([asks(0, 0.0, 9, source=1), asks(1, 20.0, 9, source=1)])
    assert exchange.moved[1].cells == 12 + 4
    assert jobs[1].cached == 8  # At the prefill server.
    assert jobs[1].first_token_s - 20.0 == pytest.approx(1.0 + 1.0 + 1.0, abs=MS)


def test_a_preempted_request_computes_its_prompt_itself():
    """Eight blocks hold both prompts and two tokens each; then one must give way, and nothing is read again."""
    exchange, jobs = story([asks(0, 0.0, 14, output=12), asks(1, 0.0, 14, output=12)], blocks=8, link_s=0.1)
    assert sum(job.preemptions for job in jobs.values()) > 0
    assert exchange.moved[1].reads == 2
    assert all(job.generated == 12 for job in jobs.values())


def test_a_refusal_of_the_decode_server_gives_the_blocks_back():
    exchange, jobs = story([asks(0, 0.0, 40), asks(1, 0.0, 8)], blocks=5)
    assert jobs[0].status == "failed"
    assert jobs[1].status == "completed"
    assert exchange.moved[1].reads == 1


def test_over_an_infinite_link_a_request_waits_for_the_next_step_alone():
    exchange, jobs = story([asks(0, 0.0, 100, output=3)], blocks=30, link_s=0.0)
    assert exchange.moved[1].link_wait_s == exchange.moved[1].link_s == 0.0
    assert jobs[0].finished_s == pytest.approx(1.0 + 3.0, abs=MS)


@pytest.mark.slow
def test_the_link_is_a_queue_with_fixed_service():
    """M/D/1: the mean wait is load / (2 (1 - load)) services. Passes take no time, and reads a second."""
    n, load, waits = 400, 0.6, []
    for seed in range(5):
        stream = Synthetic(seed, n, poisson_gaps(load), Fixed(8), Fixed(1))
        exchange, _ = story(stream, blocks=400, slots=256, link_s=0.5, seconds=lambda batch: 0.0)
        waits.append(exchange.moved[1].link_wait_s / n)
    error = np.std(waits, ddof=1) / np.sqrt(len(waits))
    assert abs(np.mean(waits) - load / (2 * (1 - load))) < 4 * error
    assert error < 0.15


@st.composite
def apart_scenarios(draw):
    """Small caches, so that requests wait for blocks on both sides and are preempted."""
    server = {
        "scheduler": "vllm",
        "slots": draw(st.sampled_from([1, 3, 8])),
        "n_batch": draw(st.sampled_from([8, 64, 400])),
        "slot_context": 160,
        "async_scheduling": draw(st.booleans()),
        "reserve_full": draw(st.booleans()),
        "long_prefill_threshold": draw(st.sampled_from([0, 10])),
    }
    groups = [
        {"role": role, "count": draw(st.integers(1, 2)), "cache": {"cells": draw(st.sampled_from([192, 400, 2000]))}}
        for role in ("prefill", "decode")
    ]
    return load_scenario(
        {
            "name": "random",
            "seed": draw(st.integers(0, 1000)),
            "workload": draw(workloads()),
            "server": server,
            "cache": {
                "policy": draw(st.sampled_from(["vllm", "paged"])),
                "cells": 2000,
                "block_size": draw(st.sampled_from([4, 16])),
                "prefix_cache": draw(st.booleans()),
                "watermark": draw(st.sampled_from([0.0, 0.1])),
            },
            "cluster": {
                "servers": groups,
                "router": draw(st.sampled_from(ROUTERS)),
                "decode_router": draw(st.sampled_from(ROUTERS)),
                "link_gb_s": draw(st.sampled_from([0.0005, 0.01, 100.0])),
                "link_latency_s": draw(st.sampled_from([0.0, 0.05])),
            },
        }
    )


class Kept(ApartCluster):
    """Keeps the last cluster that was made."""

    def __init__(self, *args):
        super().__init__(*args)
        Kept.last = self


@given(apart_scenarios())
@settings(deadline=None, max_examples=18, phases=(Phase.explicit, Phase.generate))
def test_all_requests_end_nothing_leaks_and_each_byte_is_a_block_that_was_read(random_scenario):
    with patch("kvsim.simulation.cluster.run.ApartCluster", Kept):
        result = run(random_scenario, detail="tables")
    s, rows, cluster = result.summary, result.requests, Kept.last
    assert rows["id"].tolist() == list(range(random_scenario.build_workload().n_requests))
    assert set(rows["status"]) <= {"completed", "failed"}
    check_nothing_is_left(cluster)
    decode = [number for number, role in enumerate(random_scenario.cluster.roles) if role == "decode"]
    size, done = random_scenario.cache.block_size, rows[rows["status"] == "completed"]
    found = sum(cluster.replicas[number].recorder.counts.prefix.found for number in decode)
    blocks = (-(-done["prompt_tokens"] // size)).sum() - found // size
    assert s["cluster"]["apart"]["bytes"] == int(blocks * size * random_scenario.cell_bytes)
    sent = sum(server["bytes"] for server in s["cluster"]["servers"] if server["role"] == "prefill")
    assert sent == s["cluster"]["apart"]["bytes"]
    assert (s["host"]["chunk_tokens"], s["host"]["load_wait_s"]) == (0, 0.0)
    causes = result.causes
    assert causes["id"].tolist() == done["id"].tolist()
    assert np.allclose(causes[SECONDS].sum(axis=1), done["e2e_s"], rtol=1e-6, atol=1e-9)
    assert (done["first_token_s"] >= done["started_s"]).all()
    assert (done["started_s"] >= done["arrival_s"]).all()


@pytest.mark.slow
@given(apart_scenarios())
@settings(deadline=None, max_examples=18, phases=(Phase.explicit, Phase.generate))
def test_servers_that_run_ahead_change_nothing(random_scenario):
    policy = random_scenario.cache.policy
    ahead = figures(run, random_scenario, policy)
    # The control: each server stops at every event of any other.
    with patch.object(LocalInbox, "horizon_s", lambda inbox: float(inbox._env.now)):
        assert figures(run, random_scenario, policy, most_steps=1) == ahead


TWO = [{"role": "prefill"}, {"role": "decode", "count": 2}]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"cluster": {"servers": [{"role": "prefill"}]}}, "roles are prefill; prefill needs decode"),
        ({"cluster": {"servers": [{"role": "decode"}, {}]}}, "roles are both and decode; prefill needs decode"),
        ({"cluster": {"servers": [{"role": "fill"}]}}, "cluster.servers.0.role"),
        ({"cluster": {"replicas": 2, "link_gb_s": 3.0}}, "link_gb_s, link_latency_s: no server has role"),
        ({"cluster": {"servers": TWO}}, "cluster.link_gb_s: say how fast the link is, since no device is named"),
        ({"server": {"scheduler": "static"}}, "server.scheduler is static; prefill and decode apart are as in vllm"),
        (
            {"cache": {"policy": "contiguous"}},
            "contiguous: blocks of full attention, and none in host memory, are read",
        ),
        ({"cache": {"policy": "vllm", "host_cells": 160}}, "none in host memory"),
        (
            {"cluster": {"servers": [TWO[0], {**TWO[1], "cache": {"block_size": 8}}], "link_gb_s": 1.0}},
            "cache.block_size, cache.type_k, cache.type_v",
        ),
    ],
)
def test_what_cannot_be_apart_is_said(keys, line):
    usual = {
        "server": {"scheduler": "vllm"},
        "cache": {"policy": "vllm"},
        "cluster": {"servers": TWO, "link_gb_s": 1.0},
    }
    with pytest.raises(UserError) as fault:
        run({"name": "wrong", **usual, **keys})
    assert line in str(fault.value)


ON_H100 = {
    "name": "apart",
    "workload": {"kind": "poisson", "requests": 40, "rate": 20.0},
    "model": {"name": "llama-3.1-8b"},
    "machine": {"device": "h100_sxm"},
    "cluster": {"servers": TWO},
}


def test_the_link_of_a_device_is_its_data_sheets_and_that_is_said():
    result = run(ON_H100)
    assert result.summary["cluster"]["apart"]["link_gb_s"] == 450
    assert any("450 GB/s of each device in each direction" in line for line in result.summary["assumed"])
    report = run_report(result)
    assert (
        "1 server to prefill behind round-robin and 2 servers to decode behind round-robin, each with" in report.title
    )
    said = load_scenario(ON_H100, cluster__link_gb_s=50.0, cluster__link_latency_s=0.001)
    assert not any("of the link" in line for line in run(said).summary["assumed"])


HERE = {
    "name": "apart",
    "workload": {"kind": "poisson", "requests": 20, "rate": 20.0},
    "server": {"scheduler": "vllm"},
    "cache": {"policy": "vllm"},
    "cluster": {"servers": TWO, "link_gb_s": 0.05},
}


def test_a_scenario_that_was_written_is_the_same():
    written = load_scenario(tomllib.loads(load_scenario(HERE).to_toml()))
    assert written.cluster == load_scenario(HERE).cluster


def test_commands_of_many_runs_and_why_take_it(tmp_path):
    assert [result.summary["completed"] for result in compare(HERE, ["vllm", "paged"]).results] == [20, 20]
    assert "GB of prompts were read from prefill servers over 0.05 GB/s a device" in why(HERE).router
    swept = {"name": "swept", "base": HERE, "policies": ["vllm"], "axes": {"cluster.link_gb_s": [0.05, 50.0]}}
    result = sweep(swept, out=tmp_path / "a.sqlite", workers=1)
    slow, fast = result.table["ttft_mean"]
    assert slow > fast
    assert result.servers == ("3 servers behind round-robin to prefill and round-robin to decode",)
