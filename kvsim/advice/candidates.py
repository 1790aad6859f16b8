"""The settings that a recommendation chooses from: traffic's needs, memory, engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.stats import qmc

from kvsim.advice.engine_flags import DEFRAG_NOTE, LLAMACPP_2024, OLD_NOTE, Flags, llamacpp_flags, vllm_flags
from kvsim.advice.plan import Engine, Plan, plan
from kvsim.costs.profile import Profile
from kvsim.errors import UserError
from kvsim.experiments.traffic import TrafficSummary
from kvsim.model.architectures import AttentionGroup, ModelPlanShape, plan_shape
from kvsim.model.engine_shapes import BYTES_PER_NUMBER, SHAPES, STORAGES, Storage
from kvsim.model.memory_shapes import AttentionGroup, MemoryShape, memory_shape
from kvsim.model.storage_types import format_size
from kvsim.scenario.scenario import Scenario, load_scenario
from policies import Preset, available
from workloads import named_rng

Home = Literal["llamacpp", "vllm", "research"]
"""Where a setting can be typed in; ``research``: in no engine that we know."""
ENGINES = ("llamacpp", "vllm", "both", "any")
"""What may be asked for; ``any`` has the layouts that no engine has, too."""
_HOMES: dict[str, tuple[Home, ...]] = {
    "llamacpp": ("llamacpp",),
    "vllm": ("vllm",),
    "both": ("llamacpp", "vllm"),
    "any": ("llamacpp", "vllm", "research"),
}

_NAMES = {"llamacpp": "llama.cpp", "vllm": "vLLM", "any": "any engine"}

REASONS = {
    "engine": "not in this engine",
    "forgets": "forgets tokens, or knows the future: no choice",
    "memory": "does not fit into the memory",
    "untried": "not among the sample that was tried",
    "fails": "requests fail or are cut short",
    "slo": "misses the service level",
    "dominated": "sustains less than others",
}
"""Why a setting was ruled out, in the order in which they are looked at."""

_PAD = 256
"""Cells that llama.cpp rounds a context up to."""
_SLOTS = (1, 2, 4, 8, 16, 32, 64)
_THRESHOLDS = (0.1, 0.3)
"""llama.cpp's own default since b4065, and one that moves less."""
_LLAMA_BATCHES = ((64, 64), (256, 128), (512, 512), (2048, 512))
"""``--batch-size`` and ``--ubatch-size``; the last is llama.cpp's default."""
_VLLM_BATCHES = (64, 128, 256, 512, 2048)
_BLOCKS = (16, 32)
_MOST_CELLS = 2**24
_MORE = 4
"""A cache that keeps what may be said again has so many times the cells that all slots need at once."""

_NARROWER: tuple[tuple[Storage, Storage], ...] = (
    ("f32", "f32"),
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q4_0", "q4_0"),
)
PERPLEXITY = {
    ("f16", "f16"): 1.0000,
    ("q8_0", "q8_0"): 1.0012,
    ("q8_0", "q4_0"): 1.0042,
    ("q4_0", "q4_0"): 1.0841,
}
"""Over that of f32, of smollm2 on 660 tokens of English: measured by ``kvsim accuracy``."""

_FORGETS = ("ring", "paged-window", "oracle")


