"""The settings that a recommendation chooses from, given the traffic, the memory and the engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvsim.advice.memory.engine_flags import (
    COMMANDS,
    OLD_NOTE,
    Flags,
    llamacpp_flags,
    model_argument,
    padded,
    vllm_flags,
)
from kvsim.advice.memory.scenario_memory import plan_scenario
from kvsim.advice.recommend.families import (
    SettingsFamily,
    TargetEngine,
    device_families,
    host_caches,
    machine_families,
)
from kvsim.costs.memory_plan import Plan, default_cells
from kvsim.costs.memory_settings import ENGINE_TITLES, Engine
from kvsim.costs.profile import Profile
from kvsim.costs.vllm_profile import profile_run
from kvsim.errors import UserError, no_such
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.attention_groups import MemoryShape
from kvsim.model.engine_versions import LLAMACPP_B4666, PRESENT
from kvsim.model.storage_types import VLLM_CACHE_TYPES, format_size
from kvsim.scenario.scenario import Scenario, engine_version, load_scenario
from kvsim.scenario.server_defaults import EARLY_SERVER, TODAYS_SERVERS
from policies import available
from policies.presets.papers import searches, token_eviction
from workloads import named_rng

ENGINES = ("llamacpp", "vllm", "both", "any")
"""Engines that can be asked for; ``any`` includes layouts that no engine has."""
_TARGETS: dict[str, tuple[TargetEngine, ...]] = {
    "llamacpp": ("llamacpp",),
    "vllm": ("vllm",),
    "both": ("llamacpp", "vllm"),
    "any": ("llamacpp", "vllm", "research"),
}

_MEASURED: dict[str, TargetEngine] = {"llama": "llamacpp", "vllm": "vllm"}
"""The engine whose settings are searched by default, by how the name of the one that a profile measured begins:
llama.cpp, llama-cpp-python, llama-server or vLLM."""

_NAMES: dict[str, str] = {**ENGINE_TITLES, "any": "any engine"}

REASONS = {
    "engine": "not available in this engine",
    "forgets": "not an option: drops tokens or knows the future",
    "memory": "does not fit into the memory",
    "untried": "not in the sample that was tried",
    "fails": "requests fail or are cut short",
    "slo": "misses the service level",
    "dominated": "sustains a lower load than others",
}
"""Reasons for ruling a setting out, in the order in which they are checked."""

_MOST_CELLS = 2**24
_REUSE_FACTOR = 4
"""Size of a cache that also keeps prefixes for reuse, as a multiple of what all slots need at once."""

_ALL_SETTINGS: dict[str, Any] = {
    "cache__host_cells": 0,
    "cache__eviction": "lru",
    "server__preemption": "recompute",
    "server__prefetch": "none",
}
"""Keys that no search varies."""

_NOT_AN_OPTION = (
    "ring",
    "paged-window",
    "oracle",
    *(preset.name for preset in (*token_eviction.PRESETS, *searches.PRESETS)),
)


@dataclass(frozen=True)
class Candidate:
    """One setting of the search."""

    number: int
    family: str
    engine: TargetEngine
    grid_index: tuple[int, ...]
    """Position in the grid of its family, one index per axis."""
    scenario: Scenario
    """The scenario with this setting, with the model and the cache types of the profile."""
    memory_bytes: int
    """Total memory of the engine, weights and buffers included; partly estimated (``kvsim plan``)."""
    windows: bool
    """Whether the model whose memory was calculated has sliding windows."""
    reason: str = ""
    """A key of ``REASONS`` if the setting was ruled out before any run."""
    detail: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen values by name."""
        server, cache = self.scenario.server, self.scenario.cache
        return {
            "policy": cache.policy,
            "scheduler": server.scheduler,
            "unified": self.scenario.unified,
            "cells": cache.cells,
            "slots": server.slots,
            "slot_context": self.scenario.slot_context,
            "n_batch": self.scenario.n_batch,
            "n_ubatch": self.scenario.n_ubatch,
            "block_size": cache.block_size,
            "threshold": cache.threshold,
            "cache_ram": server.cache_ram if server.scheduler in TODAYS_SERVERS else None,
            "prefix_cache": cache.policy in ("vllm", "paged") and cache.prefix_cache,
            "chunked_prefill": server.chunked_prefill,
            "type_k": cache.type_k,
            "type_v": cache.type_v,
        }

    @property
    def flags(self) -> Flags:
        """Command-line options of the engine; empty if no engine has the setting."""
        if self.engine == "llamacpp":
            return llamacpp_flags(self.scenario, windows=self.windows)
        return vllm_flags(self.scenario) if self.engine == "vllm" else ()

    @property
    def command(self) -> str:
        """Command that takes the options, on a device with the model that it serves."""
        if self.engine == "research":
            return "kvsim run"
        on_device = self.engine == "vllm" and self.scenario.machine.device is not None
        return COMMANDS[self.engine] + (f" {model_argument(self.scenario.model.name)}" if on_device else "")

    @property
    def label(self) -> str:
        """Short description for tables and figures."""
        server, cache = self.scenario.server, self.scenario.cache
        n_batch, n_ubatch = self.scenario.n_batch, self.scenario.n_ubatch
        batch = f"{n_batch}" if self.engine == "vllm" else f"{n_batch}/{n_ubatch}"
        host = f", host cache {'on' if server.cache_ram else 'off'}" if self._has_host_cache else ""
        return f"{self.family}, {cache.cells:,} cells, {server.slots} slots, batch {batch}{host}"

    @property
    def host_bytes(self) -> float:
        """Limit of llama-server's host cache, which comes on top of ``memory_bytes``; infinite if it has none."""
        limit = self.scenario.server.cache_ram if self._has_host_cache else 0
        return limit * 2**20 if limit >= 0 else math.inf

    @property
    def memory_order(self) -> tuple[int, float, int]:
        """Sort key among settings that are equal otherwise: the least memory first, then in order of search."""
        return self.memory_bytes, self.host_bytes, self.number

    @property
    def _has_host_cache(self) -> bool:
        """Whether it is of a llama-server with ``--cache-ram``."""
        return self.engine == "llamacpp" and self.scenario.server.scheduler in TODAYS_SERVERS

    @property
    def notes(self) -> list[str]:
        """Remarks that users should read along with the setting."""
        if self.engine == "llamacpp" and self.scenario.engine == LLAMACPP_B4666:
            return [OLD_NOTE]
        if self.engine == "research":
            return ["no engine has this layout; it shows what an engine could gain from it"]
        machine = self.scenario.machine
        if machine.device is not None:
            return [f"serve a checkpoint whose weights are in {machine.weights}"] if machine.weights else []
        if self.engine == "vllm":
            return [
                f"vLLM keeps K and V in the model's own type; memory is calculated for {self.scenario.cache.type_k}"
            ]
        return []


