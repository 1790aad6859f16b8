"""What recordings of vLLM's cache manager and scheduler have in common: their tokens, block ids and states."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from kvsim.engines.conformance.recordings import Record, State, whole_number
from policies import CacheConfig, Content
from policies.content import Key, TextSegment
from policies.layouts.paged import PagedPolicy
from policies.paging.eviction import free_blocks

VERSION = "0.33.0"
UNBOUNDED = 1 << 30
"""Tokens or sequences, where a recording sets no limit."""
_MASK = (1 << 32) - 1
P = TypeVar("P", bound=PagedPolicy)


def build_policy(
    build: Callable[..., P],
    *,
    blocks: int,
    block_size: int,
    caching: bool,
    max_tokens: int = UNBOUNDED,
    max_in_flight: int = UNBOUNDED,
    watermark: float = 0.0,
    window: int | None = None,
    tail_only: bool = False,
) -> P:
    """vLLM's cache manager. ``max_in_flight``: tokens of a step; ``max_tokens``: of a sequence; others as in ``P``."""
    config = CacheConfig(
        cells=blocks * block_size,
        n_ubatch=max_in_flight,
        sequences=UNBOUNDED,
        max_tokens=max_tokens,
        block_size=block_size,
        watermark=watermark,
    )
    policy = build(
        f"vllm {VERSION}",
        config,
        block_size=block_size,
        free=partial(free_blocks, "lru"),
        prefix_cache=caching,
        window=window,
        tail_only=tail_only,
    )
    policy.blocks.forgets_uncomputed = False
    return policy


def crc(value: object) -> int:
    """The recordings' checksum of a JSON value."""
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def tokens_of(piece: TextSegment) -> Iterator[int]:
    """The token ids of a segment, by the recordings' formula."""
    seed, start, n = piece
    for i in range(start, start + n):
        x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) & _MASK
        x = ((x ^ (x >> 15)) * 2246822519) & _MASK
        yield (x >> 13) & 0x7FFF


class BlockIds:
    """The recordings' ids of full blocks, by our content keys."""

    def __init__(self, block_size: int):
        self.of: dict[Key, str] = {}
        self._block_size = block_size
        self._texts: dict[Content, tuple[list[int], list[str]]] = {}
        """By content: the tokens of its last, incomplete block, and the ids of the full blocks before it."""

    def learn(self, content: Content, piece: TextSegment) -> None:
        """Register the blocks that become full as the content grows by ``piece``."""
        tokens, ids = self._texts.setdefault(content, ([], []))
        tokens += tokens_of(piece)
        size = self._block_size
        while len(tokens) >= size:
            block = ",".join(map(str, tokens[:size]))
            del tokens[:size]
            parent = ids[-1] if ids else "root"
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).hexdigest())
        keys = content.keys(size, len(ids))
        for at in range(len(ids)):
            self.of.setdefault(keys[at], ids[at])


class RecordedPolicy(Generic[P]):
    """A policy built from a recording's header, and its state in the recording's fields."""

    def __init__(self, header: Record, max_tokens: int, build: Callable[..., P]):
        blocks, size = whole_number(header, "num_blocks"), whole_number(header, "block_size")
        effective = header.get("effective", header)
        batches = effective.get("max_concurrent_batches", 1)
        self.policy = build_policy(
            build,
            blocks=blocks,
            block_size=size,
            caching=bool(header["caching"]),
            max_tokens=max_tokens,
            max_in_flight=effective.get("max_in_flight", UNBOUNDED) // batches,
            watermark=float(header.get("watermark", 0.0)),
            window=whole_number(header, "window") if "window" in header else None,
            tail_only=header.get("retention") == 0,
        )
        self.names = BlockIds(size)
        self.evicted: list[list[Any]] = []
        self.policy.pool.on_evict = lambda block, key: self.evicted.append([block, self.names.of[key]])

    def state(self, record: Record) -> State:
        """Our values of the fields that every record has."""
        pool, names = self.policy.pool, self.names.of
        queue = pool.free.order()
        blocks = [[pool.refs[b], 0 if (key := pool.keys[b]) is None else names[key]] for b in range(1, pool.n)]
        state: State = {"nf": len(queue), "fqc": crc(queue), "st": crc(blocks), "nc": pool.n_cached, "ev": self.evicted}
        if "fq" in record:
            state["fq"] = queue
        self.evicted = []
        return state


COMMON = ("nf", "fqc", "fq", "st", "nc")


def recorded_state(record: Record, fields: tuple[str, ...]) -> State:
    """The record's own fields and the common ones, of which the queue is optional."""
    common = {key: record[key] for key in COMMON if key != "fq" or key in record}
    return {key: record[key] for key in fields} | common | {"ev": record.get("ev", [])}
