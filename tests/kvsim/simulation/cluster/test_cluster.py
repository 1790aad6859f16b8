"""Several servers: one is what it is alone, clocks that run ahead change nothing, and queues are as in theory."""

import sys
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import simpy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvsim import compare, sweep
from kvsim.errors import Livelock, UserError
from kvsim.reports.comparison_report import comparison_report
from kvsim.reports.run_report import run_report
from kvsim.reports.sweep_report import sweep_report
from kvsim.scenario.scenario import load_scenario
from kvsim.simulation.arrivals import send
from kvsim.simulation.cluster.cluster import Cluster
from kvsim.simulation.cluster.replica import Replica
from kvsim.simulation.cluster.routers import make_router
from kvsim.simulation.cluster.run import run_cluster
from kvsim.simulation.cluster.together import waits_beside_free
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import QueueMonitor, RequestLog
from kvsim.simulation.run import run
from kvsim.simulation.set_up import build_policy
from policies import available, plugins
from tests.kvsim.simulation.random_runs import scenarios
from tests.worlds import GivenTimes, command, scenario
from workloads import Fixed, Synthetic, poisson_gaps

POLICIES = ("contiguous", "paged", "vllm", "streams", "llama.cpp-b6975", "ring", "no-evict", "full-compaction")
ROUTERS = ("round-robin", "random", "least-load", "vllm-router/cache_aware", "vllm/data-parallel", "clairvoyant")


def figures(run_it, given_scenario, policy, **options):
    """All figures and rows of a run, but for the clock; or why it ended."""
    try:
        result = run_it(given_scenario, policy, detail="tables", **options)
    except (Livelock, UserError) as error:
        return str(error)
    summary = {key: value for key, value in result.summary.items() if key not in ("wall_s", "cluster", "queue")}
    tables = [result.tables.requests, result.tables.cache, result.tables.passes, result.tables.causes]
    columns = [{k: v.tolist() for k, v in table.columns.items() if k != "server"} for table in tables]
    return repr((sorted(summary.items()), result.ended_s, columns))


@given(scenarios(), st.sampled_from(POLICIES))
@settings(deadline=None, max_examples=30, phases=(Phase.explicit, Phase.generate))
def test_one_server_behind_a_router_is_what_it_is_alone(random_scenario, policy):
    alone = figures(run, random_scenario, policy)
    assert figures(run_cluster, random_scenario, policy) == alone


@pytest.mark.slow
@given(scenarios(), st.sampled_from(POLICIES), st.sampled_from(ROUTERS), st.integers(2, 4))
@settings(deadline=None, max_examples=30, phases=(Phase.explicit, Phase.generate))
def test_servers_that_run_ahead_change_nothing(random_scenario, policy, router, replicas):
    several = load_scenario(random_scenario, cluster__replicas=replicas, cluster__router=router)
    ahead = figures(run, several, policy)
    # The control: each server stops at every event of the others.
    with patch("kvsim.simulation.cluster.run.least_step_s", lambda *_: 0.0):
        assert figures(run, several, policy, most_steps=1) == ahead


def test_passes_that_never_were_are_not_warned_of():
    given_scenario = load_scenario("chat", model="qwen3-14b", device="h100_sxm", cluster__replicas=2)
    assert given_scenario.server.slots == 1024
    assert run(given_scenario).warnings == ()


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("chat", "round-robin"),
        ("identical", "least-load"),
        ("assistant", "least-load"),
        ("assistant", "smg/cache_aware"),
    ],
)
def test_every_request_is_served_once(name, router):
    given_scenario = load_scenario(name, cluster__replicas=3, cluster__router=router)
    result = run(given_scenario, "vllm", detail="tables")
    servers = result.summary["cluster"]["servers"]
    assert result.requests["id"].tolist() == list(range(given_scenario.build_workload().n_requests))
    assert sum(server["requests"] for server in servers) == result.summary["requests"]
    assert sum(server["output_tokens"] for server in servers) == result.summary["output_tokens"]
    assert np.bincount(result.requests["server"], minlength=3).tolist() == [s["requests"] for s in servers]
    assert len(result.passes) == result.summary["forward_passes"]


def test_states_add_up():
    """Two servers under the same load hold twice what one holds, in a cache of twice the size."""
    one = load_scenario("chat", workload__requests=100)
    double = {**one.model_dump(exclude_unset=True, exclude={"folder"}), "cluster": {"replicas": 2}}
    double["workload"] |= {"rate": 2 * one.workload.rate}
    alone, two = run(one, "vllm").summary["cache"], run(double, "vllm").summary["cache"]
    assert two["utilization_mean"] == pytest.approx(alone["utilization_mean"], rel=0.35)
    assert two["stored_cells_mean"] == pytest.approx(2 * alone["stored_cells_mean"], rel=0.35)