@dataclass(frozen=True)
class SearchSpace:
    """All settings that a recommendation considers."""

    families: tuple[SettingsFamily, ...]
    candidates: tuple[Candidate, ...]
    policies_left_out: dict[str, tuple[str, str]]
    """Policies without any candidate: a key of ``REASONS``, and an explanation."""
    shape: MemoryShape
    """Shape of the model that is served."""
    weights: str | None
    """Storage type of its weights, if one was chosen."""

    def plan(self, candidate: Candidate, memory: int | None) -> Plan:
        """The memory of a setting under its engine, part by part, of so many bytes; of one GPU where several share it.

        Raises ``UserError`` if it cannot be planned.
        """
        engine: Engine = "vllm" if candidate.engine == "vllm" else "llamacpp"
        made = plan_scenario(candidate.scenario, self.shape, engine, weights=self.weights, memory=memory)
        ranks = candidate.scenario.machine.tensor_parallel
        return replace(made, settings=replace(made.settings, tensor_parallel=ranks))

    @cached_property
    def _by_grid_index(self) -> dict[tuple[str, tuple[int, ...]], Candidate]:
        return {(c.family, c.grid_index): c for c in self.candidates if not c.reason}

    def sample(self, most: int, seed: int) -> list[Candidate]:
        """Choose at most ``most`` candidates that can be tried, equally many from each family.

        Within a family they are taken in the order of a Sobol sequence over its grid.
        """
        usable = self._by_grid_index.values()
        left = {f.name: _sobol_order(f, [c for c in usable if c.family == f.name], seed) for f in self.families}
        chosen: list[Candidate] = []
        while len(chosen) < most and any(left.values()):
            for ordered in left.values():
                if ordered and len(chosen) < most:
                    chosen.append(ordered.pop(0))
        return sorted(chosen, key=lambda c: c.number)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that differ by one step on one axis."""
        for axis, at in enumerate(candidate.grid_index):
            for other in (at - 1, at + 1):
                index = (*candidate.grid_index[:axis], other, *candidate.grid_index[axis + 1 :])
                if neighbour := self._by_grid_index.get((candidate.family, index)):
                    yield neighbour


def _sobol_order(family: SettingsFamily, members: Sequence[Candidate], seed: int) -> list[Candidate]:
    """The members in an order of which every prefix is spread over the grid."""
    from scipy.stats import qmc

    sizes = np.array([len(values) for values in family.axes.values()])
    left = {c.grid_index: c for c in members}
    rng = named_rng(seed, f"candidates of {family.name}")
    points = 2 ** max(4, math.ceil(math.log2(4 * int(sizes.prod()))))
    drawn = qmc.Sobol(len(sizes), rng=rng).random(points)
    order = dict.fromkeys(tuple(int(i) for i in index) for index in (drawn * sizes).astype(int))
    drawn_members = [left.pop(index) for index in order if index in left]
    return [*drawn_members, *left.values()]


def known_engine(engine: str) -> str:
    """Return the engine that was asked for. Raises ``UserError`` unless it is one of ``ENGINES``."""
    if engine not in ENGINES:
        raise UserError(f"--engine: {no_such('engine', engine, ENGINES)}")
    return engine


def build_search_space(
    base: Scenario,
    summary: TrafficSummary,
    engine: str,
    profile: Profile,
    shape: MemoryShape,
    memory: int | None,
    *,
    weights: str | None = None,
    tolerant: bool = False,
) -> SearchSpace:
    """Lay out all settings for the given traffic.

    ``base``: on a device, settings are those of the profile's engine, and each has the cells that the device's memory
    leaves. ``memory``: bytes, or None for no bound. ``tolerant``: some requests may fail or be cut short, so contexts
    that hold only 99 % of them are tried too. Raises ``UserError``.
    """
    known_engine(engine)
    window = next((g.window for g in shape.groups if g.kind == "window"), None) if shape.llamacpp_windows else None
    targets = _TARGETS[engine]
    every: Iterable[SettingsFamily] = machine_families(summary, window, tolerant, host_caches(base, summary))
    builder = _CandidateBuilder(base, summary, profile, shape, memory, weights, window)
    if base.machine.device is not None:
        targets = _targets_on_device(engine, profile)
        if profile_target(profile) == "vllm":
            every = device_families(summary, tolerant, profile)
            builder = _DeviceCandidateBuilder(base, summary, profile, shape, memory, weights, window)
    families = tuple(f for f in every if f.engine in targets and not _of_other_server(f, profile))
    candidates: list[Candidate] = []
    for family in families:
        for index in itertools.product(*(range(len(values)) for values in family.axes.values())):
            candidate = builder.build(len(candidates), family, index)
            if candidate is not None:
                candidates.append(candidate)
    if not candidates:
        raise UserError(
            f"no settings to try: a request of {summary.longest:,} tokens exceeds the largest cache of {_MOST_CELLS:,}"
        )
    searched = {family.keys["cache__policy"] for family in families}
    left_out = _policies_left_out(searched, engine, window, shape.name)
    if base.machine.device is not None or _of_live_server(profile):
        left_out = {name: (why, _untimed(name, profile) or detail) for name, (why, detail) in left_out.items()}
    return SearchSpace(families, tuple(candidates), left_out, shape, weights)


def profile_target(profile: Profile) -> TargetEngine:
    """The engine whose times a device's profile has."""
    return measured_engine(profile) or "vllm"


