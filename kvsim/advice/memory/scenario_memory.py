"""The memory plan of a scenario: its cache and batches, as an engine would allocate them for a model."""

from __future__ import annotations

from kvsim.advice.memory.engine_flags import flash_attention
from kvsim.costs.memory_plan import Plan, plan
from kvsim.costs.memory_settings import ENGINE_TITLES
from kvsim.errors import UserError
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.memory_shapes import memory_shape
from kvsim.model.storage_types import format_size
from kvsim.scenario.scenario import Scenario

_KINDS = {"weights": "weights", "kv": "K and V", "buffers": "buffers"}


def plan_scenario(
    scenario: Scenario,
    shape: MemoryShape,
    engine: str | None,
    *,
    weights: str | None = None,
    memory: int | None = None,
) -> Plan:
    """Plan the memory of a scenario's cache and batches for a model. Raises ``UserError``.

    The scenario's cells are shared out equally over its slots. ``engine``: ``llamacpp`` or ``vllm``; None: both.
    ``memory``: what the engine may have, bytes.
    """
    server, cache = scenario.server, scenario.cache
    return plan(
        shape,
        ctx=max(1, cache.cells // server.slots),
        parallel=server.slots,
        type_k=cache.type_k,
        type_v=cache.type_v,
        engine=engine,
        ubatch=scenario.n_ubatch,
        batch=scenario.n_batch,
        kv_unified=scenario.unified,
        flash_attn=flash_attention(scenario),
        swa_full=cache.policy != "sliding-window",
        block_size=cache.block_size,
        weights=weights,
        n_gpu_layers=scenario.machine.n_gpu_layers,
        n_cpu_moe=scenario.machine.n_cpu_moe,
        drafter=scenario.speculation.drafter,
        memory=memory,
        reserve=0,
    )


def describe_memory(scenario: Scenario) -> str:
    """One line with the memory that a scenario's model, cache and batches take under each engine, as far as known."""
    cache, server = scenario.cache, scenario.server
    types = cache.type_k if cache.type_k == cache.type_v else f"{cache.type_k} and {cache.type_v}"
    what = f"memory of {scenario.model.name}, {cache.cells:,} cells for {server.slots} slots, K and V as {types}"
    try:
        shape = memory_shape(scenario.model.name)
        made = plan_scenario(scenario, shape, None)
    except UserError as e:
        return f"{what}: unknown ({e})"
    parts = []
    for engine in made.engines:
        of = {kind: sum(p.bytes for p in made.parts if p.engine == engine and p.kind == kind) for kind in _KINDS}
        sizes = ", ".join(f"{_KINDS[kind]} {format_size(size)}" for kind, size in of.items())
        parts.append(f"{ENGINE_TITLES[engine]} ≈ {format_size(made.total(engine))} ({sizes})")
    return f"{what}: {'; '.join(parts)}"