@dataclass(frozen=True)
class SettingsFamily:
    """Settings that differ in numbers only."""

    name: str
    home: Home
    keys: dict[str, Any]
    """Of the scenario, as for ``load``."""
    axes: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Candidate:
    """One setting."""

    number: int
    family: str
    home: Home
    place: tuple[int, ...]
    """In the grid of its family."""
    scenario: Scenario
    """Its times are those of the profile's model and cache types, whatever the next two say."""
    type_k: Storage
    type_v: Storage
    """The widest that fit."""
    memory_bytes: int
    """That the engine would take in all, weights and buffers included; partly estimated (``kvsim plan``)."""
    windows: bool
    """Whether the model that memory was reckoned for has sliding windows."""
    reason: str = ""
    """A key of ``REASONS``, where it was ruled out before anything was run."""
    detail: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What is chosen, flat."""
        server, cache = self.scenario.server, self.scenario.cache
        return {
            "policy": cache.policy,
            "scheduler": server.scheduler,
            "unified": cache.unified,
            "cells": cache.cells,
            "slots": server.slots,
            "slot_context": self.scenario.slot_context,
            "n_batch": server.n_batch,
            "n_ubatch": server.n_ubatch,
            "block_size": cache.block_size,
            "threshold": cache.threshold,
            "prefix_cache": cache.policy == "vllm" or (cache.policy == "paged" and cache.prefix_cache),
            "chunked_prefill": server.chunked_prefill,
            "type_k": self.type_k,
            "type_v": self.type_v,
        }

    @property
    def width(self) -> float:
        """Bytes of a number of K and one of V, together."""
        return BYTES_PER_NUMBER[self.type_k] + BYTES_PER_NUMBER[self.type_v]

    @property
    def flags(self) -> Flags:
        """What to type; nothing where no engine has it."""
        if self.home == "llamacpp":
            return llamacpp_flags(self.scenario, self.type_k, self.type_v, windows=self.windows)
        return vllm_flags(self.scenario) if self.home == "vllm" else ()

    @property
    def command(self) -> str:
        """Who is to be told."""
        return {"llamacpp": "llama-server", "vllm": "vllm serve", "research": "kvsim run"}[self.home]

    @property
    def label(self) -> str:
        """In a few words, for tables and pictures."""
        server, cache = self.scenario.server, self.scenario.cache
        batch = f"{server.n_batch}" if self.home == "vllm" else f"{server.n_batch}/{server.n_ubatch}"
        return f"{self.family}, {cache.cells:,} cells, {server.slots} slots, batch {batch}"

    def notes(self, profile: Profile) -> list[str]:
        """What must be said beside it."""
        found = []
        if self.home == "llamacpp":
            found.append(OLD_NOTE if self.scenario.cache.policy == LLAMACPP_2024 else DEFRAG_NOTE)
        if self.home == "research":
            found.append("no engine has this layout: it says what one could gain, and there is nothing to type")
        if self.home == "vllm":
            found.append(f"vLLM keeps K and V in the model's own type; memory is reckoned for {self.type_k}")
        if (self.type_k, self.type_v) != (profile.type_k, profile.type_v):
            cost = PERPLEXITY.get((self.type_k, self.type_v))
            accuracy = f"; accuracy: {cost:.4f} times f32's perplexity, measured on smollm2" if cost else ""
            found.append(
                f"times are those of K in {profile.type_k} and V in {profile.type_v}, which the profile was measured "
                f"with, not of {self.type_k} and {self.type_v}{accuracy}"
            )
        return found


@dataclass(frozen=True)
class SearchSpace:
    """All settings that were thought of."""

    families: tuple[SettingsFamily, ...]
    candidates: tuple[Candidate, ...]
    elsewhere: dict[str, tuple[str, str]]
    """Policies none of whose settings are candidates: a key of ``REASONS``, and why."""

    @cached_property
    def _places(self) -> dict[tuple[str, tuple[int, ...]], Candidate]:
        return {(c.family, c.place): c for c in self.candidates if not c.reason}

    def sample(self, most: int, seed: int) -> list[Candidate]:
        """At most so many that can be tried: from each family as many, in the order of a Sobol sequence over its
        grid; all, if they are no more."""
        left = {
            f.name: _spread(f, [c for c in self._places.values() if c.family == f.name], seed) for f in self.families
        }
        chosen: list[Candidate] = []
        while len(chosen) < most and any(left.values()):
            for ordered in left.values():
                if ordered and len(chosen) < most:
                    chosen.append(ordered.pop(0))
        return sorted(chosen, key=lambda c: c.number)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Those that differ in one step of one setting."""
        for axis, at in enumerate(candidate.place):
            for other in (at - 1, at + 1):
                place = (*candidate.place[:axis], other, *candidate.place[axis + 1 :])
                if found := self._places.get((candidate.family, place)):
                    yield found