def test_unlike_servers():
    table = {
        "name": "unlike",
        "workload": {
            "kind": "poisson",
            "requests": 60,
            "rate": 20.0,
            "prompt_tokens": {"kind": "fixed", "value": 500},
            "output_tokens": {"kind": "fixed", "value": 50},
        },
        "model": {"name": "llama-3.1-8b"},
        "machine": {"device": "h100_sxm"},
        "cluster": {"servers": [{"count": 2}, {"machine": {"device": "l40s"}, "server": {"slots": 4}}]},
    }
    result = run(table)
    first, second, third = result.summary["cluster"]["servers"]
    assert (first["device"], second["device"], third["device"]) == ("h100_sxm", "h100_sxm", "l40s")
    assert first["cells"] == second["cells"] > third["cells"]
    assert first["requests"] == third["requests"] == 20
    assert third["tpot_s"]["p50"] > 2 * first["tpot_s"]["p50"]
    assert f"3 servers behind round-robin, the first with {first['cells']:,} cells" in run_report(result).title


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"replicas": 0}, "cluster.replicas: input should be greater than or equal to 1, got 0"),
        ({"router": "nearest"}, "cluster.router: no router called 'nearest'; there are round-robin, random, "),
        ({"replicas": 2, "servers": [{}]}, "replicas: the groups in cluster.servers have a count each"),
        ({"servers": [{"count": 2, "disk": {}}]}, "cluster.servers.0.disk: unknown key"),
        ({"servers": [{"server": {"slot": 2}}, {}]}, "cluster.servers: server.slot: unknown key"),
    ],
)
def test_what_no_cluster_can_be_is_said(cluster, line):
    with pytest.raises(UserError) as fault:
        run({"name": "wrong", "cluster": cluster})
    assert line in str(fault.value)


def test_a_comparison_and_a_sweep_name_servers_and_router(tmp_path):
    two = {"replicas": 2, "router": "least-load"}
    compared = comparison_report(compare(scenario(workload__requests=5, cluster=two), ["paged", "vllm"]))
    assert sum("2 servers behind least-load, each with" in line for line in compared.about) == 2
    swept = {"name": "swept", "base": {"workload": {"requests": 5}, "cluster": two}, "policies": ["paged"]}
    axes = {"cluster.replicas": [1, 3], "cluster.router": ["random", "least-load"]}
    told = [sweep(swept | keys, out=tmp_path / "a.sqlite", workers=1) for keys in ({}, {"axes": axes})]
    heads = [sweep_report(result).about for result in told]
    assert "2 servers behind least-load" in heads[0]
    assert "1–3 servers behind random, 1–3 servers behind least-load" in heads[1]


def test_the_command_takes_replicas_and_a_router():
    done = command("run", "assistant", "-p", "vllm", "--replicas", "2", "--router", "least-load")
    assert done.returncode == 0
    assert "2 servers behind least-load, each with 2,048 cells" in done.stdout
    assert "the busiest server computed" in done.stdout
    refused = command("validate", "--scenario", "chat", "--replicas", "2")
    assert refused.returncode == 2


def test_requests_that_no_server_can_run_are_refused_in_a_line():
    short = {"slot_context": 8}
    fixed = {"kind": "fixed", "value": 20}
    table = {"name": "short", "workload": {"requests": 5, "prompt_tokens": fixed}, "server": {**short, "slots": 2}}
    with pytest.raises(UserError, match="no request can run under contiguous: the shortest prompt has 20 tokens"):
        run({**table, "cluster": {"replicas": 2}})
    # The control: one of the servers can.
    roomy = {"servers": [{}, {"server": {"slot_context": 100}}]}
    assert run({**table, "cluster": roomy}).summary["completed"] == 2


FAULTY = """
from policies.layouts.unified import UnifiedPolicy


class Mine(UnifiedPolicy):
    def __init__(self, config):
        super().__init__("mine", config)

    def allocate(self, step, *, views=False):
        return 1 // 0


POLICIES = {"mine": Mine}
"""


