"""Keys that a scenario states, and that change nothing under its scheduler, policy and machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from kvsim.scenario.scenario import Scenario
from kvsim.scenario.server_defaults import EARLY_SERVER, SCHEDULERS, TODAYS_SERVERS
from policies import Policy, Preset, available

_LLAMA = (*TODAYS_SERVERS, EARLY_SERVER)
_OF_LLAMA = ("context_shift", "n_keep", "n_discard", "cache_prompt", "cache_reuse")
_OF_VLLM = (
    *("chunked_prefill", "long_prefill_threshold", "reserve_full", "async_scheduling", "order"),
    *("longest_prefix_limit", "victim", "requeue"),
)
_OF_CHECKPOINTS = ("ctx_checkpoints", "checkpoint_min_step")
_SCHEDULERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_OF_LLAMA, "keep_idle_slots"), _LLAMA),
    **dict.fromkeys(("cache_ram", "cache_idle_slots", *_OF_CHECKPOINTS), TODAYS_SERVERS),
    **dict.fromkeys(_OF_VLLM, ("vllm",)),
    "slot_prompt_similarity": ("llama-server", EARLY_SERVER),
    "n_ubatch": (*_LLAMA, "static"),
}
"""Keys of the section ``server`` that only some schedulers look at."""
_OF_CHUNKS = (
    *("cache.disk_cells", "machine.disk_gb_s", "machine.disk_latency_s"),
    *(f"cache.offload_{key}" for key in ("order", "blocks", "store_threshold", "answers")),
)
_OF_ALL = ("policy", "cells", "unified", "kernel", "type_k", "type_v", "pad")
"""Keys of the section ``cache`` that are not of a layout."""


def without_effect(scenario: Scenario) -> list[str]:
    """The keys of ``server``, ``cache`` and ``machine`` that are stated with another value than the default, and have
    no effect; of schedulers and policies that are not known here, none are named."""
    preset = available().get(scenario.cache.policy)
    found = [*_of_server(scenario), *_of_machine(scenario)]
    if isinstance(preset, Preset):
        with suppress(ValueError):  # Such a cache cannot be; the run says so.
            policy = preset(scenario.cache_config())
            found += [*_of_cache(scenario, preset), *_of_abilities(scenario, preset, policy)]
    return [key for key in dict.fromkeys(found) if _stated(scenario, key)]


def effect_lines(runs: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines that name keys without an effect, given by policy: one for each set of keys."""
    by_keys: dict[tuple[str, ...], list[str]] = {}
    for policy, keys in runs:
        under = by_keys.setdefault(tuple(keys), [])
        if keys and policy not in under:
            under.append(policy)
    return [f"no effect under {', '.join(under)}: {', '.join(keys)}" for keys, under in by_keys.items() if keys]


def _stated(scenario: Scenario, key: str) -> bool:
    """Whether a key has another value than the default, as it has in a file that states every key."""
    section, name = key.split(".")
    part = getattr(scenario, section)
    return name in part.model_fields_set and getattr(part, name) != getattr(type(part)(), name)


def _of_server(scenario: Scenario) -> Iterator[str]:
    server = scenario.server
    if server.scheduler not in SCHEDULERS.built_in:
        return
    yield from (f"server.{key}" for key, schedulers in _SCHEDULERS.items() if server.scheduler not in schedulers)
    if not server.context_shift:
        yield from ("server.n_keep", "server.n_discard")
    if not server.cache_ram:
        yield "server.cache_idle_slots"
    if not server.ctx_checkpoints:
        yield "server.checkpoint_min_step"
    if server.order != "longest-prefix":
        yield "server.longest_prefix_limit"
    if server.order == "priority":
        yield "server.requeue"


def _of_cache(scenario: Scenario, preset: Preset) -> Iterator[str]:
    cache = scenario.cache
    known = {*_OF_ALL, *preset.parameters}
    yield from (f"cache.{key}" for key in type(cache).model_fields if key not in known)
    if (cache.kernel or preset.kernel) != "masked":
        yield "cache.pad"
    if cache.groups and "groups" in preset.parameters:
        yield from ("cache.block_size", "cache.kernel", "cache.host_cells", *_OF_CHUNKS)
    else:
        yield "cache.retention"
    divides = "unified" in preset.parameters or scenario.server.scheduler in TODAYS_SERVERS
    if cache.policy == "streams" or (scenario.server.slot_context is not None and not divides):
        yield "cache.unified"
    if cache.admission != "expected" and cache.policy != "expected-length":
        yield "cache.conservativeness"
    if scenario.server.scheduler in SCHEDULERS.built_in and scenario.server.scheduler != "vllm":
        yield "cache.watermark"


def _of_abilities(scenario: Scenario, preset: Preset, policy: Policy) -> Iterator[str]:
    """What has an effect only under policies with some ability."""
    cache, server, of_prefixes = scenario.cache, scenario.server, ("longest-prefix", "depth-first")
    if policy.unbounded:  # A sequence has its own cells, for ever.
        yield from ("server.context_shift", "server.cache_prompt", "server.victim", "server.requeue", "cache.unified")
    if not policy.can_reserve:
        yield "server.reserve_full"
    if server.order in of_prefixes and not (cache.prefix_cache and "prefix_cache" in preset.parameters):
        yield from () if cache.policy == "radix-tree" else ("server.order",)
    if not policy.saves_checkpoints:
        yield from (f"server.{key}" for key in _OF_CHECKPOINTS)
    if not policy.can_export:
        yield from ("server.cache_ram", "server.cache_idle_slots")
    if "page_tokens" not in preset.parameters:
        yield "machine.map_page_us"
    if policy.chunks is not None:
        yield from ("server.preemption", "server.prefetch")
        if server.scheduler in SCHEDULERS.built_in and server.scheduler != "vllm":
            yield from ("cache.host_cells", *_OF_CHUNKS)
    else:
        yield from _OF_CHUNKS
    tier = cache.host_cells and "host_cells" in preset.parameters
    if not tier and not (server.scheduler in TODAYS_SERVERS and server.cache_ram and policy.can_export):
        yield from ("machine.host_gb_s", "machine.host_latency_s")


def _of_machine(scenario: Scenario) -> Iterator[str]:
    machine = scenario.machine
    on_the_cpu = machine.n_gpu_layers is not None or machine.n_cpu_moe
    if machine.device is None:
        yield from (f"machine.{key}" for key in ("engine", "tensor_parallel", "weights", "n_gpu_layers", "n_cpu_moe"))
    if machine.device is None or not on_the_cpu:
        yield "machine.cpu_gb_s"
    if machine.host_gb_s is None:
        yield "machine.host_latency_s"
    if not scenario.cache.disk_cells:
        yield from ("machine.disk_gb_s", "machine.disk_latency_s")
