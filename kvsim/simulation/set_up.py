"""What a run is made of: the policy, the costs and the server of a scenario."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import simpy

from kvsim.costs.cost_model import CostModel, HostLink
from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import device_named
from kvsim.costs.draft_price import DraftPrice, head_share
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_settings import Engine
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.profile import Profile
from kvsim.costs.under_load import Host
from kvsim.errors import Divergence, NoTimes, UserError, counted, no_such
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario import server_defaults
from kvsim.scenario.assumptions import assumptions
from kvsim.scenario.scenario import Scenario
from kvsim.scenario.without_effect import without_effect
from kvsim.simulation.arrivals import Arrivals
from kvsim.simulation.backend import Backend
from kvsim.simulation.drafts import Drafts
from kvsim.simulation.prefetch import Prefetcher
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.schedulers import SCHEDULERS, Make
from kvsim.simulation.schedulers.base import ENDLESS
from kvsim.simulation.server import Server
from kvsim.simulation.time_breakdown import TimeBreakdown
from policies import (
    Kernel,
    PluginError,
    Policy,
    PolicyFactory,
    Preset,
    available,
    current_name,
    fault_in_plugin,
    why_left_out,
)
from policies.checked import CheckedPolicy, is_of_others
from workloads import WorkloadError


class NothingFits(UserError):
    """No request of a scenario can run under its settings."""


def build_policy(
    scenario: Scenario, policy: str | PolicyFactory | None = None, costs: CostModel | None = None
) -> Policy:
    """The policy that the scenario names, or another by name or factory. Raises ``UserError``.

    ``costs`` tell adaptive triggers what attention and moves cost; without them they assume round figures.
    """
    scenario, choice = chosen(scenario, policy)
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


def chosen(scenario: Scenario, policy: str | PolicyFactory | None) -> tuple[Scenario, PolicyFactory]:
    """The scenario under the policy that it names, or another by name or factory, and what builds the policy.

    Raises ``UserError``.
    """
    choice = policy if policy is not None else scenario.cache.policy
    if not isinstance(choice, str):
        return scenario.under(choice.name if isinstance(choice, Preset) else ""), choice
    choice = known_policy(choice)
    return scenario.under(choice), available()[choice]


def known_policy(name: str) -> str:
    """The present name of a policy. Raises ``UserError`` if there is none of that name."""
    name, known = current_name(name), available()
    if name not in known:
        raise UserError(why_left_out(name) or no_such("policy", name, known))
    return name


def priced(
    scenario: Scenario, policy: str | PolicyFactory | None, profile: Profile | None = None
) -> tuple[Scenario, CostModel, Policy]:
    """The scenario under a policy, what its steps cost, and the policy, as ``run`` has them. Raises ``UserError``.

    ``profile``: other times than the scenario's.
    """
    scenario, factory = chosen(scenario, policy)
    costs = cost_model(scenario, profile_of(scenario) if profile is None else profile)
    return scenario, costs, build_policy(scenario, factory, costs)


def profile_of(scenario: Scenario) -> Profile:
    """The machine profile of a scenario.

    Raises ``UserError`` if it cannot be read, and ``NoTimes`` if it was measured with another model or cache.
    """
    profile, machine = load_profile(scenario.machine.profile, scenario.folder), scenario.machine
    served = machine.device, machine.tensor_parallel, machine.expert_parallel
    measured = profile.device, profile.tensor_parallel, profile.expert_parallel
    if machine.device is not None and served[:2] == measured[:2] and served != measured:
        raise UserError(
            f"{scenario.name}: machine.profile: {profile.name} has the experts of {measured[2]} servers, and "
            f"machine.expert_parallel is {served[2]}; leave one of them out"
        )
    if machine.device is not None and served != measured:
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
    device = None if machine.device is None else device_named(machine.device)
    drafts = scenario.speculation.tokens if scenario.speculation.on else 0
    return CostModel(profile, link, scenario.cell_bytes, map_page_s, device, drafts)


def draft_price(scenario: Scenario, kernel: Kernel, price: PassPrice) -> DraftPrice | None:
    """What drafting costs where ``price`` is of the model's passes; None if it takes none. Raises ``UserError``."""
    section, machine = scenario.speculation, scenario.machine
    if section.method == "ngram":
        return None
    if section.share is not None:
        return DraftPrice(price, section.share)
    if section.method != "draft-model":
        return DraftPrice(price, head_share(scenario.model.name, machine.weights))
    if section.model is not None:
        if machine.device is None:
            raise UserError(
                f"{scenario.name}: speculation.model: times of {section.model} are known on devices alone; give "
                "machine.device, or speculation.profile or share"
            )
        engine: Engine = "vllm" if scenario.server.scheduler == "vllm" else "llamacpp"
        profile = load_profile(find_profile(section.model, machine.device, tp=machine.tensor_parallel, engine=engine))
    else:
        profile = load_profile(section.profile or "", scenario.folder)
    # What the host adds to a step it adds once.
    profile = profile.model_copy(update={"host": Host(seconds=0.0, source="nothing")})
    return DraftPrice(CostModel(profile).pass_price(kernel))


def ledger_for(scenario: Scenario, policy: Policy, costs: CostModel) -> TimeBreakdown:
    """The time breakdown for a run."""
    return TimeBreakdown(costs, policy, scenario.server.slots, scenario.n_ubatch)


def held_to_its_word(scenario: Scenario, policy: Policy, always: bool) -> Policy:
    """The policy, looked at as it runs if it, or the scheduler, is of others, or ``always``."""
    added = server_defaults.SCHEDULERS.origin(scenario.server.scheduler) is not None
    if not (added or always or is_of_others(policy)):
        return policy
    scheduler = scenario.server.scheduler if added or always else ""
    return CheckedPolicy(policy, scenario.n_ubatch, n_batch=scenario.n_batch, scheduler=scheduler, always=always)