def test_a_fault_in_a_policy_of_others_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(FAULTY)
    done = command("run", "chat", "--plugin", str(tmp_path / "mine.py"), "-p", "mine", "--replicas", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mine.py:10: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


RATE, REQUESTS, WARM_UP = 0.8, 2000, 400
WORLD = scenario(
    server__slots=1, server__n_batch=2**15, server__n_ubatch=2**15, server__cache_ram=0, cache__cells=2**15
)


class Geometric:
    """Lengths in whole tokens, nearly exponential: the service time is a token's time each."""

    mean = 1000

    def draw(self, rng, n):
        return rng.geometric(1 / self.mean, n)


def times_in_system(router, servers, seed, requests=REQUESTS):
    """Seconds from arrival to end of the requests of ``servers`` textbook queues of one slot each."""
    env, log = simpy.Environment(), RequestLog(keeps=True)
    rng = np.random.default_rng(seed)
    cluster = Cluster(env, lambda truth: make_router(router, servers, rng), log, QueueMonitor())
    backend = GivenTimes(lambda batch: batch.n_tokens / Geometric.mean)
    cluster.replicas = [
        Replica(
            WORLD, build_policy(WORLD), Recorder(requests=RequestLog(ended=partial(cluster.ended, i))), backend, 0.0
        )
        for i in range(servers)
    ]
    workload = Synthetic(seed, requests * servers // 4, poisson_gaps(RATE * servers), Geometric(), Fixed(1))
    cluster.run(send, workload)
    jobs = sorted(log.jobs, key=lambda job: job.request.id)
    return np.mean([job.finished_s - job.arrival_s for job in jobs[WARM_UP * servers // 4 :]])


@pytest.mark.slow
def test_random_routing_makes_each_server_a_queue_of_its_own():
    """M/M/1: a Poisson stream that is split at random stays one."""
    times = [times_in_system("random", 4, seed) for seed in range(6)]
    error = np.std(times, ddof=1) / np.sqrt(len(times))
    assert abs(np.mean(times) - 1 / (1 - RATE)) < 3.5 * error
    assert error < 0.5


@pytest.mark.slow
def test_the_power_of_two_choices():
    """Mitzenmacher (2001): with many servers the mean time is the sum over i of rate ** (2 ** i - 2)."""
    times = [times_in_system("power-of-two", 16, seed, requests=700) for seed in range(3)]
    expected = sum(RATE ** (2**i - 2) for i in range(1, 12))
    # A few per cent above the limit of infinitely many servers, far below one choice and above the best of all.
    assert expected * 0.95 < np.mean(times) < expected * 1.15
    assert np.mean(times) < 0.6 / (1 - RATE)


@pytest.mark.slow
def test_the_shortest_queue_lies_between_one_queue_for_all_and_one_for_each():
    """M/M/c is its bound, which it comes near, and M/M/1 is what random routing gives."""
    servers = 4
    load = servers * RATE
    terms = [load**k / np.prod(np.arange(1, k + 1)) for k in range(servers)]
    last = load**servers / np.prod(np.arange(1, servers + 1)) / (1 - RATE)
    waits = last / (sum(terms) + last)
    one_queue = 1 + waits / (servers * (1 - RATE))
    found = np.mean([times_in_system("least-load", servers, seed) for seed in range(5)])
    assert one_queue * 0.95 < found < one_queue * 1.5
    assert found < 0.5 / (1 - RATE)


def test_all_policies_run_on_several_servers():
    for name in available():
        result = run(load_scenario("chat", workload__requests=12, cluster__replicas=2), name)
        assert result.summary["requests"] == 12


@pytest.mark.parametrize(
    ("waits", "servers", "total", "share"),
    [
        ([], 2, 0.0, None),
        ([(0, 1.0, 1.0)], 2, 0.0, None),
        ([(0, 1.0, 3.0)], 2, 2.0, 1.0),
        ([(0, 1.0, 3.0)], 1, 2.0, 0.0),
        ([(0, 1.0, 3.0), (1, 1.0, 2.0)], 2, 3.0, 1 / 3),
        ([(0, 1.0, 3.0), (0, 2.0, 5.0), (1, 2.5, 4.5)], 2, 7.0, (1.5 + 0.5 + 0.5) / 7),
    ],
)
def test_what_requests_waited_while_another_server_had_none_waiting(waits, servers, total, share):
    found, beside = waits_beside_free(waits, servers)
    assert found == pytest.approx(total)
    assert beside == (None if share is None else pytest.approx(share))


def test_a_router_that_drowns_one_server_is_found_out():
    """The built-in example: the default rule of a real router, and one that looks at loads alone."""
    sticky = run(load_scenario("many-servers", workload__sessions=40, workload__rate=4.0)).summary["cluster"]
    even = run(load_scenario("many-servers", workload__sessions=40, workload__rate=4.0, cluster__router="least-load"))
    assert sticky["most_over_mean"] > 1.5 > 1.2 > even.summary["cluster"]["most_over_mean"]
    assert sticky["beside_free"] > 0.9
