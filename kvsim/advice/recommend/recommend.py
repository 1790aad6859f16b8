"""Which policy and settings serve this traffic on this machine (``search`` says how they are found)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsim.advice.recommend.candidates import known_engine, measured_engine
from kvsim.advice.recommend.device_comparison import DeviceComparison
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.on_devices import (
    Asked,
    own_device,
    place_of,
    read_devices,
    read_prices,
    recommend_on_devices,
    without_machine,
)
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search import Effort, RecommendProgress, SearchBudget, find_settings
from kvsim.advice.recommend.slo import read_slo
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import plan
from kvsim.errors import UserError
from kvsim.experiments.traffic import read_traffic
from kvsim.model.engine_shapes import Storage
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import parse_size
from kvsim.scenario.scenario import Scenario, given_profile, load_scenario, table_of, validated
from kvsim.scenario.trace_files import trace_scenario
from workloads.traces.table_row import Time

_GIVEN = ("--time", "--seed", "--requests", "--memory", "--model", "--weights", "--kv", "--profile")
"""Options that are typed again as they were given."""
_FLAGS = {"skip_bad_rows": "--skip-bad-rows", "failed": "--drop-failed", "clock_reset": "--continue-clock"}
"""The option for each key of a trace."""


def recommend(
    source: str | Path | Scenario | None = None,
    *,
    slo: str,
    trace: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    time: Time | None = None,
    trace_keys: Mapping[str, Any] | None = None,
    profile: str | None = None,
    memory: int | str | None = None,
    model: str | None = None,
    weights: str | None = None,
    kv: Storage | None = None,
    engine: str | None = None,
    load: float = 1.0,
    seed: int | None = None,
    requests: int | None = None,
    workers: int | None = None,
    device: str | Sequence[str] | None = None,
    tp: int | None = None,
    price: str | Mapping[str, float] | None = None,
    progress: RecommendProgress | None = None,
    budget: SearchBudget = SearchBudget(),  # noqa: B008  (immutable)
) -> Recommendation | MemoryAnswer | DeviceComparison:
    """Recommend settings for a scenario's workload or for a trace file.

    ``columns``, ``time``, ``trace_keys``: of a trace, as in ``trace_scenario``. ``slo``: bounds such as
    ``ttft_p95<1s,tpot_p95<80ms`` (``slo.read_slo``). ``memory``: bytes for weights, cache and buffers, or a text such
    as 8GB; by default memory rules nothing out. ``model``: the model that is served, by default the scenario's, or for
    a trace the profile's; if the profile was measured on another one, the answer is a ``MemoryAnswer``, without times.
    ``engine``: ``llamacpp``, ``vllm``, ``both``, or ``any``, which includes layouts that no engine has; by default the
    one that the profile was measured on, and both where that is kvsim's own or a device is named. ``load``: a multiple
    of the workload's own. ``requests``: number in the longest runs (for sessions, of conversations), by default at most
    400, on a device 2,000. ``kv``: on a device, the storage type of K and V. ``workers``: processes, by default one per
    processor; they change no result. ``device``: the GPU that serves; for several, or with a ``price``, the answer is a
    ``DeviceComparison``. ``tp``: GPUs that share the model. ``price``: of an hour by device, or a text such as
    ``rtx4090=0.4,a100_sxm=1.8``. Raises ``UserError`` and ``WorkloadError``.
    """
    _check_arguments(source, trace, load, requests, workers)
    devices, prices = _devices_and_prices(device, price, tp, memory, profile)
    what = ("--scenario", getattr(source, "name", source)) if trace is None else ("--trace", trace)
    typed = [what, ("--columns", _pairs(columns)), ("--slo", slo), ("--engine", engine), ("--load", f"{load:g}")]
    typed += zip(_GIVEN, (time, seed, requests, memory, model, weights, kv, profile), strict=True)
    typed += [*(("--device", name) for name in devices), ("--tp", tp), ("--price", _pairs(prices))]
    known, effort = None if engine is None else known_engine(engine), Effort(budget, workers, progress)
    compared = len(devices) > 1 or bool(prices)
    asked = Asked(read_slo(slo), known, load, requests, _command(typed, trace_keys), effort, prices, compared)
    if trace is not None:
        source = trace_scenario(trace, columns=columns, time=time, **(trace_keys or {}))
    assert source is not None
    table, profile = table_of(source), profile and given_profile(profile)
    table[0].update({} if seed is None else {"seed": seed})
    if devices or own_device(table) is not None:
        if memory is not None:
            raise UserError(f"--memory: {own_device(table)}, which the scenario names, has its own; leave it out")
        place = place_of(table, devices, model, tp, weights, profile, kv)
        return recommend_on_devices(without_machine(table), place, asked)
    if kv is not None:
        raise UserError("--kv: on a device; on a machine that was measured, K and V are as they were then")
    base = load_scenario(validated(*table), **({} if profile is None else {"machine__profile": profile}))
    return _on_machine(base, asked, memory, model, weights, of_trace=trace is not None)


def _on_machine(
    base: Scenario, asked: Asked, memory: int | str | None, model: str | None, weights: str | None, *, of_trace: bool
) -> Recommendation | MemoryAnswer:
    """The answer for the machine of the base scenario's profile."""
    memory_bytes = parse_size(memory) if isinstance(memory, str) else memory
    measured = load_profile(base.machine.profile, base.folder)
    if measured.device is not None:
        raise UserError(
            f"--profile: {measured.name} is of {measured.device}: give --device {measured.device} --model "
            f"{measured.model} too, so that memory and settings are those of the device"
        )
    if weights is not None and model is None:
        raise UserError("--weights: name the model whose weights these are (--model)")
    named = model or (None if of_trace else base.model.name)
    served = named or measured.model
    shape = memory_shape(served)
    plan(shape, weights=weights, memory=memory)  # Raises ``UserError`` for what it does not know.
    traffic = read_traffic(base, asked.effort.budget.replications, asked.requests, asked.load)
    more = {"memory": memory_bytes, "named_model": named is not None, "profile": measured}
    fields = asked.fields(traffic, shape, **more)
    if no_times := measured.why_no_times(served, measured.type_k, measured.type_v):
        return MemoryAnswer(**fields, shape=shape, weights=weights, no_times=no_times)
    engine = asked.engine or measured_engine(measured) or "both"
    return find_settings({**fields, "engine": engine}, shape, weights, asked.effort)


