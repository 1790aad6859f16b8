"""Which policy and settings serve this traffic on this machine (``search`` says how they are found)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsim.advice.recommend.candidates import NOW, known_engine, measured_engine
from kvsim.advice.recommend.device_comparison import DeviceComparison
from kvsim.advice.recommend.memory_answer import MemoryAnswer
from kvsim.advice.recommend.on_devices import Asked, recommend_on_devices, within_context, without_machine
from kvsim.advice.recommend.places import Value, each_once, own_device, places_of, read_devices, read_prices
from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search import Effort, RecommendProgress, SearchBudget, find_settings
from kvsim.advice.recommend.slo import read_slo
from kvsim.costs.load_profile import load_profile
from kvsim.costs.memory_plan import plan
from kvsim.costs.profile import Profile
from kvsim.costs.vllm_profile import serve_defaults
from kvsim.errors import UserError
from kvsim.experiments.traffic import read_traffic
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_versions import PRESENT
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import parse_size
from kvsim.scenario.scenario import Scenario, given_profile, load_scenario, table_of, validated
from kvsim.scenario.trace_files import trace_scenario
from kvsim.scenario.users import users_section
from workloads.traces.table_row import Time

_GIVEN = ("--time", "--seed", "--requests", "--memory", "--profile")
"""Options that are typed again as they were given."""
_FLAGS = {"skip_bad_rows": "--skip-bad-rows", "failed": "--drop-failed", "clock_reset": "--continue-clock"}
"""The option for each key of a trace."""


def recommend(
    source: str | Path | Scenario | None = None,
    *,
    slo: str,
    trace: str | Path | None = None,
    users: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    time: Time | None = None,
    trace_keys: Mapping[str, Any] | None = None,
    profile: str | None = None,
    memory: int | str | None = None,
    model: str | Sequence[str] | None = None,
    weights: str | Sequence[str] | None = None,
    kv: str | Sequence[str] | None = None,
    engine: str | None = None,
    load: float = 1.0,
    seed: int | None = None,
    requests: int | None = None,
    workers: int | None = None,
    device: str | Sequence[str] | None = None,
    tp: int | Sequence[int] | None = None,
    ngl: int | None = None,
    n_cpu_moe: int | None = None,
    cpu_gb_s: float | None = None,
    price: str | Mapping[str, float] | None = None,
    now: Mapping[str, Any] | None = None,
    progress: RecommendProgress | None = None,
    told: Callable[[str], None] | None = None,
    budget: SearchBudget = SearchBudget(),  # noqa: B008  (immutable)
) -> Recommendation | MemoryAnswer | DeviceComparison:
    """Recommend settings for a scenario's workload, for a trace file, or for users.

    ``users``: how many, and what each asks, as arguments of ``users_section``.
    ``columns``, ``time``, ``trace_keys``: of a trace, as in ``trace_scenario``. ``slo``: bounds such as
    ``ttft_p95<1s,tpot_p95<80ms`` (``slo.read_slo``). ``memory``: bytes for weights, cache and buffers, or a text such
    as 8GB; by default memory rules nothing out. ``model``: the model that is served, by default the scenario's, or for
    a trace the profile's; if the profile was measured on another one, the answer is a ``MemoryAnswer``, without times.
    ``engine``: ``llamacpp``, ``vllm``, ``both``, or ``any``, which includes layouts that no engine has; by default the
    one that the profile was measured on, and both where that is kvsim's own or a device is named. ``load``: a multiple
    of the workload's own. ``requests``: number in the longest runs (for sessions, of conversations), by default at most
    400, on a device 2,000. ``kv``: on a device, the storage type of K and V; by default 16 bits, and narrower ones
    where they help. ``workers``: processes, by default one per processor; they change no result. ``device``: the GPU
    that serves. ``tp``: GPUs that share the model. For several of ``device``, ``model``, ``tp``, ``weights`` or ``kv``,
    or with a ``price``, the answer is a ``DeviceComparison`` of all their combinations. ``ngl``,
    ``n_cpu_moe``, ``cpu_gb_s``: layers that llama.cpp keeps on the CPU, as in ``[machine]``. ``price``: of an hour by
    device, or a text such as ``rtx4090=0.4,a100_sxm=1.8``. ``now``: how the server that runs now is set, as keys of a
    scenario; it is judged beside the best, and no shorter context is typed. ``told``: is told at once what the model
    cannot hold. Raises ``UserError`` and ``WorkloadError``.
    """
    _check_arguments(source, trace, users, load, requests, workers)
    devices, prices = _devices_and_prices(device, price, tp, memory, profile)
    models, stored = each_once(model, "--model"), each_once(weights, "--weights")
    kinds, shared_by = each_once(kv, "--kv"), each_once(tp, "--tp")
    of_places = {"--model": models, "--weights": stored, "--kv": kinds, "--device": devices, "--tp": shared_by}
    placed = {"n_gpu_layers": ngl, "n_cpu_moe": n_cpu_moe, "cpu_gb_s": cpu_gb_s}
    typed = [
        ("--scenario", getattr(source, "name", source)),
        ("--trace", trace),
        *((f"--{key.replace('_', '-')}", value) for key, value in (users or {}).items()),
        *(("--columns", _pairs(columns)), ("--slo", slo), ("--engine", engine), ("--load", f"{load:g}")),
        *zip(_GIVEN, (time, seed, requests, memory, profile), strict=True),
        *((option, value) for option, values in of_places.items() for value in values),
        *(("--price", _pairs(prices)), ("--ngl", ngl), ("--n-cpu-moe", n_cpu_moe), ("--cpu-gb-s", cpu_gb_s)),
    ]
    known, effort = None if engine is None else known_engine(engine), Effort(budget, workers, progress, told)
    compared = bool(prices) or any(len(values) > 1 for values in of_places.values())
    asked = Asked(read_slo(slo), known, load, requests, _command(typed, trace_keys), effort, prices, compared, now)
    source = asked_about(source, trace=trace, users=users, columns=columns, time=time, trace_keys=trace_keys)
    table, profile = table_of(source), profile and given_profile(profile)
    table[0].update({} if seed is None else {"seed": seed})
    if devices or own_device(table) is not None:
        if memory is not None:
            raise UserError(f"--memory: {own_device(table)}, which the scenario names, has its own; leave it out")
        places = places_of(table, devices, models, shared_by, stored, kinds, profile, **placed)
        return recommend_on_devices(without_machine(table), places, asked)
    if any(value is not None for value in placed.values()):
        raise UserError("--ngl, --n-cpu-moe, --cpu-gb-s: layers not on a device; name it with --device")
    if kinds:
        raise UserError("--kv: on a device; on a machine that was measured, K and V are as they were then")
    base = load_scenario(validated(*table), **({} if profile is None else {"machine__profile": profile}))
    of_trace = trace is not None or users is not None
    only = _the_only(models, "--model"), _the_only(stored, "--weights")
    if of_trace and not models and profile is None:
        raise UserError(
            f"--model: {'a trace does' if users is None else 'users do'} not say which model serves; name it (kvsim "
            "plan --list, a config.json, FILE.gguf), or the server that runs (--url, --now)"
        )
    return _on_machine(base, asked, memory, *only, of_trace=of_trace)


def asked_about(
    source: str | Path | Scenario | None = None,
    *,
    trace: str | Path | None = None,
    users: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    time: Time | None = None,
    trace_keys: Mapping[str, Any] | None = None,
) -> str | Path | Scenario:
    """The scenario, or one of the trace or the users, that is given; arguments as for ``recommend``."""
    if trace is not None:
        return trace_scenario(trace, columns=columns, time=time, **(trace_keys or {}))
    if users is not None:
        return load_scenario({"name": "users", "workload": users_section(**users)})
    assert source is not None
    return source


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
    traffic = within_context(traffic, shape, asked.effort)
    more = {"memory": memory_bytes, "named_model": named is not None, "profile": measured}
    fields = asked.fields(traffic, shape, **more)
    if no_times := measured.why_no_times(served, measured.type_k, measured.type_v):
        return MemoryAnswer(**fields, shape=shape, weights=weights, no_times=no_times, least=asked.least(shape))
    engine = asked.engine or measured_engine(measured) or asked.known_engine or "both"
    fixed = _beside(traffic.scenario, measured, shape, engine, asked.now, (memory_bytes, weights))
    return find_settings({**fields, "engine": engine}, shape, weights, asked.effort, fixed=fixed)


def _beside(
    base: Scenario,
    measured: Profile,
    shape: MemoryShape,
    engine: str,
    now: Mapping[str, Any] | None,
    held: tuple[int | None, str | None],
) -> dict[str, Scenario]:
    """What runs now, and the engines' defaults; the context of a model that has none is the cells of the scenario.

    ``held``: the memory, of which vLLM takes its share, and the type of the weights in it.
    """
    data, label, folder = table_of(base)
    cache = {"type_k": measured.type_k, "type_v": measured.type_v}
    bare = {**data, "cache": cache, "server": {}, "model": {"name": measured.model}}
    beside = {}
    if now is not None:
        if "cache__cells" not in now and shape.context is None and now["server__scheduler"] != "vllm":
            raise UserError(f"--now: no -c, and how long the context of {shape.name} is is not known; add -c")
        # Times are those of the types that were measured.
        keys = {"cache__cells": shape.context, **now, **{f"cache__{key}": kind for key, kind in cache.items()}}
        keys |= {"cache__policy": "hybrid"} if shape.states else {}
        beside[NOW] = load_scenario(validated(bare, label, folder), **keys)
    for name, (kept, server) in _usual(shape, base.context_cells, cache, engine, *held).items():
        beside[name] = validated({**bare, "cache": kept, "server": server}, label, folder)
    return beside


def _usual(
    shape: MemoryShape, cells: int, types: dict[str, Any], engine: str, memory: int | None, weights: str | None
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The sections ``cache`` and ``server`` of engines that are started without a flag, by what they are called.

    ``cells``: the context where the model has none; without a memory vLLM's cache has no fewer.
    """
    context = shape.context or cells
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    if engine != "vllm":
        policy = "hybrid" if shape.states else f"llama.cpp-{PRESENT['llama.cpp'].version}"
        kept = {**types, "cells": context, "policy": policy}
        found["llama.cpp's defaults"] = kept, {"scheduler": "llama-server"}
    if engine != "llamacpp":
        batch, slots = serve_defaults(memory)
        cells = max(context, cells)
        if memory is not None:
            made = plan(shape, engine="vllm", parallel=slots, batch=batch, weights=weights, memory=memory, **types)
            cells = made.vllm_blocks(memory) * made.settings.block_size or cells  # What does not fit is told so.
        server = {"scheduler": "vllm", "slots": slots, "n_batch": batch, "slot_context": min(context, cells)}
        found["vLLM's defaults"] = {**types, "cells": cells, "policy": "vllm"}, server
    return found


