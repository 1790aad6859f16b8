"""The blocks of vLLM's hybrid KV cache manager: their size, and how many a request holds.

Sources. vLLM 0.33: ``v1/kv_cache_interface.py`` (bytes of a page, blocks of a request), groups of layers in
``v1/core/kv_cache_planning.py``, ``_align_hybrid_block_size`` in ``platforms/interface.py``, states and their types in
``model_executor/models/config.py`` and ``model_executor/layers/mamba``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvsim.costs.drafter import HEAD, drafter_shape
from kvsim.costs.memory_settings import PlanSettings
from kvsim.costs.vllm_profile import version_numbers
from kvsim.errors import counted
from kvsim.model.cache_groups import CacheGroup, MemoryShape
from kvsim.model.storage_types import MAMBA_CACHE_TYPES, format_size, row_bytes

_KERNEL_BLOCK = 16
"""Tokens of which FlashAttention takes a multiple in a block."""
_LATENT_BLOCK = 128
"""Tokens of which a block is a multiple where latents and states share blocks."""
_IN_FLIGHT = ("0.32.0", 2)
"""Since when blocks of windows are counted for all steps that may be under way, and how many those are."""
_CHECKPOINTS = "0.33.0", {"Mamba 2": 1, "gated delta net": 64}
"""Since when a request holds a block more for a checkpoint within its prompt, with which states, and the tokens of
which blocks are multiples then. Of gated delta nets it is FlashInfer that does so, on Hopper and later."""


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """How vLLM groups layers so that blocks of all groups have the same size."""

    groups: tuple[CacheGroup, ...]
    """The model's groups, as vLLM caches them."""
    block_size: int
    """Tokens in a block of layers with attention."""
    block_bytes: int
    """Bytes of a block: one page for each layer of a group, padding layers included, and an indexer's keys."""
    page_bytes: int
    """Bytes of a block in one layer."""
    tables: tuple[int, ...]
    """Number of block tables for each group, each for some of its layers."""
    blocks: tuple[int, ...]
    """Maximum number of blocks per table for a request of ``ctx`` tokens, for each group."""

    @staticmethod
    def of(shape: MemoryShape, s: PlanSettings) -> BlockGroups:
        """Group the layers as ``_get_kv_cache_groups_uniform_page_size`` and ``max_memory_usage_bytes`` do."""
        groups, beside = cached_groups(shape), shape.indices
        if s.drafter:
            drafter = drafter_shape(shape, s.drafter)
            own, beside = cached_groups(drafter), (*beside, *drafter.indices)
            if s.drafter == HEAD:  # A layer like others of the model.
                groups = tuple(replace(g, layers=g.layers + (replace(g, layers=1, readers=0) in own)) for g in groups)
            else:
                beside += own
        size, layers = block_size(shape, s), [group.layers for group in groups]
        cells = [group for group in groups if group.state is None]
        page = size * token_bytes(cells[0], s) if cells else max(state_bytes(group, s) for group in groups)
        each = max(layers) if max(layers) < 1.5 * min(layers) else min(layers)
        blocks = tuple(_request_blocks(group, size, s, alone=not cells) for group in groups)
        more = size * sum(group.layers * token_bytes(group, s) for group in beside)
        return BlockGroups(groups, size, page * each + more, page, tuple(-(-n // each) for n in layers), blocks)

    @property
    def of_request(self) -> int:
        """Blocks that a request of ``ctx`` tokens holds at most."""
        return sum(tables * blocks for tables, blocks in zip(self.tables, self.blocks, strict=True))

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request in so many blocks, where attention keeps all; less than 1 if none fits."""
        each = list(zip(self.groups, self.tables, self.blocks, strict=True))
        states = sum(tables * held for group, tables, held in each if group.state is not None)
        return self.block_size * ((blocks - states) // sum(tables for group, tables, _ in each if group.state is None))

    @property
    def least(self) -> int:
        """Blocks that the shortest request holds."""
        return sum(self.tables)


def cached_groups(shape: MemoryShape) -> tuple[CacheGroup, ...]:
    """The groups as vLLM caches them.

    Keys of an indexer lie in the blocks of the latents. Chunked layers keep all tokens, since vLLM switches off its
    hybrid manager for them (``VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE``).
    """
    chunked = sum(group.layers for group in shape.groups if group.kind == "chunked")
    if not chunked:
        return tuple(group for group in shape.groups if group.kind != "index")
    first, *_ = shape.groups
    whole = sum(group.layers for group in shape.groups if group.kind == "full")
    return (replace(first, kind="full", layers=chunked + whole, window=None),)


def token_bytes(group: CacheGroup, s: PlanSettings) -> int:
    """Bytes of a token in one layer, on one GPU (``AttentionSpec.page_size_bytes``).

    Each GPU has its share of the KV heads, at least one; a latent is not divided. V is padded to the width
    of K (``minicpm3.py``). Keys of an indexer have 8 bits and a scale in 32 for each 128 (``DeepseekV32Indexer``).
    """
    if group.kind == "index":
        return group.k_row + 4 * (group.k_row // 128)
    ranks = min(s.tensor_parallel, group.kv_heads)
    return (2 if group.v_row else 1) * row_bytes(s.type_k, group.k_row // ranks)


def state_bytes(group: CacheGroup, s: PlanSettings) -> int:
    """Bytes of the state of one sequence in one layer, on one GPU (``MambaSpec.page_size_bytes``)."""
    assert group.state is not None
    convolution, recurrent = group.state.numbers(s.tensor_parallel)
    first = MAMBA_CACHE_TYPES[s.mamba_cache_dtype] or 2
    usual = {"f32": 4}.get(group.state.recurrent_type, first)
    return convolution * first + recurrent * (MAMBA_CACHE_TYPES[s.mamba_ssm_cache_dtype] or usual)


def block_size(shape: MemoryShape, s: PlanSettings) -> int:
    """Tokens in a block: as many as make a page of attention hold a state (``_align_hybrid_block_size``)."""
    if not shape.states or not shape.cells:
        return s.block_size
    unit = max(_KERNEL_BLOCK, s.block_size)
    if shape.cells[0].kind == "latent":
        unit = max(unit, _LATENT_BLOCK)
    if s.prefix_caching:
        unit = math.lcm(unit, *(checkpoint_grid(group, s) or 1 for group in shape.states))
    state, token = max(state_bytes(group, s) for group in shape.states), token_bytes(shape.cells[0], s)
    tokens = unit * -(-state // (unit * token))
    return max(s.block_size, -(-tokens // _KERNEL_BLOCK) * _KERNEL_BLOCK)


def checkpoint_grid(group: CacheGroup, s: PlanSettings) -> int:
    """The tokens of which checkpoints within a prompt are a multiple; 0 where there are none."""
    since, alignments = _CHECKPOINTS
    known = group.state is not None and version_numbers(s.vllm_version) >= version_numbers(since)
    return alignments.get(group.state.name, 0) if known and group.state else 0


def _request_blocks(group: CacheGroup, size: int, s: PlanSettings, *, alone: bool) -> int:
    """Maximum number of blocks in a table of one request (``max_memory_usage_bytes`` of its spec).

    With a window: blocks for ``window - 1`` tokens plus those under way, and one more, since a window may begin within
    a block. A state has one; with prefix caching, which models without any attention have not, also that of the last
    full block, and maybe of a checkpoint.
    """
    if group.state is not None:
        if alone or not s.prefix_caching:
            return 1
        return 3 if checkpoint_grid(group, s) else 2
    if group.kind != "window" or group.window is None:
        return -(-s.ctx // size)
    since, steps = _IN_FLIGHT
    ahead = version_numbers(s.vllm_version) >= version_numbers(since)
    under_way = steps * s.batch if ahead else s.batch
    return -(-min(group.window - 1 + under_way, s.ctx) // size) + 1


def notes(shape: MemoryShape, s: PlanSettings) -> list[str]:
    """How the layers share one pool of blocks, in words."""
    made, found = BlockGroups.of(shape, s), []
    if any(group.kind == "chunked" for group in shape.groups):
        found.append("vLLM keeps all tokens of chunked layers, too: its hybrid KV cache manager is off for them")
    for group in shape.indices:
        found.append(
            f"vLLM: blocks have keys of an indexer, too, {token_bytes(group, s)} bytes of a token in {group.layers} "
            f"layers, {made.block_bytes // made.block_size:,} in all"
        )
    if shape.states:
        found += _of_states(shape, s, made)
    if len(made.groups) > 1:
        size = max(1, made.block_bytes // made.page_bytes)
        padding = sum(made.tables) * size - sum(group.layers for group in made.groups)
        padded = f", with {counted(padding, 'layer')} of padding" if padding else ""
        found.append(
            f"vLLM's hybrid KV cache manager divides the layers into {sum(made.tables)} groups of {size}{padded}; "
            "each has its own block table, and all take blocks from one pool"
        )
    return found


def _of_states(shape: MemoryShape, s: PlanSettings, made: BlockGroups) -> list[str]:
    """What states do to blocks."""
    kept = sum(group.layers * state_bytes(group, s) for group in shape.states)
    found = [f"vLLM: a state of {format_size(kept)} a sequence, whatever its length"]
    if not shape.cells:
        return [*found, "vLLM: a block is the state of one sequence; there is no prefix cache for this model"]
    padding = made.page_bytes / max(state_bytes(group, s) for group in shape.states) - 1
    least = made.least * made.block_bytes
    held = max(n for n, group in zip(made.blocks, made.groups, strict=True) if group.state)
    found.append(
        f"vLLM sets blocks of {made.block_size:,} tokens, in which a page of attention is as large as a state, padded "
        f"by {padding:.1%}; the shortest prompt holds {made.least} blocks, {format_size(least)}, as one of "
        f"{made.block_size:,} tokens does"
    )
    if held > 1:
        found.append(
            f"vLLM: with prefix caching a sequence holds up to {held} blocks in each table of states; with "
            "--no-enable-prefix-caching one"
        )
    return found