def _spread(family: SettingsFamily, members: Sequence[Candidate], seed: int) -> list[Candidate]:
    """The members in an order whose every beginning is spread over the grid."""
    sizes = np.array([len(values) for values in family.axes.values()])
    by_place = {c.place: c for c in members}
    rng = named_rng(seed, f"candidates of {family.name}")
    points = 2 ** max(4, math.ceil(math.log2(4 * int(sizes.prod()))))
    drawn = qmc.Sobol(len(sizes), rng=rng).random(points)
    order = dict.fromkeys(tuple(int(i) for i in place) for place in (drawn * sizes).astype(int))
    found = [by_place.pop(place) for place in order if place in by_place]
    return [*found, *by_place.values()]


def model_shape(name: str) -> MemoryShape:
    """The shape of a model as ``kvsim plan`` knows them, or of ``tiny`` or ``small``. Raises ``UserError``."""
    if name not in SHAPES:
        return memory_shape(name)
    s = SHAPES[name]
    heads, kept = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
    layer = 2 * s.d_model * (heads + kept) + 3 * s.d_model * s.d_ff + 2 * s.d_model
    numbers = 2 * s.vocabulary * s.d_model + s.n_layers * layer + s.d_model
    group = AttentionGroup("full", s.n_layers, kept, kept, s.d_head, s.d_head)
    return MemoryShape(
        name=name,
        source="built in",
        groups=(group,),
        llamacpp_windows=False,
        d_model=s.d_model,
        n_heads=s.n_heads,
        d_ff=s.d_ff,
        vocabulary=s.vocabulary,
        context=None,
        parameters={"f32": numbers},
        stored={},
        default_type="f32",
    )


def space(
    base: Scenario,
    needs: TrafficSummary,
    engine: str,
    profile: Profile,
    shape: MemoryShape,
    memory: int | None,
    *,
    weights: str | None = None,
    tolerant: bool = False,
) -> SearchSpace:
    """All settings for such traffic. ``memory``: bytes, or None for no bound. ``tolerant``: some requests may fail or
    be cut short, so that contexts that hold 99 % of them are tried as well. Raises ``UserError``."""
    if engine not in ENGINES:
        raise UserError(f"--engine: there is no {engine!r:.40}; there are {', '.join(ENGINES)}")
    window = next((g.window for g in shape.groups if g.kind == "window"), None) if shape.llamacpp_windows else None
    known = tuple(_families(needs, window, tolerant))
    homes = _HOMES[engine]
    families = tuple(f for f in known if f.home in homes)
    builder = _Builder(base, needs, profile, shape, memory, weights, window)
    numbered: list[Candidate] = []
    for family in families:
        for place in itertools.product(*(range(len(values)) for values in family.axes.values())):
            made = builder.build(len(numbered), family, place)
            if made is not None:
                numbered.append(made)
    if not numbered:
        raise UserError(f"no settings to try: {needs.longest:,} tokens in a request are more than any cache may have")
    tried = {family.keys["cache__policy"] for family in known if family.home in homes}
    elsewhere: dict[str, tuple[str, str]] = {}
    for name, preset in available().items():
        # streams is llama.cpp-today with a cache for each slot, and paged is how vllm runs without its prefix cache.
        if name in tried or (name == "streams" and "llama.cpp-today" in tried) or (name == "paged" and "vllm" in tried):
            continue
        if not isinstance(preset, Preset):
            elsewhere[name] = ("engine", "a plug-in, whose settings are not known here")
        elif name in _FORGETS:
            elsewhere[name] = ("forgets", preset.summary)
        elif name == "sliding-window" and window is None:
            elsewhere[name] = ("engine", f"{shape.name} has no sliding window there")
        else:
            elsewhere[name] = ("engine", f"not in {'llama.cpp or vLLM' if engine == 'both' else _NAMES[engine]}")
    return SearchSpace(families, tuple(numbered), elsewhere)