def _the_only(values: Sequence[Value], option: str) -> Value | None:
    """The value that was given, if any. Raises ``UserError`` for several, which are compared on devices alone."""
    if len(values) > 1:
        raise UserError(f"{option}: several are compared on a device; name it with --device")
    return values[0] if values else None


def _pairs(given: Mapping[str, object] | None) -> str | None:
    """Keys and values as they are typed; None for none."""
    texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in (given or {}).items()}
    return ",".join(f"{key}={text}" for key, text in texts.items()) or None


def _command(pairs: Iterable[tuple[str, object]], trace_keys: Mapping[str, Any] | None) -> str:
    """The command line of these arguments; a scenario that was given as an object is called by its name."""
    typed = [str(text) for name, value in pairs if value is not None for text in (name, value)]
    return shlex.join(["kvsim", "recommend", *typed, *(_FLAGS[key] for key in trace_keys or ())])


def _check_arguments(
    source: object, trace: object, users: object, load: float, requests: int | None, workers: int | None
) -> None:
    if sum(given is not None for given in (source, trace, users)) != 1:
        raise UserError("recommend: give either a scenario, a trace or users")
    if not 1e-6 <= load <= 1e6:
        raise UserError(f"--load is {load}; a number from 0.000001 to 1000000 is accepted")
    for name, value in (("--requests", requests), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; at least 1 is accepted")


def _devices_and_prices(
    device: str | Sequence[str] | None,
    price: str | Mapping[str, float] | None,
    tp: object,
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
