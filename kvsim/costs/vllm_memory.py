"""The memory that vLLM allocates for a model, part by part.

Sources. vLLM 0.33: ``v1/kv_cache_interface.py`` (bytes of a page, blocks of a request), ``v1/core/kv_cache_utils.py``
(groups of the hybrid KV cache manager, number of blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.costs.memory_settings import Part, PlanSettings, weight_parts
from kvsim.errors import counted
from kvsim.model.memory_shapes import AttentionGroup, MemoryShape
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


def _page_bytes(group: AttentionGroup, s: PlanSettings) -> int:
    """Bytes of a block in one layer (``AttentionSpec.page_size_bytes``)."""
    ranks = 1 if group.kind == "latent" else min(s.tensor_parallel, group.k_row // group.k_head)
    return s.block_size * (row_bytes(s.type_k, group.k_row // ranks) + row_bytes(s.type_k, group.v_row // ranks))


def _request_blocks(group: AttentionGroup, s: PlanSettings) -> int:
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
    detail = f"{s.batch:,} tokens in a pass"
    found.append(Part("vllm", "buffers", "activation peak", _peak(shape, s), True, detail))
    return found


def _peak(shape: MemoryShape, s: PlanSettings) -> int:
    """Estimated bytes of activations at the peak of vLLM's profile run, with 2 bytes per number.

    For each token of the largest batch: both inputs of the gate and its output, and the residual, its norm and the
    layer's input; or, if that is more, the logits of all sequences in 2 and in 4 bytes. Llama 3.1 8B with batches of
    20,000 and 29,000 tokens took 2.07 and 2.99 GiB (vLLM issue 10517); the estimates are 2.06 and 2.99.
    """
    return max(2 * s.batch * 3 * (shape.d_ff // s.tensor_parallel + shape.d_model), 6 * s.parallel * shape.vocabulary)


def why_not(shape: MemoryShape, s: PlanSettings) -> str | None:
    """Why vLLM would refuse the settings; None if it would not."""
    for option, kind in (("--cache-type-k", s.type_k), ("--cache-type-v", s.type_v)):
        if kind not in VLLM_CACHE_TYPES:
            return f"{option}: vLLM has no {kind} cache; it has {', '.join(VLLM_CACHE_TYPES)}"
    if s.type_k != s.type_v:
        return f"--cache-type-v: vLLM stores K and V in one type, not in {s.type_k} and {s.type_v}"
    if len({_page_bytes(group, s) for group in shape.groups}) > 1:
        return f"{shape.source}: layers of different widths cannot be planned for vLLM"
    return None


def notes(shape: MemoryShape, s: PlanSettings) -> list[str]:
    """Behaviour of vLLM with this model that may be unexpected."""
    if len(shape.groups) == 1:
        return []
    groups = BlockGroups.of(shape, s)
    size = max(1, groups.block_bytes // _page_bytes(shape.groups[0], s))
    padding = sum(groups.tables) * size - sum(group.layers for group in shape.groups)
    padded = f", with {counted(padding, 'layer')} of padding" if padding else ""
    return [
        f"vLLM's hybrid KV cache manager divides the layers into {sum(groups.tables)} groups of {size}{padded}; "
        "each has its own block table, and all take blocks from one pool"
    ]