def _families(needs: TrafficSummary, window: int | None, tolerant: bool) -> Iterator[SettingsFamily]:
    contexts = ("longest", "p99") if tolerant and _up(needs.p99) < _up(needs.longest) else ("longest",)
    rooms = ("shared", "full", "more") if needs.reuse else ("shared", "full")
    llama: dict[str, tuple[Any, ...]] = {"context": contexts, "slots": _SLOTS, "batch": _LLAMA_BATCHES}
    vllm: dict[str, tuple[Any, ...]] = {"context": contexts, "slots": _SLOTS, "batch": _VLLM_BATCHES, "room": rooms}
    server = {"server__scheduler": "llama-server"}
    today = {**server, "cache__policy": "llama.cpp-today"}
    yield SettingsFamily("llama.cpp-today", "llamacpp", {**today, "cache__unified": True}, {**llama, "room": rooms})
    own = {**today, "cache__unified": False}
    yield SettingsFamily("llama.cpp-today, per slot", "llamacpp", own, {**llama, "room": ("full",)})
    if window is not None:
        keys = {**server, "cache__policy": "sliding-window", "cache__window": window}
        yield SettingsFamily("sliding-window", "llamacpp", {**keys, "cache__unified": True}, {**llama, "room": rooms})
    old = {**server, "cache__policy": LLAMACPP_2024, "cache__unified": True}
    yield SettingsFamily(LLAMACPP_2024, "llamacpp", old, {**llama, "room": ("full",), "threshold": _THRESHOLDS})
    server = {"server__scheduler": "vllm"}
    paged = {**vllm, "block": _BLOCKS, "chunked": (True, False)}
    yield SettingsFamily("vllm", "vllm", {**server, "cache__policy": "vllm", "cache__unified": True}, paged)
    if needs.reuse:  # Otherwise it is the same, with or without.
        plain = {**server, "cache__policy": "paged", "cache__prefix_cache": False, "cache__unified": True}
        # Without a prefix cache there is nothing to keep in a larger one.
        yield SettingsFamily("vllm, no prefix cache", "vllm", plain, {**paged, "room": ("shared", "full")})
    for name in ("contiguous", "fill-holes", "full-compaction", "adaptive", "idle-compaction", "split-regions"):
        keys = {"server__scheduler": "llama-server", "cache__policy": name, "cache__unified": True}
        yield SettingsFamily(name, "research", keys, {**llama, "room": rooms})
    keys = {"server__scheduler": "llama-server", "cache__policy": "threshold-compaction", "cache__unified": True}
    yield SettingsFamily("threshold-compaction", "research", keys, {**llama, "room": rooms, "threshold": _THRESHOLDS})
    for name in ("hf-reserved", "growing", "chunked"):
        keys = {**server, "cache__policy": name, "cache__unified": True}
        yield SettingsFamily(name, "research", keys, {**vllm, "room": ("shared", "full")})


