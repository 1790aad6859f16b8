"""vLLM's cache for several groups of layers as recorded: how it was set up, and a policy that logs its calls."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.vllm_blocks import UNBOUNDED, PolicyStates, VllmCache
from policies import CacheConfig, Chunk, Content
from policies.layouts.hybrid_paged import HybridPagedPolicy
from policies.paging.cache_groups import GroupKind, GroupSpec

_KINDS: dict[str, GroupKind] = {kind: kind for kind in ("full", "latent", "window", "chunked", "state")}


class GroupCallLog(HybridPagedPolicy):
    """The paged policy for groups of layers, logging the scheduler's calls."""

    calls: list[list[Any]]
    name_of: dict[Content, str]

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Look up a prefix, and log it."""
        hit = super().match(seq, content, tokens)
        self.calls.append(["L", self.name_of[content], hit, [list(found) for found in self.blocks.found(seq).blocks]])
        return hit

    def reserve(self, chunk: Chunk, **options: Any) -> bool:
        """Reserve blocks, and log it."""
        before = self.tables_of(chunk.seq)
        begins = not any(before)
        held = [len(table) for table in (self.blocks.found(chunk.seq).blocks if begins else before)]
        computed, hit = (0, chunk.start) if begins else (chunk.start + options.get("rejected", 0), 0)
        done = super().reserve(chunk, **options)
        new = [table[n:] for table, n in zip(self.tables_of(chunk.seq), held, strict=True)] if done else None
        self.calls.append(["A", self.name_of[self.content_of(chunk.seq)], computed, chunk.n, hit, new])
        return done

    def tables_of(self, seq: int) -> list[list[int]]:
        """The blocks that a sequence has in each group."""
        return [list(table.blocks) for table in self.blocks.sequences[seq].tables]

    def content_of(self, seq: int) -> Content:
        """What a sequence says."""
        return self.blocks.sequences[seq].plan.content

    def states(self) -> PolicyStates:
        """Its states in the fields of recordings."""
        return PolicyStates(self.pool, self.blocks.hashed, len(self.specs), self.blocks.key_lookahead)


def group_policy(cache: VllmCache, header: Record) -> GroupCallLog:
    """A policy that is set up as recorded. Raises ``ValueError`` where that cannot be."""
    specs, drafts = tuple(map(_group_of, header["groups"])), header.get("speculation", {})
    if not any(spec.holds_cells for spec in specs):
        raise ValueError("groups: at least one must be of another kind than state")
    cells_per_block = 1 / sum(1 / spec.block_size for spec in specs if spec.holds_cells)
    config = CacheConfig(
        cells=ceil(cache.blocks * cells_per_block),
        n_ubatch=cache.max_in_flight,
        sequences=UNBOUNDED,
        max_tokens=cache.max_tokens,
        groups=specs,
        prefix_cache=cache.caching,
        retention=-1 if header["retention"] is None else whole_number(header, "retention", least=0),
        watermark=cache.watermark,
        draft_tokens=whole_number(drafts, "tokens") if drafts else 0,
        lookahead=header["effective"].get("lookahead", 0),
        key_lookahead=cache.key_lookahead,
    )
    policy = GroupCallLog(f"vllm {header['vllm']}", config)
    policy.blocks.forgets_uncomputed = False
    return policy


def _group_of(given: Record) -> GroupSpec:
    if given.get("kind") not in _KINDS:
        raise ValueError(f"a group's kind is {given.get('kind')!r:.40}; accepted: {', '.join(_KINDS)}")
    number = partial(whole_number, given, least=0)
    return GroupSpec(
        _KINDS[given["kind"]],
        whole_number(given, "block_size"),
        number("span") if "span" in given else 0,
        checkpoint_grid=number("checkpoint_grid") if "checkpoint_grid" in given else 0,
    )