def measured_engine(profile: Profile) -> TargetEngine | None:
    """The engine that a profile was measured on; None for kvsim's own, whose kernels stand for those of all engines."""
    name = profile.engine.lower()
    return next((engine for begins, engine in _MEASURED.items() if name.startswith(begins)), None)


def _targets_on_device(engine: str, profile: Profile) -> tuple[TargetEngine, ...]:
    """The engines asked for of which a device's profile has times. Raises ``UserError`` if it has none."""
    own = profile_target(profile)
    if own not in _TARGETS[engine]:
        raise UserError(
            f"--engine {engine}: profile {profile.name} has times of {profile.engine} alone; --engine {own}, both or "
            "any is accepted"
        )
    return tuple(target for target in _TARGETS[engine] if target in (own, "research"))


def _of_live_server(profile: Profile) -> bool:
    """Whether a profile was measured on a running llama-server, which is today's."""
    return profile.engine.startswith("llama-server")


def _of_other_server(family: SettingsFamily, profile: Profile) -> bool:
    """Whether a family is of llama-server of early 2025 and the times are those of today's."""
    todays = _of_live_server(profile) or profile.device is not None
    return todays and family.keys["server__scheduler"] == EARLY_SERVER


def _untimed(policy: str, profile: Profile) -> str:
    """Why a policy of an engine is not tried where a profile is of another; empty for any other policy."""
    version = engine_version(policy)
    own = "llama.cpp" if profile_target(profile) == "llamacpp" else "vLLM"
    early = version is LLAMACPP_B4666 and _of_live_server(profile)
    if version is None or (version.engine == own and not early):
        return ""
    return f"profile {profile.name} has times of {profile.engine} alone"


