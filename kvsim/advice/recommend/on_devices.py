"""Recommendations for named devices: the base scenario on each of them, and one answer that compares several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from kvsim.advice.recommend.device_comparison import DeviceAnswer, DeviceComparison, mean_rates
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search import Effort, RecommendProgress, find_settings
from kvsim.advice.recommend.slo import Slo
from kvsim.advice.recommend.trials import TrialRun, run_trial
from kvsim.costs.device_profiles import find_device_profile
from kvsim.costs.devices import device_named
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import default_cells, llamacpp_cells, plan
from kvsim.costs.memory_settings import Engine
from kvsim.errors import NoTimes, UserError
from kvsim.experiments.traffic import OfferedLoad, Traffic, read_traffic
from kvsim.model.attention_groups import MemoryShape
from kvsim.model.engine_shapes import Storage
from kvsim.model.memory_shapes import memory_shape
from kvsim.scenario.device_defaults import engine_on
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
    "machine": ("profile", "device", "engine", "tensor_parallel", "weights"),
}
"""What a scenario says of the machine that it was written for, by section."""

Table = tuple[dict[str, Any], str, Path]
"""A scenario's table, its name for messages, and the folder at which relative paths start (``scenario.table_of``)."""


@dataclass(frozen=True)
class Place:
    """What serves: a model on devices."""

    devices: tuple[str, ...]
    model: str
    tensor_parallel: int
    weights: str | None
    profile: str | None
    """The profile that the scenario or the user chose for its device; None: found by model and device."""
    kv: Storage = "f16"
    """Storage type of K and V."""


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

    def fields(self, traffic: Traffic, shape: MemoryShape, **more: Any) -> dict[str, Any]:
        """The fields of ``Advice`` that all answers share, and further ones or others in their place."""
        asked = {"slo": self.slo, "engine": self.engine or "both", "load": self.load, "command": self.command}
        served = {"model": shape.name, "named_model": True, "profile": None, "memory": None}
        return {**asked, **served, "traffic": traffic, "scenario": traffic.scenario, **more}


