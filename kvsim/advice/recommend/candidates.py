"""The settings that a recommendation chooses from, given the traffic, the memory and the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    vllm_flags,
)
from kvsim.advice.memory.scenario_memory import plan_scenario
from kvsim.advice.recommend.families import (
    SettingsFamily,
    TargetEngine,
)
from kvsim.costs.memory_plan import Plan
from kvsim.costs.memory_settings import Engine
from kvsim.costs.profile import Profile
from kvsim.errors import UserError, no_such
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_versions import LLAMACPP_B4666
from kvsim.scenario.scenario import Scenario
from kvsim.scenario.server_defaults import TODAYS_SERVERS
from workloads import named_rng

PERPLEXITY = {
    ("q8_0", "q8_0"): 1.0012,
    ("q8_0", "q4_0"): 1.0042,
    ("q4_0", "q4_0"): 1.0841,
}
"""Perplexity relative to f32 by types of K and V: smollm2 on 660 tokens of English, measured by ``kvsim accuracy``."""
ENGINES = ("llamacpp", "vllm", "both", "any")
"""Engines that can be asked for; ``any`` includes layouts that no engine has."""
_MEASURED: dict[str, TargetEngine] = {"llama": "llamacpp", "vllm": "vllm"}
"""The engine whose settings are searched by default, by how the name of the one that a profile measured begins:
llama.cpp, llama-cpp-python, llama-server or vLLM."""

REASONS = {
    "engine": "not available in this engine",
    "forgets": "not an option: drops tokens or knows the future",
    "memory": "does not fit into the memory",
    "untried": "not in the sample that was tried",
    "fails": "requests fail or are cut short",
    "slo": "misses the service level",
    "same": "does the same as one of the best",
    "dominated": "sustains a lower load than others",
}
"""Reasons for ruling a setting out, in the order in which they are checked."""

NOW = "now"
"""What the settings of the server that runs are called."""

NARROWER: dict[Engine, tuple[str, ...]] = {"vllm": ("fp8",), "llamacpp": ("q8_0", "q4_0")}
"""Types of K and V that are narrower than 16 bits, by engine, in the order in which they are tried."""


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
    narrowed: int = 0
    """How many steps narrower K and V are than the widest types that were tried."""
    reason: str = ""
    """A key of ``REASONS`` if the setting was ruled out before any run."""
    detail: str = ""
    threads: int | None = None
    """Threads of llama.cpp with which its times were measured; None: of a device, or of another engine."""

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
            "slot_prompt_similarity": server.slot_prompt_similarity if server.scheduler in TODAYS_SERVERS else None,
            "prefix_cache": cache.policy in ("vllm", "paged") and cache.prefix_cache,
            "chunked_prefill": server.chunked_prefill,
            "type_k": cache.type_k,
            "type_v": cache.type_v,
        }

    @property
    def flags(self) -> Flags:
        """Command-line options of the engine; empty if no engine has the setting."""
        if self.engine == "llamacpp":
            threads = () if self.threads is None else (("--threads", str(self.threads)),)
            return (*llamacpp_flags(self.scenario, windows=self.windows), *threads)
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
        kinds = f", K/V {cache.type_k}" if self.narrowed else ""
        return f"{self.family}, {cache.cells:,} cells, {server.slots} slots, batch {batch}{kinds}{host}"

    @property
    def host_bytes(self) -> float:
        """Limit of llama-server's host cache, which comes on top of ``memory_bytes``; infinite if it has none."""
        limit = self.scenario.server.cache_ram if self._has_host_cache else 0
        return limit * 2**20 if limit >= 0 else math.inf

    @property
    def memory_order(self) -> tuple[int, int, float, int]:
        """Sort key among settings that are equal otherwise: wider K and V, less memory, in order of search."""
        return self.narrowed, self.memory_bytes, self.host_bytes, self.number

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
        machine, cache = self.scenario.machine, self.scenario.cache
        if machine.device is not None:
            file = "GGUF file" if self.engine == "llamacpp" else "checkpoint"
            stored = [f"serve a {file} whose weights are in {machine.weights}"] if machine.weights else []
            return [*stored, *narrow_note(cache.type_k, cache.type_v)]
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
    fixed: tuple[Candidate, ...] = ()
    """Settings that are judged beside the best ones: those that run now, and the engine's defaults."""

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
        left = {}
        for family in self.families:
            usable = [c for c in self._by_grid_index.values() if c.family == family.name]
            # Where nothing within can be tried, such as where only narrower K and V fit, all are drawn from.
            inner = [c for c in usable if _is_inner(family, c.grid_index)]
            left[family.name] = _sobol_order(family, inner or usable, seed)
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


def _is_inner(family: SettingsFamily, index: Sequence[int]) -> bool:
    """Whether a position is among those that the first sample is drawn from."""
    within = (family.inner.get(axis, range(len(values))) for axis, values in family.axes.items())
    return all(at in positions for at, positions in zip(index, within, strict=True))


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


def profile_target(profile: Profile) -> TargetEngine:
    """The engine whose times a device's profile has."""
    return measured_engine(profile) or "vllm"


def measured_engine(profile: Profile) -> TargetEngine | None:
    """The engine that a profile was measured on; None for kvsim's own, whose kernels stand for those of all engines."""
    name = profile.engine.lower()
    return next((engine for begins, engine in _MEASURED.items() if name.startswith(begins)), None)


def narrow_note(type_k: str, type_v: str) -> list[str]:
    """A line on what is lost with K and V in these types; none for 16 bits and more."""
    if (known := PERPLEXITY.get((type_k, type_v))) is not None:
        return [f"K and V in {type_k} cost accuracy: {known:.4f} times the perplexity of f32, on smollm2"]
    if type_k == "fp8":
        return [
            "K and V in fp8 cost accuracy; how much was not measured here: compare answers before you serve with it"
        ]
    return []