def _policies_left_out(searched: set[str], engine: str, window: int | None, model: str) -> dict[str, tuple[str, str]]:
    """Installed policies that are not searched: a key of ``REASONS``, and an explanation."""
    # streams is llama.cpp-b6975 with a cache per slot, paged is vllm without its prefix cache, and layer-groups and
    # uniform-pages are vllm where some of the layers have a window.
    covered = {"streams": "llama.cpp-b6975", "paged": "vllm", "layer-groups": "vllm", "uniform-pages": "vllm"}
    left_out: dict[str, tuple[str, str]] = {}
    for name, preset in available().items():
        if name in searched or covered.get(name) in searched:
            continue
        if preset.origin is not None:
            left_out[name] = ("engine", "a plug-in: its settings are not known here")
        elif name in _NOT_AN_OPTION:
            left_out[name] = ("forgets", preset.summary)
        elif name == "sliding-window" and window is None:
            left_out[name] = ("engine", f"llama.cpp runs {model} without a sliding window")
        else:
            left_out[name] = ("engine", f"not in {'llama.cpp or vLLM' if engine == 'both' else _NAMES[engine]}")
    return left_out


@dataclass(frozen=True)
class _CandidateBuilder:
    """Builds candidates from positions in a grid."""

    base: Scenario
    summary: TrafficSummary
    profile: Profile
    shape: MemoryShape
    memory: int | None
    weights: str | None
    window: int | None

    def build(self, number: int, family: SettingsFamily, index: tuple[int, ...]) -> Candidate | None:
        """Return the candidate at a position; None if it is impossible or equal to another one."""
        at = {axis: values[i] for (axis, values), i in zip(family.axes.items(), index, strict=True)}
        vllm = family.keys["server__scheduler"] == "vllm"
        n_batch, n_ubatch = (at["batch"], at["batch"]) if vllm else at["batch"]
        slots, chunked, block = at["slots"], at.get("chunked", True), at.get("block", self.base.cache.block_size)
        context = padded(self.summary.longest if at["context"] == "longest" else self.summary.p99)
        if n_batch < slots or (not chunked and n_batch < context):
            return None
        cells = self._cells(slots, context, at["room"], block if vllm else 0)
        if cells is None:
            return None
        version = engine_version(family.keys["cache__policy"])
        equal_shares = not family.keys.get("cache__unified", True) or (version is not None and version.equal_shares)
        slot_context = cells // slots if equal_shares else cells if family.engine == "llamacpp" else context
        scenario = self._scenario(
            family,
            cache__cells=cells,
            cache__block_size=block,
            cache__threshold=at.get("threshold", self.base.cache.threshold),
            model__name=self.profile.model if self.base.machine.device is None else self.base.model.name,
            server__slots=slots,
            server__n_batch=n_batch,
            server__n_ubatch=n_ubatch,
            server__slot_context=slot_context,
            server__cache_ram=at.get("host", self.base.server.cache_ram),
            server__chunked_prefill=chunked,
        )
        total, reason, detail = self._memory_need(scenario, family.engine)
        windows = self.window is not None
        return Candidate(number, family.name, family.engine, index, scenario, total, windows, reason, detail)

    def _scenario(self, family: SettingsFamily, **keys: Any) -> Scenario:
        """The base with the keys of a family and of a setting, and the types of K and V of the profile."""
        types: dict[str, Any] = {"cache__type_k": self.profile.type_k, "cache__type_v": self.profile.type_v}
        return load_scenario(self.base, **family.keys, **types, **_ALL_SETTINGS, **keys)

    def _cells(self, slots: int, context: int, room: str, spare: int) -> int | None:
        """Cells for all slots at full length ("full"), at P95 length ("shared"), or with prefixes kept ("reuse").

        ``spare``: cells of the first block, which vLLM never hands out.
        """
        full = padded(slots * context + spare)
        shared = padded(max(context, slots * self.summary.p95) + spare)
        cells = {"full": full, "shared": shared, "reuse": _REUSE_FACTOR * full}[room]
        if cells > _MOST_CELLS or (room == "shared" and shared > 0.9 * full):
            return None
        return cells

    def _memory_need(self, scenario: Scenario, target: TargetEngine) -> tuple[int, str, str]:
        """The total bytes, and a reason and its detail if they do not fit, or the engine lacks the types of K and V."""
        type_k, type_v = scenario.cache.type_k, scenario.cache.type_v
        if target == "vllm" and (type_k != type_v or type_k not in VLLM_CACHE_TYPES):
            return 0, "engine", f"vLLM has no cache with K in {type_k} and V in {type_v}"
        engine: Engine = "vllm" if target == "vllm" else "llamacpp"
        try:
            planned = plan_scenario(scenario, self.shape, engine, weights=self.weights, memory=self.memory)
        except UserError as e:
            return 0, "memory", str(e)
        total = planned.total(engine)
        if self.memory is None or planned.fits(engine, self.memory):
            return total, "", ""
        budget = format_size(planned.budget(engine, self.memory))
        return total, "memory", f"needs {format_size(total)}, {budget} available"


