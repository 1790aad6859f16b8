"""One run of one scenario under one policy."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import simpy

from kvsim.costs.cost_model import CostModel, HostLink
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Profile
from kvsim.errors import Divergence, NoTimes, UserError, no_such
from kvsim.scenario import server_defaults
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.device_defaults import beyond_memory
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.server_defaults import TODAYS_SERVERS
from kvsim.simulation.arrivals import Arrivals, Clients, Inbox, Script, Turn, send
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import DETAILS, Detail, Recorder
from kvsim.simulation.request_log import Progress, QueueMonitor
from kvsim.simulation.result import Result
from kvsim.simulation.schedulers import SCHEDULERS
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.server import Server
from kvsim.simulation.summary import summarize
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import (
    PluginError,
    Policy,
    PolicyFactory,
    Preset,
    available,
    current_name,
    fault_in_plugin,
    why_left_out,
)
from workloads import Prefixes, Workload, WorkloadError


def build_policy(
    scenario: Scenario, policy: str | PolicyFactory | None = None, costs: CostModel | None = None
) -> Policy:
    """The policy that the scenario names, or another by name or factory. Raises ``UserError``.

    ``costs`` tell adaptive triggers what attention and moves cost; without them they assume round figures.
    """
    choice = policy if policy is not None else scenario.cache.policy
    if isinstance(choice, str):
        choice, known = current_name(choice), available()
        if choice not in known:
            raise UserError(why_left_out(choice) or no_such("policy", choice, known))
        scenario, choice = scenario.under(choice), known[choice]
    else:
        scenario = scenario.under(choice.name if isinstance(choice, Preset) else "")
    try:
        scenario.check_slots()
    except ValueError as e:
        raise UserError(f"{scenario.name}: {e}") from None
    relative = None if costs is None else costs.relative(scenario.cache.kernel or "masked")
    try:
        built = choice(scenario.cache_config(relative))
    except PluginError as e:
        raise UserError(str(e)) from e
    except ValueError as e:
        raise UserError(f"{scenario.name}: cache: {e}") from None
    shifts = scenario.server.context_shift and "context_shift" in scenario.server.model_fields_set
    if shifts and not built.unbounded and not built.can_shift:
        raise UserError(f"{scenario.name}: server.context_shift: policy {built.name!r} cannot shift positions")
    if costs is not None:
        costs.check(scenario.model.name, built.kernel, scenario.cache.type_k, scenario.cache.type_v)
        if built.moves_cells:
            costs.check_moves(built.name)
    return built


def profile_of(scenario: Scenario) -> Profile:
    """The machine profile of a scenario.

    Raises ``UserError`` if it cannot be read, and ``NoTimes`` if it was measured with another model or cache.
    """
    profile, machine = load_profile(scenario.machine.profile, scenario.folder), scenario.machine
    if machine.device is not None and (profile.device, profile.tensor_parallel) != (
        machine.device,
        machine.tensor_parallel,
    ):
        of = f"{profile.tensor_parallel} x {profile.device}" if profile.device else "a machine"
        raise UserError(
            f"{scenario.name}: machine.profile: {profile.name} is of {of}, and machine.device is "
            f"{machine.tensor_parallel} x {machine.device}; leave one of them out"
        )
    weights = (machine.weights or profile.weights or "").lower()
    if machine.device is not None and weights != (profile.weights or ""):
        raise UserError(
            f"{scenario.name}: machine.profile: {profile.name} has weights in {profile.weights}, and machine.weights "
            f"is {machine.weights}; leave one of them out"
        )
    if reason := profile.why_no_times(
        scenario.model.name, scenario.cache.type_k, scenario.cache.type_v, scenario.cache.policy
    ):
        raise NoTimes(f"{scenario.name}: {reason}", scenario)
    return profile


def cost_model(scenario: Scenario, profile: Profile) -> CostModel:
    """The cost model of the scenario's machine."""
    machine = scenario.machine
    if scenario.server.scheduler == "vllm":
        profile = profile.composing(ahead=scenario.server.async_scheduling)
    link = None
    if machine.host_gb_s is not None:
        link = HostLink(machine.host_gb_s * 1e9, machine.host_latency_s, scenario.cell_bytes)
    # A page of each layer's K, and one of its V.
    map_page_s = machine.map_page_us * 1e-6 * 2 * scenario.model.shape.n_layers
    return CostModel(profile, link, scenario.cell_bytes, map_page_s)


def ledger_for(scenario: Scenario, policy: Policy, costs: CostModel) -> TimeBreakdown:
    """The time breakdown for a run."""
    return TimeBreakdown(costs, policy, scenario.server.slots, scenario.n_ubatch)


