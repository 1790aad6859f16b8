"""One run of one scenario on several servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import simpy

import workloads
from kvsim.costs.cost_model import CostModel
from kvsim.costs.profile import Profile
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.device_defaults import beyond_memory
from kvsim.scenario.prefixes import hit_rate
from kvsim.scenario.scenario import Scenario
from kvsim.simulation import set_up
from kvsim.simulation.arrivals import Clients, send
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.cluster.apart import ApartCluster
from kvsim.simulation.cluster.cluster import Cluster
from kvsim.simulation.cluster.exchange import Exchange, apart_figures, assumed_link, exchange_of, of_link
from kvsim.simulation.cluster.lockstep import Lockstep, LockstepInbox
from kvsim.simulation.cluster.replica import LocalClock, LocalInbox, Replica, least_step_s
from kvsim.simulation.cluster.routers import Router, make_router
from kvsim.simulation.cluster.routers.clairvoyant import Truth
from kvsim.simulation.cluster.together import states_together, tables_together, waits_beside_free
from kvsim.simulation.counts import PrefixCounts
from kvsim.simulation.recorder import Detail, Recorder
from kvsim.simulation.request_log import Progress, QueueMonitor, RequestLog
from kvsim.simulation.result import Result
from kvsim.simulation.schedulers import apart
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.schedulers.vllm_apart import ApartVllm
from kvsim.simulation.summary import summarize
from policies import Policy, PolicyFactory
from policies.checked import CheckedPolicy
from workloads import Prefixes


class _Kind:
    """What equal servers share."""

    def __init__(self, scenario: Scenario, costs: CostModel, policy: Policy):
        self.scenario = scenario
        self.costs = costs
        self.policy = policy
        """Like that of each."""
        self.backend = SimulatedBackend(costs, policy.kernel, policy.groups)
        # By costs of its own, which remember other passes than those of the run.
        apart = SimulatedBackend(set_up.cost_model(scenario, costs.profile), policy.kernel, policy.groups)
        self.least_step_s = least_step_s(apart, policy, scenario.server.slots)


def run_cluster(
    scenario: Scenario,
    policy: str | PolicyFactory | None = None,
    *,
    progress: Progress | None = None,
    detail: Detail = "cache",
    most_steps: int = ENDLESS,
    check: bool = False,
    profile: Profile | None = None,
    router: Callable[[Truth], Router] | None = None,
    clients: Clients = send,
) -> Result:
    """Run a scenario on all servers of its cluster; arguments as of ``run``.

    ``profile``: whose times all servers have, not those that the scenario names; ``router``: makes another than the
    scenario's; ``clients`` send the workload. Raises ``UserError`` and ``WorkloadError``.
    """
    began, env = time.perf_counter(), simpy.Environment()
    workload = scenario.build_workload()
    log, queue = RequestLog(progress), QueueMonitor(workload.n_requests)
    servers = scenario.servers
    # Equal servers are one object.
    kinds = {
        key: _Kind(*set_up.priced(one, policy, profile)) for key, one in {id(each): each for each in servers}.items()
    }
    _refuse_if_nothing_fits_anywhere(list(kinds.values()))
    first = next(iter(kinds.values())).policy
    of_each = [kinds[id(server)] for server in servers]
    exchange = exchange_of(scenario, [kind.policy for kind in of_each]) if scenario.cluster.apart else None
    cluster = _cluster_of(scenario, router, env, log, queue, exchange)
    with set_up.seldom_collecting(), set_up.naming_faults_of_plugins(first):
        cluster.replicas = _replicas(cluster, of_each, policy, detail, most_steps, check, exchange)
        cluster.run(clients, workload)
        for replica in cluster.replicas:
            if isinstance(replica.policy, CheckedPolicy):
                replica.policy.check_end()
    queue.admitted = cluster.admitted
    costs = [kind.costs for kind in kinds.values()]
    summary = {
        **_summary(scenario, cluster, log, queue, workload.prefixes, exchange),
        "profile": "; ".join(dict.fromkeys(each.profile.name for each in costs)),
        "basis": " ".join(dict.fromkeys(filter(None, (each.profile.basis for each in costs)))) or None,
        "inferred": {
            what: how
            for replica, server in zip(cluster.replicas, servers, strict=True)
            for what, how in set_up.inferred(
                replica.scenario, kinds[id(server)].costs.profile, replica.policy, replica.recorder
            ).items()
        },
    }
    summary["host"]["step_copies_s"] = sum(each.step_copies_s for each in costs)
    summary["wall_s"] = time.perf_counter() - began
    of_kinds = [line for kind in kinds.values() for line in (*kind.costs.warnings(), *beyond_memory(kind.scenario))]
    warnings = tuple(dict.fromkeys((*of_kinds, *workload.notes, *queue.warnings())))
    ended_s = max(replica.env.now for replica in cluster.replicas)
    tables = tables_together([replica.recorder.tables() for replica in cluster.replicas], scenario.cluster.roles)
    ran = scenario.under(first.name)
    return Result(ran, first.name, summary, ended_s, tables, (), warnings, tuple(workload.notes))


def _refuse_if_nothing_fits_anywhere(kinds: Sequence[_Kind]) -> None:
    """Raise ``NothingFits`` if no server can run any of the requests."""
    for kind in kinds[1:]:
        try:
            set_up.refuse_if_nothing_fits(kind.scenario, kind.policy)
        except set_up.NothingFits:
            continue
        return
    set_up.refuse_if_nothing_fits(kinds[0].scenario, kinds[0].policy)


def _replicas(
    cluster: Cluster,
    kinds: Sequence[_Kind],
    policy: str | PolicyFactory | None,
    detail: Detail,
    most_steps: int,
    check: bool,
    exchange: Exchange | None,
) -> list[Replica]:
    """The servers; ``kinds``: of each of them, the others as of ``run_cluster``."""
    replicas, lockstep, clock = list[Replica](), Lockstep(), LocalClock()
    for number, kind in enumerate(kinds):
        own, costs = kind.scenario, kind.costs
        built = set_up.build_policy(own, policy, costs)
        breakdown = set_up.ledger_for(own, built, set_up.cost_model(own, costs.profile)) if detail == "tables" else None
        requests = RequestLog(keeps=detail not in ("requests", "cache"), ended=partial(cluster.ended, number))
        recorder = Recorder(detail=detail, time_breakdown=breakdown, requests=requests)
        driven = set_up.held_to_its_word(own, built, check)
        inbox: LocalInbox | None = None
        if own.machine.expert_parallel > 1:
            inbox = LockstepInbox(lockstep)
        elif exchange is not None:
            inbox = LocalInbox(clock)
        replicas.append(
            Replica(
                own,
                driven,
                recorder,
                kind.backend,
                kind.least_step_s,
                most_steps=most_steps,
                inbox=inbox,
                make=None if exchange is None else apart,
            )
        )
        if exchange is not None:
            exchange.join(replicas[-1])
    return replicas


def _cluster_of(
    scenario: Scenario,
    router: Callable[[Truth], Router] | None,
    env: simpy.Environment,
    log: RequestLog,
    queue: QueueMonitor,
    exchange: Exchange | None,
) -> Cluster:
    """The cluster of a scenario, still without its servers; ``router`` makes another than the scenario's."""
    section, roles = scenario.cluster, scenario.cluster.roles
    if exchange is None:
        return Cluster(env, router or partial(_router_of, scenario, section.router, len(roles)), log, queue)
    routers = (
        router or partial(_router_of, scenario, section.router, roles.count("prefill")),
        partial(_router_of, scenario, section.decode_router, roles.count("decode")),
    )
    return ApartCluster(env, routers, log, queue, [role == "prefill" for role in roles], exchange)