class _DeviceCandidateBuilder(_CandidateBuilder):
    """Builds candidates on a device, whose cache is what vLLM finds left of the memory."""

    def build(self, number: int, family: SettingsFamily, index: tuple[int, ...]) -> Candidate | None:
        """Return the candidate at a position; None if it is impossible."""
        at = {axis: values[i] for (axis, values), i in zip(family.axes.items(), index, strict=True)}
        slots, n_batch, chunked = at["slots"], at["batch"], at["chunked"]
        tokens = self.summary.longest if at["context"] == "longest" else self.summary.p99
        context = padded(tokens)
        if self.shape.context is not None:
            context = min(context, self.shape.context)
        if n_batch < slots or (not chunked and n_batch < context):
            return None
        try:
            held = self._held(slots, n_batch)
            fault = "" if held >= min(tokens, context) else f"holds {held:,} tokens; a request has {tokens:,}"
        except UserError as e:
            held, fault = 0, str(e)
        scenario = self._scenario(
            family,
            # By default what follows from the device; where that is too little, what one request takes.
            cache__cells=context + self.base.cache.block_size if fault else None,
            server__slots=slots,
            server__n_batch=n_batch,
            server__n_ubatch=None,
            server__slot_context=context if fault else min(context, held),
            server__chunked_prefill=chunked,
        )
        total = int((self.memory or 0) * profile_run(PRESENT["vLLM"].version).utilization)
        reason = "memory" if fault else ""
        return Candidate(number, family.name, family.engine, index, scenario, total, False, reason, fault)

    def _held(self, slots: int, n_batch: int) -> int:
        """Tokens that a request can have in the cache: all but those of the null block. Raises ``UserError``."""
        machine, block = self.base.machine, self.base.cache.block_size
        assert machine.device is not None
        cells = default_cells(
            self.base.model.name,
            machine.device,
            tp=machine.tensor_parallel,
            weights=machine.weights,
            batch=n_batch,
            sequences=slots,
            type_k=self.profile.type_k,
            block_size=block,
        )
        return cells - block
