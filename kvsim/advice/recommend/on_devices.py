"""Recommendations for named devices: the base scenario on each of them, and one answer that compares several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from kvsim.advice.recommend.candidates import NARROWER, NOW
from kvsim.advice.recommend.device_comparison import DeviceAnswer, DeviceComparison, mean_rates
from kvsim.advice.recommend.finalists import Finalist
from kvsim.advice.recommend.fleet import find_fleet
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.offers import with_weights_offered
from kvsim.advice.recommend.places import Place, Table
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search import Effort, RecommendProgress, find_settings
from kvsim.advice.recommend.slo import Slo
from kvsim.advice.recommend.trials import TrialRun, run_trial
from kvsim.costs.cpu_layers import check_served
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import default_cells, llamacpp_cells
from kvsim.costs.memory_settings import ENGINE_TITLES, Engine, PlanSettings
from kvsim.costs.served import Served
from kvsim.costs.vllm_blocks import block_size
from kvsim.errors import NoTimes, UserError
from kvsim.experiments.traffic import OfferedLoad, Traffic, read_traffic
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.device_defaults import engine_on, weights_assumed, with_weights_that_fit
from kvsim.scenario.scenario import Scenario, load_scenario, validated

DEFAULT_REQUESTS = 2000
"""Requests in the longest runs, unless others are asked for. A device serves hundreds at once: with fewer, the last one
arrives before a queue is seen to grow."""

_KEPT, _BEST = 6, 2
"""Settings in the second and the last stage of the search where devices are compared, of which only the best shows."""

_LEAST_SLOTS, _LEAST_BATCH = 32, 512
"""The smallest settings that are tried: a model that does not fit with these does not fit."""

_SIZES = {
    "server": ("slots", "n_batch", "n_ubatch", "slot_context", "chunked_prefill"),
    "cache": ("cells", "block_size", "type_k", "type_v", "kernel", "unified"),
    "machine": (
        *("profile", "device", "engine", "tensor_parallel", "weights"),
        *("n_gpu_layers", "n_cpu_moe", "cpu_gb_s"),
    ),
}
"""What a scenario says of the machine that it was written for, by section."""


@dataclass(frozen=True)
class Asked:
    """What is asked, wherever it is served."""

    slo: Slo
    engine: str | None
    """None: that of the profile."""
    load: float
    requests: int | None
    command: str
    effort: Effort
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of an hour by device."""
    compared: bool = False
    """Whether the answer is a comparison, of one device too."""
    now: Mapping[str, Any] | None = None
    """Keys of the scenario that say how the server that runs now is set."""

    @property
    def known_engine(self) -> str | None:
        """The engine that was asked for, or that of what runs now."""
        if self.engine is None and self.now is not None:
            return "vllm" if self.now["server__scheduler"] == "vllm" else "llamacpp"
        return self.engine

    def least(self, shape: MemoryShape) -> int:
        """The most tokens of a request under what runs now; 0 where that is not known."""
        if self.now is None or (shape.context is None and not {"cache__cells", "server__slot_context"} & set(self.now)):
            return 0
        return load_scenario({}, **{"cache__cells": shape.context, **self.now}).slot_context

    def fields(self, traffic: Traffic, shape: MemoryShape, **more: Any) -> dict[str, Any]:
        """The fields of ``Advice`` that all answers share, and further ones or others in their place."""
        asked = {"slo": self.slo, "engine": self.known_engine or "both", "load": self.load, "command": self.command}
        served = {"model": shape.name, "named_model": True, "profile": None, "memory": None}
        return {**asked, **served, "traffic": traffic, "scenario": traffic.scenario, **more}


def without_machine(table: Table) -> Scenario:
    """The scenario without what it says of the machine that it was written for, which follows from the device."""
    data, label, folder = table
    data = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    for section, keys in _SIZES.items():
        for key in keys:
            if isinstance(data.get(section), dict):
                data[section].pop(key, None)
    return validated(data, label, folder)


def within_context(traffic: Traffic, shape: MemoryShape, effort: Effort) -> Traffic:
    """The traffic without what the model cannot hold, of which is told at once. Raises ``UserError`` if that is all."""
    traffic = traffic.within(shape.context, f"{shape.name}'s context")
    if traffic.beyond and effort.told is not None:
        effort.told(traffic.beyond)
    return traffic


