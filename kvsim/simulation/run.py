"""One run of one scenario under one policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import simpy

from kvsim.costs.profile import Profile
from kvsim.errors import UserError, no_such
from kvsim.scenario.device_defaults import beyond_memory
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation import set_up
from kvsim.simulation.arrivals import Arrivals, Clients, Inbox, Script, Turn, send
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.cluster.run import run_cluster
from kvsim.simulation.recorder import DETAILS, Detail, Recorder
from kvsim.simulation.request_log import Progress, QueueMonitor
from kvsim.simulation.result import Result
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.summary import summarize
from policies import (
    Policy,
    PolicyFactory,
)
from policies.checked import CheckedPolicy
from workloads import Prefixes, Workload


def run(
    scenario: Scenario | str | Path,
    policy: str | PolicyFactory | None = None,
    *,
    progress: Progress | None = None,
    detail: Detail = "cache",
    snapshots: bool = False,
    most_steps: int = ENDLESS,
    check: bool = False,
) -> Result:
    """Run a scenario, given as such or by name or file, with predicted step times, under its own policy or another.

    ``detail`` says what is kept: how the requests fared, or also means of how full the cache was, or also a table of
    requests, of states, or of everything (``recorder.Detail``). The less is kept, the faster a long run is.
    ``snapshots`` keeps pictures of the cells. ``most_steps``: how many steps the step loop takes at a time, which
    changes no result: 1 for one by one, 0 to have the policy place each step chunk by chunk. ``check``: hold the policy
    to its word at every step; one that is no preset is so at its first steps, and by sample. Raises ``UserError`` and
    ``WorkloadError``.
    """
    if detail not in DETAILS:
        raise UserError(no_such("detail", detail, DETAILS))
    scenario = load_scenario(scenario)
    if scenario.machine.expert_parallel not in (1, scenario.cluster.size):
        n, size = scenario.machine.expert_parallel, scenario.cluster.size
        raise UserError(
            f"{scenario.name}: machine.expert_parallel is {n}, and cluster.replicas {size}; all servers of a cluster "
            f"divide the experts (--ep {n} --replicas {n}), or none"
        )
    if scenario.cluster.size > 1:
        if snapshots:
            raise UserError(f"{scenario.name}: pictures of cells are of one server; leave out cluster.replicas")
        return run_cluster(scenario, policy, progress=progress, detail=detail, most_steps=most_steps, check=check)
    scenario, costs, built = set_up.priced(scenario, policy)
    set_up.refuse_if_nothing_fits(scenario, built)
    # With costs of its own, so that what passes waited for is counted once.
    time_breakdown = (
        set_up.ledger_for(scenario, built, set_up.cost_model(scenario, costs.profile)) if detail == "tables" else None
    )
    recorder = Recorder(progress, detail=detail, snapshots=snapshots, time_breakdown=time_breakdown)
    with set_up.naming_faults_of_plugins(built):
        driven = set_up.held_to_its_word(scenario, built, check)
        result, _ = drive(
            scenario,
            driven,
            SimulatedBackend(costs, built.kernel, built.groups),
            recorder,
            costs.profile,
            most_steps=most_steps,
        )
        if isinstance(driven, CheckedPolicy):
            driven.check_end()
    result.summary["host"]["step_copies_s"] = costs.step_copies_s
    return replace(result, warnings=(*costs.warnings(), *beyond_memory(scenario), *result.warnings))


def drive(
    scenario: Scenario,
    policy: Policy,
    backend: Backend,
    recorder: Recorder,
    profile: Profile | None,
    script: Sequence[Turn] | None = None,
    *,
    most_steps: int = ENDLESS,
    workload: Workload | None = None,
    clients: Clients = send,
    env: simpy.Environment | None = None,
) -> tuple[Result, Sequence[Turn]]:
    """Run the scenario on any backend to the end; return the result, and the script of what each turn took in.

    Instead of the scenario's workload, a ``script`` (see ``arrivals.Script``) or another ``workload`` may be given.
    ``clients`` send it; ``env``: the clock, for a backend that looks at it; ``most_steps`` as in ``run``.
    """
    if scenario.cluster.size > 1:
        raise UserError(
            f"{scenario.name}: cluster: only one server is driven here; leave out cluster.replicas and servers"
        )
    began = time.perf_counter()
    env = env or simpy.Environment()
    inbox = Inbox(env, keeps_script=backend.price is None)
    arrivals: Arrivals = inbox
    notes: tuple[str, ...] = ()
    prefixes: Prefixes = "tokens"
    if script is None:
        workload = workload or scenario.build_workload()
        notes, prefixes = tuple(workload.notes), workload.prefixes
        recorder.queue = QueueMonitor(workload.n_requests)
        env.process(clients(env, inbox, workload))
    else:
        arrivals = Script(env, script)
    scenario = scenario.under(policy.name)
    with set_up.seldom_collecting(), set_up.naming_faults_of_plugins(policy):
        # The turns of a script say what came after each step.
        most = most_steps if script is None else 0
        server = set_up.server_of(scenario, env, arrivals, policy, backend, recorder, most_steps=most)
        env.run(until=env.process(server.run()))
    summary = {
        **set_up.what_ran(scenario, policy),
        "cluster": None,
        "inferred": {} if profile is None else set_up.inferred(scenario, profile, policy, recorder),
        **summarize(recorder, scenario.cell_bytes, prefixes),
        "profile": None if profile is None else profile.name,
        "basis": None if profile is None else profile.basis,
        "wall_s": time.perf_counter() - began,
    }
    warnings = (*notes, *recorder.queue.warnings())
    frames = () if recorder.snapshots is None else tuple(recorder.snapshots.frames)
    result = Result(scenario, policy.name, summary, env.now, recorder.tables(), frames, warnings, notes)
    return result, inbox.script if script is None else script