def read_devices(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of devices that were given. Raises ``UserError`` for one that is not known, and for one given twice."""
    names = (given,) if isinstance(given, str) else tuple(given or ())
    for at, name in enumerate(names):
        device_named(name)
        if name in names[:at]:
            raise UserError(f"--device: {name} is given twice; each device is compared once")
    return names


def read_prices(given: str | Mapping[str, float] | None, devices: Sequence[str]) -> dict[str, float]:
    """Prices of an hour by device, of a text such as ``rtx4090=0.4,a100_sxm=1.8``. Raises ``UserError``."""
    if given is None:
        return {}
    pairs = [part.partition("=")[::2] for part in given.split(",")] if isinstance(given, str) else list(given.items())
    prices: dict[str, float] = {}
    for name, price in ((str(name).strip(), str(price).strip()) for name, price in pairs):
        if not name or not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,2})?", price) or not 0 < float(price) < 1e9:
            raise UserError(
                f"--price: {f'{name}={price}'!r:.60}: a device and the price of an hour above 0 are expected, such as "
                "rtx4090=0.4,a100_sxm=1.8"
            )
        try:
            device_named(name)
        except UserError as e:
            raise UserError(f"--price: {e}") from None
        if name in prices:
            raise UserError(f"--price: {name} is given twice; one price for each device is accepted")
        if name not in devices:
            asked = ", ".join(devices) or "none"
            raise UserError(f"--price: {name} is not among the devices asked about (--device): {asked}")
        prices[name] = float(price)
    return prices


def own_device(table: Table) -> str | None:
    """The device that a scenario names itself."""
    machine = table[0].get("machine")
    device = machine.get("device") if isinstance(machine, dict) else None
    return device if isinstance(device, str) else None


def place_of(
    table: Table,
    devices: Sequence[str],
    model: str | None,
    tp: int | None,
    weights: str | None,
    profile: str | None,
    kv: Storage | None = None,
) -> Place:
    """What serves, by the options given and, where they say nothing, by the scenario. Raises ``UserError``."""
    machine = table[0].get("machine") or {}
    of_scenario = not devices
    model = model or (table[0].get("model") or {}).get("name")
    if model is None:
        raise UserError("--device: name the model that is served (--model)")
    if tp is None:
        tp = machine.get("tensor_parallel", 1) if of_scenario else 1
    if weights is None and of_scenario:
        weights = machine.get("weights")
    if of_scenario:
        profile = profile or machine.get("profile")
        devices = [machine["device"]]
        kv = kv or (table[0].get("cache") or {}).get("type_k")
    place = Place(tuple(devices), model, tp, weights, profile, kv or "f16")
    plan(model, tensor_parallel=tp, weights=weights)  # Raises ``UserError`` for what it does not know.
    return place


def without_machine(table: Table) -> Scenario:
    """The scenario without what it says of the machine that it was written for, which follows from the device."""
    data, label, folder = table
    data = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    for section, keys in _SIZES.items():
        for key in keys:
            if isinstance(data.get(section), dict):
                data[section].pop(key, None)
    return validated(data, label, folder)


def recommend_on_devices(
    base: Scenario, place: Place, asked: Asked
) -> Recommendation | MemoryAnswer | DeviceComparison:
    """Answer for each device. ``base``: a scenario without a machine. Raises ``UserError``.

    One device is answered as any machine is, unless prices were given. Of several, fewer settings are judged at length.
    """
    q, shape = asked, memory_shape(place.model)
    replications = q.effort.budget.replications
    traffic = read_traffic(base, replications, _requests(base, q), q.load, DEFAULT_REQUESTS)
    if not q.compared:
        (device,) = place.devices
        return _on_device(device, traffic, place, shape, q)
    budget = q.effort.budget
    budget = budget._replace(kept=min(budget.kept, _KEPT), best=min(budget.best, _BEST))
    progress = None if q.effort.progress is None else _CountedRuns(q.effort.progress)
    q = replace(q, effort=q.effort._replace(budget=budget, progress=progress))
    answers = []
    for device in place.devices:
        if progress is not None:
            progress.next_search()
        try:
            found = _on_device(device, traffic, place, shape, q)
        except UserError as e:
            answers.append(DeviceAnswer(device, None, str(e), q.prices.get(device), place.tensor_parallel))
            continue
        except KeyboardInterrupt:
            if not any(answer.recommendation for answer in answers):
                raise
            break
        no_verdict = found.no_times if isinstance(found, MemoryAnswer) else ""
        served = _served_at_largest(found) if isinstance(found, Recommendation) else None
        answers.append(
            DeviceAnswer(
                device, found, no_verdict, q.prices.get(device), place.tensor_parallel, measured_largest=served
            )
        )
        if isinstance(found, Recommendation) and found.interrupted:
            break
    return DeviceComparison(**q.fields(traffic, shape), answers=tuple(answers), asked=place.devices)


def _requests(base: Scenario, q: Asked) -> int | None:
    """Requests in the longest runs; None: as many as a trace has or a scenario says of its conversations or its batch.

    How many requests a scenario runs says how long it looked, and not what its traffic is.
    """
    if q.requests is None and base.workload.count_key == "requests" and base.workload.kind != "batch":
        return DEFAULT_REQUESTS
    return q.requests


def _on_device(
    device: str, traffic: Traffic, place: Place, shape: MemoryShape, q: Asked
) -> Recommendation | MemoryAnswer:
    """The answer for one device. Raises ``UserError``, among others if the model does not fit into its memory."""
    tp, weights = place.tensor_parallel, place.weights
    engine = _engine(device, place, q)
    # Raises ``UserError``, with what would fit, if the model does not: its times would be of no use.
    if engine == "vllm":
        least = {"server__slots": _LEAST_SLOTS, "server__n_batch": _LEAST_BATCH}
        sizes: dict[str, Any] = {"batch": _LEAST_BATCH, "sequences": _LEAST_SLOTS}
        default_cells(place.model, device, tp=tp, weights=weights, type_k=place.kv, **sizes)
    else:
        least = {}
        llamacpp_cells(place.model, device, tp=tp, weights=weights, type_k=place.kv, type_v=place.kv)
    here = {"memory": device_named(device).memory_bytes, "device": device, "tensor_parallel": tp}
    try:
        if place.profile is not None:
            profile = load_profile(place.profile, traffic.scenario.folder)
        else:
            how: dict[str, Any] = {
                "tp": tp,
                "weights": weights,
                "engine": engine,
                "type_k": place.kv,
                "type_v": place.kv,
            }
            profile = find_device_profile(place.model, device, **how)
        if why := profile.why_no_times(shape.name, profile.type_k, profile.type_v):
            raise NoTimes(why)
    except NoTimes as e:
        return MemoryAnswer(**q.fields(traffic, shape, **here), shape=shape, weights=weights, no_times=str(e))
    changes: dict[str, Any] = {
        "machine__tensor_parallel": tp,
        "machine__weights": weights,
        "machine__profile": place.profile,
        "machine__engine": engine,
        **least,
        "cache__type_k": profile.type_k,
        "cache__type_v": profile.type_v,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    scenario = load_scenario(traffic.scenario, model=place.model, device=device, **changes)
    fields = q.fields(traffic, shape, profile=profile, scenario=scenario, **here)
    return find_settings(fields, shape, weights, q.effort)


def _engine(device: str, place: Place, q: Asked) -> Engine:
    """The engine on a device: the one that was asked for, if it was one, or that of what is served there.

    The scheduler and policy of a scenario count as little as its sizes: they are what is searched for.
    """
    if q.engine in get_args(Engine):
        found: Engine = get_args(Engine)[get_args(Engine).index(q.engine)]
        return found
    return engine_on({}, device, place.model, place.weights)


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
