"""Which policy and settings serve this traffic on this machine (``search`` says how they are found)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsim.advice.candidates import known_engine
from kvsim.advice.memory_answer import MemoryAnswer
from kvsim.advice.recommendation import Recommendation
from kvsim.advice.search import Effort, RecommendProgress, SearchBudget, find_settings
from kvsim.advice.slo import read_slo
from kvsim.costs.memory_plan import plan
from kvsim.costs.profile import load_profile
from kvsim.costs.shipped import is_shipped
from kvsim.errors import UserError
from kvsim.experiments.traffic import read_traffic
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import parse_size
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.trace_files import trace_scenario
from workloads.traces.table_row import Time

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
    engine: str = "both",
    load: float = 1.0,
    seed: int | None = None,
    requests: int | None = None,
    workers: int | None = None,
    progress: RecommendProgress | None = None,
    budget: SearchBudget = SearchBudget(),  # noqa: B008  (immutable)
) -> Recommendation | MemoryAnswer:
    """Recommend settings for a scenario's workload or for a trace file.

    ``columns``, ``time``: which column of a table is what, and the unit of its arrivals (``trace_scenario``).
    ``trace_keys``: further keys of a trace's ``[workload]``, such as ``{"failed": "drop"}``.
    ``slo``: bounds such as ``ttft_p95<1s,tpot_p95<80ms`` (``slo.read_slo``). ``memory``: bytes for weights, cache and
    buffers, or a text such as 8GB; by default memory rules nothing out. ``model``: the model that is
    served, by default the scenario's, or for a trace the profile's; if the profile was measured on another one, the
    answer is a ``MemoryAnswer``, without any times. ``engine``: ``llamacpp``,
    ``vllm``, ``both``, or ``any``, which includes layouts that no engine has. ``load``: a multiple of the workload's
    own. ``requests``: number in the longest runs (for sessions, of conversations), by default at most 400. ``workers``:
    number of processes, by default one per processor; it does not change the result. Raises ``UserError`` and
    ``WorkloadError``.
    """
    _check_arguments(source, trace, load, requests, workers)
    service_level = read_slo(slo)
    memory_bytes = parse_size(memory) if isinstance(memory, str) else memory
    if trace is not None:
        source = trace_scenario(trace, columns=columns, time=time, **(trace_keys or {}))
    base = _base_scenario(source, profile, seed)
    measured = load_profile(base.machine.profile, base.folder)
    if weights is not None and model is None:
        raise UserError("--weights: name the model whose weights these are (--model)")
    named = model or (base.model.name if trace is None else None)
    served = named or measured.model
    shape = memory_shape(served)
    plan(shape, weights=weights, memory=memory)  # Raises ``UserError`` for what it does not know.
    traffic = read_traffic(base, budget.replications, requests, load)
    asked: dict[str, Any] = {
        "slo": service_level,
        "engine": known_engine(engine),
        "load": load,
        "memory": memory_bytes,
        "model": shape.name,
        "named_model": named is not None,
        "profile": measured,
        "scenario": traffic.scenario,
        "traffic": traffic,
        "command": _command(
            source, trace, columns, trace_keys, slo, engine, load, time, seed, requests, memory, model, weights, profile
        ),
    }
    if no_times := measured.why_no_times(served, measured.type_k, measured.type_v):
        return MemoryAnswer(**asked, shape=shape, weights=weights, no_times=no_times)
    return find_settings(asked, shape, weights, Effort(budget, workers, progress))


def _command(
    source: object,
    trace: object,
    columns: Mapping[str, str] | None,
    trace_keys: Mapping[str, Any] | None,
    slo: str,
    engine: str,
    load: float,
    *given: object,
) -> str:
    """The command line of these arguments; a scenario that was given as an object is called by its name."""
    what = ("--scenario", getattr(source, "name", source)) if trace is None else ("--trace", trace)
    flags = [_FLAGS[key] for key in trace_keys or ()]
    mapping = ",".join(f"{ours}={theirs}" for ours, theirs in columns.items()) if columns else None
    names = ("--time", "--seed", "--requests", "--memory", "--model", "--weights", "--profile")
    pairs = [
        what,
        ("--columns", mapping),
        ("--slo", slo),
        ("--engine", engine),
        ("--load", f"{load:g}"),
        *zip(names, given, strict=True),
    ]
    typed = [str(text) for name, value in pairs if value is not None for text in (name, value)]
    return shlex.join(["kvsim", "recommend", *typed, *flags])


def _check_arguments(source: object, trace: object, load: float, requests: int | None, workers: int | None) -> None:
    if (source is None) == (trace is None):
        raise UserError("recommend: give either a scenario or a trace")
    if not 1e-6 <= load <= 1e6:
        raise UserError(f"--load is {load}; a number from 0.000001 to 1000000 is accepted")
    for name, value in (("--requests", requests), ("--workers", workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; at least 1 is accepted")


def _base_scenario(source: str | Path | Scenario | None, profile: str | None, seed: int | None) -> Scenario:
    """The scenario asked about, with the profile and the seed that were given."""
    base = load_scenario(source)  # type: ignore[arg-type]
    changes: dict[str, Any] = {} if seed is None else {"seed": seed}
    if profile is not None:
        is_file = not is_shipped(profile) and "\0" not in profile and Path(profile).is_file()
        changes["machine__profile"] = str(Path(profile).resolve()) if is_file else profile
    return load_scenario(base, **changes)