def run(
    scenario: Scenario | str | Path,
    policy: str | PolicyFactory | None = None,
    *,
    progress: Progress | None = None,
    detail: Detail = "cache",
    snapshots: bool = False,
    most_steps: int = ENDLESS,
) -> Result:
    """Run a scenario, given as such or by name or file, with predicted step times, under its own policy or another.

    ``detail`` says what is kept: how the requests fared, or also means of how full the cache was, or also a table of
    requests, of states, or of everything (``recorder.Detail``). The less is kept, the faster a long run is.
    ``snapshots`` keeps pictures of the cells. ``most_steps``: how many steps the step loop takes at a time, which
    changes no result: 1 for one by one, 0 to have the policy place each step chunk by chunk. Raises ``UserError`` and
    ``WorkloadError``.
    """
    if detail not in DETAILS:
        raise UserError(no_such("detail", detail, DETAILS))
    scenario = load_scenario(scenario)
    costs = cost_model(scenario, profile_of(scenario))
    chosen = build_policy(scenario, policy, costs)
    time_breakdown = ledger_for(scenario, chosen, costs) if detail == "tables" else None
    recorder = Recorder(progress, detail=detail, snapshots=snapshots, time_breakdown=time_breakdown)
    result, _ = drive(
        scenario,
        chosen,
        SimulatedBackend(costs, chosen.kernel, chosen.groups),
        recorder,
        costs.profile,
        most_steps=most_steps,
    )
    return replace(result, warnings=(*costs.warnings(), *beyond_memory(scenario), *result.warnings))


def _inferred(scenario: Scenario, profile: Profile, policy: Policy, recorder: Recorder) -> dict[str, str]:
    """What the run's times price without a measurement, and as what."""
    found = profile.inferred(policy.kernel, recorder.moved_cells > 0)
    basis = cost_model(scenario, profile).host_copies_basis
    if recorder.host_saves and basis is not None:
        found["host_copies"] = basis
    if recorder.mapped_pages:
        stated = scenario.machine.map_page_us
        each = f"at {stated:g} µs for each page of a layer's K or V" if stated else "as if it took no time"
        found["mapping"] = f"{each} (machine.map_page_us)"
    return found


def _without_host_cache(scenario: Scenario, policy: Policy) -> tuple[str, ...]:
    """A warning where the scenario asks for a host cache that the policy cannot have."""
    server = scenario.server
    asked = server.scheduler in TODAYS_SERVERS and server.cache_ram and "cache_ram" in server.model_fields_set
    if policy.can_export or not asked or server.cache_ram == type(server)().cache_ram:
        return ()
    return (f"server.cache_ram: no host cache under {policy.name}, which copies no whole sequences",)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Let Python look for unreachable cycles less often, and only among new objects: a run makes hardly any cycles."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 50_000), *before[1:])
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _naming_faults_of_plugins(policy: Policy) -> Iterator[None]:
    """Turn an error under a plug-in's policy that is no fault of the input into a ``UserError`` that says where."""
    try:
        yield
    except (UserError, WorkloadError, Divergence):
        raise
    except Exception as e:
        line = fault_in_plugin(e, policy)
        if line is None:
            raise
        raise UserError(line) from e


def server_of(
    scenario: Scenario,
    env: simpy.Environment,
    arrivals: Arrivals,
    policy: Policy,
    backend: Backend,
    recorder: Recorder,
    *,
    most_steps: int = ENDLESS,
) -> Server:
    """A server of the scenario, which an environment may have several of: each has its own policy and recorder."""
    name = scenario.server.scheduler
    make = SCHEDULERS.get(name) or server_defaults.SCHEDULERS.added(name)
    scheduler = make(scenario, policy, backend, recorder)
    prefetcher = Prefetcher(env, scenario.server.prefetch, policy, backend, recorder)
    if recorder.watches:
        recorder.cache(env.now, policy.usage())
    return Server(env, arrivals, scheduler, policy, backend, recorder, prefetcher, most_steps=most_steps)


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
    served = scenario.under(policy.name)
    with _seldom_collecting(), _naming_faults_of_plugins(policy):
        # The turns of a script say what came after each step.
        most = most_steps if script is None else 0
        server = server_of(served, env, arrivals, policy, backend, recorder, most_steps=most)
        env.run(until=env.process(server.run()))
    summary = {
        "scenario": scenario.name,
        "policy": policy.name,
        "seed": scenario.seed,
        "assumed": list(assumptions(served)),
        "inferred": {} if profile is None else _inferred(scenario, profile, policy, recorder),
        **summarize(recorder, scenario.cell_bytes, prefixes),
        "profile": None if profile is None else profile.name,
        "basis": None if profile is None else profile.basis,
        "wall_s": time.perf_counter() - began,
    }
    warnings = (*notes, *_without_host_cache(scenario, policy), *recorder.queue.warnings())
    frames = () if recorder.snapshots is None else tuple(recorder.snapshots.frames)
    result = Result(scenario, policy.name, summary, env.now, recorder.tables(), frames, warnings, notes)
    return result, inbox.script if script is None else script
