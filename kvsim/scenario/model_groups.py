"""The cache groups that vLLM makes of a model whose layers keep states."""

from __future__ import annotations

from typing import Any

from kvsim.costs.memory_settings import PlanSettings
from kvsim.costs.vllm_blocks import BlockGroups, checkpoint_grid
from kvsim.errors import LIMITS
from kvsim.model.cache_groups import MemoryShape
from kvsim.model.engine_shapes import ModelShape


def groups_of(shape: MemoryShape, s: PlanSettings) -> list[dict[str, Any]]:
    """The block tables that vLLM makes of a model's layers, as ``[[cache.groups]]``: all have equally many layers."""
    made = BlockGroups.of(shape, s)
    return [
        {
            "kind": group.kind,
            "block_size": made.block_size,
            "layers": made.block_bytes // made.page_bytes,
            "checkpoint_grid": checkpoint_grid(group, s),
        }
        for group, tables in zip(made.groups, made.tables, strict=True)
        for _ in range(tables)
    ]


def why_not_simulated(shape: MemoryShape) -> str | None:
    """Why a model cannot be simulated for what its layers keep beside states, or None."""
    if not shape.states or (shape.cells and not any(group.window for group in shape.cells)):
        return None
    what = "windows beside states" if shape.cells else "models without any attention"
    return f"{shape.name}: {what} are not simulated; kvsim plan --model {shape.name} says what they take{LIMITS}"


def why_not_under(shape: ModelShape | MemoryShape, policy: str, kinds: set[str]) -> str | None:
    """Why a model whose layers keep states cannot be simulated under a policy, with groups of these kinds; or None."""
    if not isinstance(shape, MemoryShape) or not shape.states:
        return None
    if policy == "hybrid" or (policy == "vllm" and "state" in kinds):
        return why_not_simulated(shape)
    return (
        f"{shape.name}: its layers keep states, which policy {policy} does not; hybrid (llama.cpp) does, and vllm with "
        "[[cache.groups]] of kind state, which follow from a machine.device"
    )