def _router_of(scenario: Scenario, name: str, servers: int, truth: Truth) -> Router:
    """The router of a name, for so many servers of a scenario."""
    rng = workloads.named_rng(scenario.seed, "router")
    return make_router(name, servers, rng, **({"truth": truth} if name == "clairvoyant" else {}))


def _summary(
    scenario: Scenario,
    cluster: Cluster,
    log: RequestLog,
    queue: QueueMonitor,
    prefixes: Prefixes,
    exchange: Exchange | None,
) -> dict[str, Any]:
    """The figures of all servers together, with those of each under ``cluster``; keys as of one server's run."""
    replicas, roles = cluster.replicas, scenario.cluster.roles
    first, together = replicas[0].scenario, Recorder(detail="requests", requests=log)
    together.queue = queue
    for replica in replicas:
        together.counts.add(replica.recorder.counts)
    # What is read from another server is looked up twice, and found or not where it is to be computed.
    together.counts.prefix = PrefixCounts()
    for replica, role in zip(replicas, roles, strict=True):
        if role != "decode":
            together.counts.prefix.add(replica.recorder.counts.prefix)
    figures = summarize(together, first.cell_bytes, prefixes)
    figures["cache"] |= states_together([replica.recorder.cache_states for replica in replicas])
    found = [_of_one(replica, prefixes) for replica in replicas]
    if exchange is not None:
        found = [
            {**entry, **of_link(replica, moved), "role": role}
            for entry, replica, moved, role in zip(found, replicas, exchange.moved, roles, strict=True)
        ]
    held = [replica.recorder.host_prompts for replica in replicas if replica.recorder.host_prompts is not None]
    if held:
        figures["host"] |= {
            "most_bytes": sum(each.most_bytes for each in held),
            "limit_bytes": sum(each.limit_bytes for each in held) or None,
        }
    # Where prefill and decode are apart, that of the servers that prefill: those that decode also wait for the link.
    kept = {number: at for at, number in enumerate(n for n, role in enumerate(roles) if role != "decode")}
    waits = [(kept[number], came_s, began_s) for number, came_s, began_s in cluster.waits if number in kept]
    assumed = [line for replica in replicas for line in assumptions(replica.scenario)]
    waited_s, beside_free = waits_beside_free(waits, len(kept))
    work = [found[number]["computed_tokens"] for number in kept]
    return {
        **set_up.what_ran(first, replicas[0].policy),
        "assumed": [
            line for line in dict.fromkeys((*assumed, "" if exchange is None else assumed_link(scenario))) if line
        ],
        "cluster": {
            "router": scenario.cluster.router,
            "apart": None if exchange is None else apart_figures(scenario, exchange),
            "most_over_mean": max(work) / float(np.mean(work)) if sum(work) else None,
            "waited_s": waited_s,
            "beside_free": beside_free,
            "servers": found,
        },
        **figures,
    }


def _of_one(replica: Replica, prefixes: Prefixes) -> dict[str, Any]:
    """The figures of one server, ready for JSON."""
    recorder, fared = replica.recorder, replica.recorder.requests.latencies.summary()
    counts, prefix = recorder.counts, recorder.counts.prefix
    computed = fared["prompt_tokens"] + fared["output_tokens"] - prefix.found + counts.recomputed_tokens
    scheduler = replica.server.scheduler
    if isinstance(scheduler, ApartVllm):
        computed -= scheduler.tokens_read
    return {
        "device": replica.scenario.machine.device,
        "cells": replica.scenario.context_cells,
        **{key: fared[key] for key in ("requests", "failed", "prompt_tokens", "output_tokens")},
        "computed_tokens": computed,
        "hit_rate": hit_rate(prefix.found, prefix.tokens, prefixes),
        "preemptions": counts.preemptions,
        "utilization_mean": recorder.cache_states.means()["utilization_mean"],
        **{key: fared[key] for key in ("ttft_s", "tpot_s", "e2e_s")},
    }