def _pairs(given: Mapping[str, object] | None) -> str | None:
    """Keys and values as they are typed; None for none."""
    texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in (given or {}).items()}
    return ",".join(f"{key}={text}" for key, text in texts.items()) or None


def _command(pairs: Iterable[tuple[str, object]], trace_keys: Mapping[str, Any] | None) -> str:
    """The command line of these arguments; a scenario that was given as an object is called by its name."""
    typed = [str(text) for name, value in pairs if value is not None for text in (name, value)]
    return shlex.join(["kvsim", "recommend", *typed, *(_FLAGS[key] for key in trace_keys or ())])


def _check_arguments(source: object, trace: object, load: float, requests: int | None, workers: int | None) -> None:
    if (source is None) == (trace is None):
        raise UserError("recommend: give either a scenario or a trace")
    if not 1e-6 <= load <= 1e6:
        raise UserError(f"--load is {load}; a number from 0.000001 to 1000000 is accepted")
    for name, value in (("--requests", requests), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; at least 1 is accepted")


def _devices_and_prices(
    device: str | Sequence[str] | None,
    price: str | Mapping[str, float] | None,
    tp: int | None,
    memory: object,
    profile: object,
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The devices that were named, and their prices; refuses what needs a device, or what a device says itself."""
    devices = read_devices(device)
    if not devices:
        for name, value, what in (("--price", price, "prices are of devices"), ("--tp", tp, "GPUs that share a model")):
            if value is not None:
                raise UserError(f"{name}: {what}; name them with --device")
    elif memory is not None:
        raise UserError("--memory and --device: both say how much memory there is; give one of them")
    elif profile is not None:
        raise UserError("--profile and --device: both say whose times are predicted; give one of them")
    return devices, read_prices(price, devices)
