"""Laying out all settings that a recommendation chooses from, given the traffic, the memory and the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsim.advice.memory.engine_flags import (
    padded,
)
from kvsim.advice.memory.scenario_memory import plan_scenario
from kvsim.advice.recommend.candidates import (
    NOW,
    Candidate,
    SearchSpace,
    known_engine,
    measured_engine,
    profile_target,
)
from kvsim.advice.recommend.families import (
    SettingsFamily,
    TargetEngine,
    device_families,
    machine_families,
)
from kvsim.costs.memory_plan import default_cells
from kvsim.costs.memory_settings import ENGINE_TITLES, Engine, PlanSettings
from kvsim.costs.profile import Profile
from kvsim.costs.vllm_blocks import BlockGroups, block_size
from kvsim.costs.vllm_profile import profile_run
from kvsim.errors import UserError
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_versions import LLAMACPP_B4666, PRESENT
from kvsim.model.storage_types import VLLM_CACHE_TYPES, format_size
from kvsim.scenario.device_defaults import check_sequences
from kvsim.scenario.scenario import Scenario, engine_version, load_scenario
from kvsim.scenario.server_defaults import EARLY_SERVER
from policies import available
from policies.presets.papers import searches, token_eviction

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

_NAMES: dict[str, str] = {**ENGINE_TITLES, "any": "any engine"}

_TARGETS: dict[str, tuple[TargetEngine, ...]] = {
    "llamacpp": ("llamacpp",),
    "vllm": ("vllm",),
    "both": ("llamacpp", "vllm"),
    "any": ("llamacpp", "vllm", "research"),
}


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
    narrower: Sequence[str] = (),
    fixed: Mapping[str, Scenario] | None = None,
) -> SearchSpace:
    """Lay out all settings for the given traffic.

    ``base``: on a device, settings are those of the profile's engine, and each has the cells that the device's memory
    leaves. ``memory``: bytes, or None for no bound. ``tolerant``: some requests may fail or be cut short, so contexts
    that hold only 99 % of them are tried too. ``narrower``: further types of K and V, tried where they may help.
    ``fixed``: settings that are judged beside the best ones, by what they are called. Raises ``UserError``.
    """
    known_engine(engine)
    window = next((g.window for g in shape.groups if g.kind == "window"), None) if shape.llamacpp_windows else None
    targets, states = _TARGETS[engine], bool(shape.states)
    fixed = fixed or {}
    now = fixed.get(NOW)
    every: Iterable[SettingsFamily] = machine_families(base, summary, window, tolerant, now, states=states)
    least = 0 if now is None else now.slot_context
    builder = _CandidateBuilder(base, summary, profile, shape, memory, weights, window, least)
    if base.machine.device is not None:
        targets = _targets_on_device(engine, profile)
        if profile_target(profile) == "vllm":
            every = device_families(summary, tolerant, profile, states=states)
            builder = _DeviceCandidateBuilder(base, summary, profile, shape, memory, weights, window, least)
    families = tuple(f for f in every if f.engine in targets and not _of_other_server(f, profile))
    if base.speculation.on:
        families = tuple(f.drafting(base.speculation.tokens) for f in families)
    if narrower:
        kinds = (profile.type_k, *narrower)
        families = tuple(f if f.engine == "research" else f.narrowed(kinds) for f in families)
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
    left_out = _policies_left_out(searched, engine, window, shape)
    if base.machine.device is not None or _of_live_server(profile):
        left_out = {name: (why, _untimed(name, profile) or detail) for name, (why, detail) in left_out.items()}
    beside = tuple(builder.fixed(-1 - at, name, scenario) for at, (name, scenario) in enumerate(fixed.items()))
    return SearchSpace(families, tuple(candidates), left_out, shape, weights, beside)


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


def _policies_left_out(
    searched: set[str], engine: str, window: int | None, shape: MemoryShape
) -> dict[str, tuple[str, str]]:
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
        elif shape.states:
            left_out[name] = ("engine", f"not with the states of {shape.name}")
        elif name == "sliding-window" and window is None:
            left_out[name] = ("engine", f"llama.cpp runs {shape.name} without a sliding window")
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
    least: int = 0
    """The context that is not gone below: that of the server that runs now."""

    def build(self, number: int, family: SettingsFamily, index: tuple[int, ...]) -> Candidate | None:
        """Return the candidate at a position; None if it is impossible or equal to another one."""
        at = {axis: values[i] for (axis, values), i in zip(family.axes.items(), index, strict=True)}
        vllm = family.keys["server__scheduler"] == "vllm"
        n_batch, n_ubatch = (at["batch"], at["batch"]) if vllm else at["batch"]
        slots, chunked, block = at["slots"], at.get("chunked", True), at.get("block", self.base.cache.block_size)
        context = self._context(at)
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
            at,
            cache__cells=cells,
            cache__block_size=block,
            cache__threshold=at.get("threshold", self.base.cache.threshold),
            model__name=self.profile.model if self.base.machine.device is None else self.base.model.name,
            server__slots=slots,
            server__n_batch=n_batch,
            server__n_ubatch=n_ubatch,
            server__slot_context=slot_context,
            server__cache_ram=at.get("host", self.base.server.cache_ram),
            server__slot_prompt_similarity=at.get("similarity", self.base.server.slot_prompt_similarity),
            server__chunked_prefill=chunked,
        )
        total, reason, detail = self._memory_need(scenario, family.engine)
        windows, narrowed = self.window is not None, family.narrowed_at(index)
        made = Candidate(number, family.name, family.engine, index, scenario, total, windows, narrowed, reason, detail)
        return replace(made, threads=self._threads)

    def _context(self, at: Mapping[str, Any]) -> int:
        """The most tokens of a request: with room for those not seen, as many as now, or those of the model."""
        context = max(padded(self.summary.needed if at["context"] == "longest" else self.summary.p99), self.least)
        return context if self.shape.context is None else min(context, self.shape.context)

    def _scenario(self, family: SettingsFamily, at: Mapping[str, Any], **keys: Any) -> Scenario:
        """The base with the keys of a family and of a setting, and K and V in its types or those of the profile."""
        type_k, type_v = at.get("kv", self.profile.type_k), at.get("kv", self.profile.type_v)
        types: dict[str, Any] = {"cache__type_k": type_k, "cache__type_v": type_v}
        drafts: dict[str, Any] = {"speculation__tokens": at["drafts"]} if "drafts" in at else {}
        return load_scenario(self.base, **family.keys, **types, **_ALL_SETTINGS, **drafts, **keys)

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

    def fixed(self, number: int, name: str, scenario: Scenario) -> Candidate:
        """The candidate of a whole scenario that is called so."""
        engine: TargetEngine = "vllm" if scenario.server.scheduler == "vllm" else "llamacpp"
        total, reason, detail = self._memory_need(scenario, engine)
        made = Candidate(number, name, engine, (), scenario, total, self.window is not None, 0, reason, detail)
        return replace(made, threads=self._threads)

    @property
    def _threads(self) -> int | None:
        """Threads of llama.cpp that the times were measured with."""
        of_machine = self.profile.device is None and measured_engine(self.profile) == "llamacpp"
        return self.profile.machine.threads if of_machine and self.profile.machine is not None else None

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
        prefixes = family.keys.get("cache__prefix_cache", True)
        s = self._settings(at, prefixes)
        block = block_size(self.shape, s)
        tokens, context = self.summary.longest if at["context"] == "longest" else self.summary.p99, self._context(at)
        if n_batch < slots or (not chunked and n_batch < context):
            return None
        if self.shape.states and prefixes and n_batch < block:
            return None  # vLLM does not start.
        try:
            held = self._held(slots, n_batch, s)
            fault = "" if held >= min(tokens, context) else f"holds {held:,} tokens; a request has {tokens:,}"
        except UserError as e:
            held, fault = 0, str(e)
        scenario = self._scenario(
            family,
            at,
            # By default what follows from the device; where that is too little, what one request takes.
            cache__cells=context + block if fault else None,
            server__slots=slots,
            server__n_batch=n_batch,
            server__n_ubatch=None,
            server__slot_context=context if fault else min(context, held),
            server__chunked_prefill=chunked,
        )
        reason = "memory" if fault else ""
        narrowed = family.narrowed_at(index)
        return Candidate(
            number, family.name, family.engine, index, scenario, self._total, False, narrowed, reason, fault
        )

    def fixed(self, number: int, name: str, scenario: Scenario) -> Candidate:
        """The candidate of a whole scenario, which has the cells that the device leaves it."""
        return Candidate(number, name, "vllm", (), scenario, self._total, False)

    @property
    def _total(self) -> int:
        """Bytes that vLLM takes of each device."""
        return int((self.memory or 0) * profile_run(PRESENT["vLLM"].version).utilization)

    def _settings(self, at: Mapping[str, Any], prefixes: bool) -> PlanSettings:
        """What the size of blocks follows from."""
        kind, machine = at.get("kv", self.profile.type_k), self.base.machine
        types = {"type_k": kind, "type_v": kind}
        block, tp = self.base.cache.block_size, machine.tensor_parallel
        drafter = self.base.speculation.drafter if at.get("drafts") else ""
        return PlanSettings(block_size=block, tensor_parallel=tp, prefix_caching=prefixes, drafter=drafter, **types)

    def _held(self, slots: int, n_batch: int, s: PlanSettings) -> int:
        """Tokens that a request can have in the cache: not those of the null block. Raises ``UserError``."""
        machine, name = self.base.machine, self.base.model.name
        assert machine.device is not None
        cells = default_cells(
            name,
            machine.device,
            tp=machine.tensor_parallel,
            weights=machine.weights,
            batch=n_batch,
            sequences=slots,
            type_k=s.type_k,
            block_size=s.block_size,
            prefix_caching=s.prefix_caching,
            drafter=s.drafter,
        )
        if not self.shape.states:
            return cells - s.block_size
        made = BlockGroups.of(self.shape, s)
        blocks = cells // made.block_size
        check_sequences(name, slots, blocks)
        return made.longest(blocks - 1)