def recommend_on_devices(
    base: Scenario, places: Sequence[Place], asked: Asked
) -> Recommendation | MemoryAnswer | DeviceComparison:
    """Answer for each place. ``base``: a scenario without a machine. Raises ``UserError``.

    One place is answered as any machine is, unless prices were given. Of several, fewer settings are judged at length.
    """
    q = asked
    replications = q.effort.budget.replications
    traffic = read_traffic(base, replications, _requests(base, q), q.load, DEFAULT_REQUESTS)
    if not q.compared:
        (place,) = places
        return _at(place, traffic, q)
    budget = q.effort.budget
    budget = budget._replace(kept=min(budget.kept, _KEPT), best=min(budget.best, _BEST))
    progress = None if q.effort.progress is None else _CountedRuns(q.effort.progress)
    q = replace(q, effort=q.effort._replace(budget=budget, progress=progress))
    answers = []
    for place in places:
        price = q.prices.get(place.device)
        if progress is not None:
            progress.next_search()
        try:
            found = _at(place, traffic, q)
        except UserError as e:
            answers.append(DeviceAnswer(place, None, str(e), price))
            continue
        except KeyboardInterrupt:
            if not any(answer.recommendation for answer in answers):
                raise
            break
        no_verdict = found.no_times if isinstance(found, MemoryAnswer) else ""
        served = _served_at_largest(found) if isinstance(found, Recommendation) else None
        answers.append(DeviceAnswer(place, found, no_verdict, price, measured_largest=served))
        if isinstance(found, Recommendation) and found.interrupted:
            break
    fields = q.fields(traffic, memory_shape(places[0].model))
    models = ", ".join(dict.fromkeys(memory_shape(place.model).name for place in places))
    return DeviceComparison(**{**fields, "model": models}, answers=tuple(answers), asked=tuple(places))


def _requests(base: Scenario, q: Asked) -> int | None:
    """Requests in the longest runs; None: as many as a trace has or a scenario says of its conversations or its batch.

    How many requests a scenario runs says how long it looked, and not what its traffic is.
    """
    if q.requests is None and base.workload.count_key == "requests" and base.workload.kind != "batch":
        return DEFAULT_REQUESTS
    return q.requests