@dataclass(frozen=True)
class _Builder:
    """Makes settings of places in a grid."""

    base: Scenario
    needs: TrafficSummary
    profile: Profile
    shape: MemoryShape
    memory: int | None
    weights: str | None
    window: int | None

    def build(self, number: int, family: SettingsFamily, place: tuple[int, ...]) -> Candidate | None:
        """None where there can be none, or it would be the same as another."""
        at = {axis: values[i] for (axis, values), i in zip(family.axes.items(), place, strict=True)}
        vllm = family.keys["server__scheduler"] == "vllm"
        n_batch, n_ubatch = (at["batch"], at["batch"]) if vllm else at["batch"]
        slots, chunked, block = at["slots"], at.get("chunked", True), at.get("block", self.base.cache.block_size)
        context = _up(self.needs.longest if at["context"] == "longest" else self.needs.p99)
        if n_batch < slots or (not chunked and n_batch < context):
            return None
        cells = self._cells(slots, context, at["room"], block if vllm else 0)
        if cells is None:
            return None
        threshold = at.get("threshold", self.base.cache.threshold)
        # A slot has its share of the context where there is a cache for each, and in 2024's llama.cpp anyhow.
        share = not family.keys.get("cache__unified", True) or family.name == LLAMACPP_2024
        own_context = cells // slots if share else cells if family.home == "llamacpp" else context
        scenario = load_scenario(
            self.base,
            **family.keys,
            cache__cells=cells,
            cache__block_size=block,
            cache__threshold=threshold,
            cache__type_k=self.profile.type_k,
            cache__type_v=self.profile.type_v,
            cache__host_cells=0,
            cache__eviction="lru",
            model__name=self.profile.model,
            server__slots=slots,
            server__n_batch=n_batch,
            server__n_ubatch=n_ubatch,
            server__slot_context=own_context,
            server__chunked_prefill=chunked,
            server__preemption="recompute",
            server__prefetch="none",
        )
        types, total, reason, detail = self._types(scenario, family.home)
        windows = self.window is not None
        return Candidate(number, family.name, family.home, place, scenario, *types, total, windows, reason, detail)

    def _cells(self, slots: int, context: int, room: str, block: int) -> int | None:
        """Room for what the slots hold together: at most, mostly, or with what may be said again."""
        spare = block  # vLLM never hands out its first block.
        full = _up(slots * context + spare)
        shared = _up(max(context, slots * self.needs.p95) + spare)
        cells = {"full": full, "shared": shared, "more": _MORE * full}[room]
        if cells > _MOST_CELLS or (room == "shared" and shared > 0.9 * full):
            return None
        return cells

    def _types(self, scenario: Scenario, home: Home) -> tuple[tuple[Storage, Storage], int, str, str]:
        """The widest types that fit, the bytes then taken, and why there are none."""
        own = (self.profile.type_k, self.profile.type_v)
        start = own if self.shape.name in (self.profile.model, self.base.model.name) else ("f16", "f16")
        width = STORAGES.index
        kinds = [
            t for t in _NARROWER if width(t[0]) >= width(start[0]) and width(t[1]) >= width(start[1]) and t != start
        ]
        kinds = [start, *kinds] if self.memory is not None else [start]
        if home == "vllm":
            kinds = [t for t in kinds if t[0] == t[1] and t[0] in ("f32", "f16")] or [("f16", "f16")]
        engine: Engine = "vllm" if home == "vllm" else "llamacpp"
        smallest, said = 0, ""
        for kind in kinds:
            try:
                made = self._plan(scenario, engine, kind)
            except UserError as e:
                said = said or str(e)
                continue
            smallest = made.total(engine)
            if self.memory is None or made.fits(engine, self.memory):
                return kind, smallest, "", ""
        if smallest == 0:
            return kinds[0], 0, "memory", said
        # Loop order: the last kind takes least.
        assert self.memory is not None, "without a bound the first kind fits"
        room = format_size(made.budget(engine, self.memory))
        return kinds[-1], smallest, "memory", f"{format_size(smallest)} at least, {room} to be had"

    def _plan(self, scenario: Scenario, engine: Engine, kind: tuple[Storage, Storage]) -> Plan:
        server, cache = scenario.server, scenario.cache
        return plan(
            self.shape,
            ctx=max(1, cache.cells // server.slots),
            parallel=server.slots,
            type_k=kind[0],
            type_v=kind[1],
            engine=engine,
            ubatch=server.n_ubatch,
            batch=server.n_batch,
            kv_unified=cache.unified,
            swa_full=cache.policy != "sliding-window",
            block_size=cache.block_size,
            weights=self.weights,
            memory=self.memory,
        )


def _up(tokens: int) -> int:
    """Rounded up as llama.cpp rounds a context, which keeps every power of two of slots a divisor."""
    return -(-tokens // _PAD) * _PAD
