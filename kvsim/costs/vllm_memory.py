"""The memory that vLLM allocates for a model, part by part.

Sources. vLLM 0.33: ``v1/kv_cache_interface.py`` (bytes of a page, blocks of a request), ``v1/core/kv_cache_utils.py``
(groups of the hybrid KV cache manager, number of blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.costs.memory_settings import Part, PlanSettings, weight_parts
from kvsim.costs.vllm_profile import profile_parts, profile_run
from kvsim.errors import counted
from kvsim.model.cache_groups import CacheGroup, MemoryShape
from kvsim.model.storage_types import VLLM_CACHE_TYPES, row_bytes


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """How vLLM's hybrid KV cache manager groups layers so that blocks of all groups have the same size."""

    block_bytes: int
    """Bytes of a block: one page for each layer of a group, padding layers included."""
    tables: tuple[int, ...]
    """Number of block tables for each of the model's groups, each for one group of layers."""
    blocks: tuple[int, ...]
    """Maximum number of blocks per table for a request of ``ctx`` tokens, for each of the model's groups."""

    @staticmethod
    def of(shape: MemoryShape, s: PlanSettings) -> BlockGroups:
        """Group the layers as ``_get_kv_cache_groups_uniform_page_size`` and ``max_memory_usage_bytes`` do."""
        layers = [group.layers for group in shape.groups]
        size = max(layers) if max(layers) < 1.5 * min(layers) else min(layers)
        return BlockGroups(
            _page_bytes(shape.groups[0], s) * size,
            tuple(-(-n // size) for n in layers),
            tuple(_request_blocks(group, s) for group in shape.groups),
        )


def _page_bytes(group: CacheGroup, s: PlanSettings) -> int:
    """Bytes of a block in one layer, on one GPU (``AttentionSpec.page_size_bytes``).

    Each GPU has its share of the KV heads, at least one; a latent is not divided.
    """
    ranks = min(s.tensor_parallel, group.kv_heads)
    return s.block_size * (row_bytes(s.type_k, group.k_row // ranks) + row_bytes(s.type_k, group.v_row // ranks))


def _request_blocks(group: CacheGroup, s: PlanSettings) -> int:
    """Maximum number of blocks in a table of one request (``max_memory_usage_bytes`` of its spec).

    With a window: blocks for ``window - 1`` tokens plus a batch, and one more, since a window may begin within a block.
    """
    if group.kind != "window" or group.window is None:
        return -(-s.ctx // s.block_size)
    return -(-min(group.window - 1 + s.batch, s.ctx) // s.block_size) + 1


def parts(shape: MemoryShape, s: PlanSettings) -> list[Part]:
    """Everything that vLLM keeps in memory; sizes in bytes."""
    found = weight_parts("vllm", shape, s)
    groups = BlockGroups.of(shape, s)
    for title, tables, blocks in zip(shape.titles, groups.tables, groups.blocks, strict=True):
        n = s.parallel * tables * blocks
        detail = f"{n:,} blocks of {groups.block_bytes:,} bytes"
        found.append(Part("vllm", "kv", f"KV, {title}", n * groups.block_bytes, False, detail))
    found.append(Part("vllm", "kv", "KV, the null block", groups.block_bytes, False))
    return found + profile_parts(shape, s)


def why_not(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why vLLM would refuse the settings; None if it would not."""
    if shape.states:
        return f"{shape.name}: layers that keep a state are not planned for vLLM"
    if s.n_gpu_layers is not None or s.n_cpu_moe:
        return f"{'--n-cpu-moe' if s.n_gpu_layers is None else '--ngl'}: llama.cpp has it and vLLM has not"
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in VLLM_CACHE_TYPES:
            return f"{option}: vLLM has no {kind} cache; it has {', '.join(VLLM_CACHE_TYPES)}"
    if s.type_k != s.type_v:
        return f"--cache-type-v: vLLM stores K and V in one type, not in {s.type_k} and {s.type_v}"
    ranks = s.tensor_parallel
    if s.expert_parallel > 1 and (not shape.n_experts or shape.stored or shape.n_experts % s.expert_parallel):
        what = f"{s.expert_parallel} does not divide its {shape.n_experts} experts" if shape.n_experts else "no experts"
        return f"--ep: {shape.name}: {'not of a GGUF file' if shape.stored else what}"
    if s.expert_parallel > 1 and ranks > 1:
        return "--tp, --ep: experts that are divided beside layers are not simulated; give one of them"
    if shape.n_heads % ranks:
        return f"--tp: vLLM divides heads over GPUs; {ranks} does not divide the {shape.n_heads} heads of {shape.name}"
    if any(group.kv_heads % ranks and ranks % group.kv_heads for group in shape.groups):
        return f"--tp: {ranks} and the {shape.groups[0].kv_heads} KV heads of {shape.name} do not divide each other"
    if len({_page_bytes(group, s) for group in shape.groups}) > 1:
        return f"{shape.source}: layers of different widths cannot be planned for vLLM"
    return None


def notes(shape: MemoryShape, s: PlanSettings) -> list[str]:
    """Behaviour of vLLM with this model that may be unexpected."""
    found = []
    run, ranks = profile_run(s.vllm_version), s.tensor_parallel
    if run.version != s.vllm_version:
        found.append(
            f"vLLM {s.vllm_version} is planned as {run.version}, the last version before it that is known here"
        )
    if ranks > 1:
        kept = ["norms", "the rotary table"]
        if any(group.kv_heads < ranks for group in shape.groups):
            kept.append(
                "latents" if shape.groups[0].kind == "latent" else "KV heads, of which there are fewer than GPUs"
            )
        found.append(
            f"--tp {ranks}: memory is that of one of {ranks} GPUs, over which vLLM divides matrices, embeddings and KV "
            f"heads; each keeps {', '.join(kept)}"
        )
    if len(shape.groups) > 1:
        found.append(_grouping(shape, s))
    return found


def _grouping(shape: MemoryShape, s: PlanSettings) -> str:
    """How the layers of a hybrid model share one pool of blocks, in words."""
    groups = BlockGroups.of(shape, s)
    size = max(1, groups.block_bytes // _page_bytes(shape.groups[0], s))
    padding = sum(groups.tables) * size - sum(group.layers for group in shape.groups)
    padded = f", with {counted(padding, 'layer')} of padding" if padding else ""
    return (
        f"vLLM's hybrid KV cache manager divides the layers into {sum(groups.tables)} groups of {size}{padded}; "
        "each has its own block table, and all take blocks from one pool"
    )