def what_ran(scenario: Scenario, policy: Policy) -> dict[str, Any]:
    """The keys of a summary that say what was run; ``scenario``: of a server under the policy."""
    return {
        "scenario": scenario.name,
        "policy": policy.name,
        "engine": str(scenario.engine) if scenario.engine else None,
        "scheduler": scenario.server.scheduler,
        "cells": scenario.context_cells,
        "slots": scenario.server.slots,
        "seed": scenario.seed,
        "assumed": list(assumptions(scenario)),
        "without_effect": without_effect(scenario),
    }


def refuse_if_nothing_fits(scenario: Scenario, policy: Policy) -> None:
    """Raise ``NothingFits`` if every prompt is too long for a slot, with what would do."""
    context = scenario.slot_context
    if scenario.server.scheduler == server_defaults.EARLY_SERVER or policy.unbounded:  # Prompts are shortened.
        return
    sizes = []
    for request in scenario.build_workload():
        if request.prompt_tokens < context:
            return
        sizes.append((request.prompt_tokens, request.output_tokens))
    if not sizes:
        return
    shortest, output = min(sizes)
    block = policy.block_size  # With blocks, one is never handed out.
    need = -(-(shortest + output) // block) * block + (block if block > 1 else 0)
    cells, slots = scenario.cache.cells, scenario.server.slots
    model = memory_shape(scenario.model.name).context if scenario.machine.device else None
    stated = "slot_context" in scenario.server.model_fields_set and cells > shortest
    if model is not None and model <= shortest:
        do = f"{scenario.model.name} takes {model:,} at most: shorter prompts, or another model"
    elif stated:
        do = f"server.slot_context of more than {shortest:,}"
    elif context < cells and cells // need:
        shared = "" if scenario.cache.policy == "streams" else ", or one cache for all of them (cache.unified)"
        do = f"at most {counted(cells // need, 'slot')} (server.slots){shared}"
    else:
        do = f"more cells (cache.cells, at least {need * (slots if context < cells else 1):,})"
    raise NothingFits(
        f"{scenario.name}: no request can run under {policy.name}: the shortest prompt has {shortest:,} tokens, and a "
        f"slot has {context:,} ({counted(cells, 'cell')}, {counted(slots, 'slot')}); what would do: {do}"
    )


def inferred(scenario: Scenario, profile: Profile, policy: Policy, recorder: Recorder) -> dict[str, str]:
    """What the run's times price without a measurement, and as what."""
    found = profile.inferred(policy.kernel, recorder.counts.cache.moved_cells > 0)
    basis = cost_model(scenario, profile).host_copies_basis
    tier = profile.device is not None and recorder.counts.host.cells_out
    if (recorder.counts.host.saves or tier) and basis is not None:
        found["host_copies"] = basis
    if recorder.counts.disk.cells_out:
        machine = scenario.machine
        found["disk"] = (
            f"at {machine.disk_gb_s:g} GB/s (machine.disk_gb_s) and {machine.disk_latency_s * 1e6:g} µs each"
        )
    if recorder.counts.cache.mapped_pages:
        stated = scenario.machine.map_page_us
        each = f"at {stated:g} µs for each page of a layer's K or V" if stated else "as if it took no time"
        found["mapping"] = f"{each} (machine.map_page_us)"
    return found


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for unreachable cycles less often: a run makes hardly any before its end.

    Nothing is frozen meanwhile: what is thawed is in the oldest generation, where the cycles of runs, with all that
    they hold, would hardly ever be found.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 50_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def naming_faults_of_plugins(policy: Policy) -> Iterator[None]:
    """Turn an error under a plug-in's policy that is no fault of the input into a ``UserError`` that says where."""
    try:
        yield
    except (UserError, WorkloadError, Divergence):
        raise
    except (Exception, SystemExit) as e:
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
    make: Make | None = None,
) -> Server:
    """A server of the scenario, which an environment may have several of: each has its own policy and recorder.

    ``make`` its scheduler instead of the one that the scenario names.
    """
    name = scenario.server.scheduler
    make = make or SCHEDULERS.get(name) or server_defaults.SCHEDULERS.added(name)
    scheduler = make(scenario, policy, backend, recorder)
    if scenario.speculation.on:
        if policy.forgets or policy.unbounded:
            raise UserError(
                f"{scenario.name}: speculation: {policy.name} has dropped tokens before drafts are rejected"
            )
        if policy.holds_states and not (scenario.speculation.reads_hidden_states and scenario.model.takes_back):
            raise UserError(
                f"{scenario.name}: speculation: not simulated beside states under llama-server, which goes back to a "
                "checkpoint where drafts are rejected; accepted: eagle or mtp with Qwen 3.5, Nemotron-H, LFM2, Ling 3, "
                "whose states can take tokens back"
            )
        if policy.chunks is not None:
            raise UserError(f"{scenario.name}: speculation: not together with chunks in host memory (cache.host_cells)")
        if backend.price is None:
            raise UserError(f"{scenario.name}: speculation: drafts are predicted, not run; leave it out")
        scheduler.use_drafts(Drafts(scenario, draft_price(scenario, policy.kernel, backend.price), recorder))
    prefetcher = Prefetcher(env, scenario.server.prefetch, policy, backend, recorder)
    if recorder.watches:
        recorder.cache(env.now, policy.usage())
    return Server(env, arrivals, scheduler, policy, backend, recorder, prefetcher, most_steps=most_steps)