def _at(place: Place, traffic: Traffic, q: Asked) -> Recommendation | MemoryAnswer:
    """The answer for one place. Raises ``UserError``, among others if the model does not fit into its memory."""
    shape, engine = memory_shape(place.model), _engine(place, q)
    vllm = engine == "vllm"
    # Of models with states no others are simulated, whatever a scenario or a command line says.
    policy = {"cache__policy": engine if vllm else "hybrid"} if shape.states else {}
    # Raises ``UserError``, with what would fit, if the model does not: its times would be of no use.
    served, cells = place.served(engine), _least_cells if vllm else llamacpp_cells
    if q.compared:
        cells(served)  # Weights that differ unasked would make it a comparison of something else.
    else:
        served, _ = with_weights_that_fit(served, cells)
    check_served(served)
    weights = served.weights
    if weights != place.weights and q.effort.told is not None:
        q.effort.told(f"{place.model} on {place.device}: {weights_assumed(weights or '')}")
    traffic = within_context(traffic, shape, q.effort)
    here: dict[str, Any] = {"device": place.device, "tensor_parallel": place.tensor_parallel}
    here["memory"] = device_named(place.device).memory_bytes
    try:
        if place.profile is not None:
            profile = load_profile(place.profile, traffic.scenario.folder)
        else:
            profile = find_device_profile(**vars(served))
        if why := profile.why_no_times(shape.name, profile.type_k, profile.type_v):
            raise NoTimes(why)
    except NoTimes as e:
        fields = q.fields(traffic, shape, **here)
        return MemoryAnswer(**fields, shape=shape, weights=weights, no_times=str(e), least=q.least(shape))
    changes: dict[str, Any] = {
        "model": place.model,
        "device": place.device,
        "machine__tensor_parallel": place.tensor_parallel,
        "machine__weights": weights,
        "machine__profile": place.profile,
        "machine__engine": engine,
        "machine__n_gpu_layers": place.n_gpu_layers,
        "machine__n_cpu_moe": place.n_cpu_moe,
        "machine__cpu_gb_s": place.cpu_gb_s,
        **policy,
        "cache__type_k": profile.type_k,
        "cache__type_v": profile.type_v,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    scenario = load_scenario(traffic.scenario, **changes, **(_smallest(place, shape) if vllm else {}))
    fields = q.fields(traffic, shape, profile=profile, scenario=scenario, **here)
    # A profile of the user's own says nothing of other types.
    narrower = NARROWER[engine] if place.kv is None and place.profile is None else ()
    fixed = _fixed(traffic, q, changes, policy, f"{ENGINE_TITLES[engine]}'s defaults")
    found = find_settings(fields, shape, weights, q.effort, narrower, fixed)
    found = found if weights or q.compared else with_weights_offered(found, shape, engine, q.effort)
    if found.interrupted or not found.best:
        return found
    # Of several devices only the first settings show.
    return _with_fleet(found, found.best[:1] if q.compared else found.best, q.effort)


def _smallest(place: Place, shape: MemoryShape) -> dict[str, Any]:
    """The smallest settings of vLLM that are tried, as keys of a scenario."""
    if not shape.states:
        return {"server__slots": _LEAST_SLOTS, "server__n_batch": _LEAST_BATCH}
    # A block is a step's least then, and the sequences are as many as there are blocks for.
    s = PlanSettings(type_k=place.kv or "f16", type_v=place.kv or "f16", tensor_parallel=place.tensor_parallel)
    return {"server__n_batch": max(_LEAST_BATCH, block_size(shape, s))}


def _fixed(
    traffic: Traffic, q: Asked, place: Mapping[str, Any], policy: Mapping[str, Any], usually: str
) -> dict[str, Scenario]:
    """Settings that are run whatever is searched, by title: those of now, and the engine's defaults, ``usually``.

    ``place``: keys of the scenario there, ``policy`` among them, which those of now do not replace.
    """
    fixed = {} if q.now is None else {NOW: load_scenario(traffic.scenario, **{**place, **q.now, **policy})}
    if not q.compared:
        try:
            fixed[usually] = load_scenario(traffic.scenario, **place)
        except UserError as e:  # With states vLLM does not start by itself everywhere.
            if q.effort.told is not None:
                q.effort.told(f"{usually}: {e}")
    return fixed


def _with_fleet(found: Recommendation, best: Sequence[Finalist], effort: Effort) -> Recommendation:
    """The answer with how many servers the load takes, where one does not suffice; without it after an interrupt.

    ``best``: settings that they may have.
    """

    def counted_on(runs: int) -> None:
        if effort.progress is not None:
            effort.progress(found.runs + runs, found.runs + runs, 0)

    try:
        return replace(found, fleet=find_fleet(best, found.traffic, found.slo, effort.workers, counted_on))
    except KeyboardInterrupt:
        return replace(found, interrupted="while several servers were tried")


def _least_cells(of: Served) -> int:
    """The cells that the smallest settings leave. Raises ``UserError`` if the model does not fit."""
    sizes: dict[str, Any] = {"batch": _LEAST_BATCH, "sequences": _LEAST_SLOTS, "type_k": of.type_k}
    return default_cells(of.model, of.device, tp=of.tp, weights=of.weights, **sizes)


def _engine(place: Place, q: Asked) -> Engine:
    """The engine on a device: the one that was asked for, if it was one, or that of what is served there.

    The scheduler and policy of a scenario count as little as its sizes: they are what is searched for.
    """
    if q.known_engine in get_args(Engine):
        found: Engine = get_args(Engine)[get_args(Engine).index(q.known_engine)]
        return found
    placed = {"n_gpu_layers": place.n_gpu_layers, "n_cpu_moe": place.n_cpu_moe}
    return engine_on({"machine": placed}, place.device, place.model, place.weights)


def _served_at_largest(found: Recommendation) -> OfferedLoad | None:
    """What the best setting serves per second at the largest load that every replication meets, by runs at it.

    Only for a closed loop, in which the service decides how many requests come; None otherwise.
    """
    if found.traffic.offered is not None or not found.best or not all(found.best[0].loads):
        return None
    first, load = found.best[0], min(found.best[0].loads, default=1.0)
    return mean_rates(
        run_trial(found.traffic, TrialRun(first.candidate.number, replication, first.candidate.scenario, 1.0, load))
        for replication in range(len(first.loads))
    )


class _CountedRuns:
    """The progress of several searches, one after another, told as that of one."""

    def __init__(self, told: RecommendProgress):
        self._told = told
        self._before = self._now = (0, 0)

    def next_search(self) -> None:
        """What follows comes on top of what was told."""
        self._before, self._now = (self._before[0] + self._now[0], self._before[1] + self._now[1]), (0, 0)

    def __call__(self, done: int, total: int, failed: int) -> None:
        self._now = done, failed
        self._told(self._before[0] + done, self._before[0] + total, self._before[1] + failed)
