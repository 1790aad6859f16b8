"""vLLM's cache as recorded: how it was set up, its blocks by the recordings' ids, and its state after each record."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.replay import State
from policies import CacheConfig, Content
from policies.content import Key
from policies.layouts.paged import PagedPolicy
from policies.paging.blocks import BlockPool
from policies.paging.cache_groups import group_key
from policies.paging.disk_chunks import TieredChunks
from policies.paging.eviction import free_blocks
from policies.paging.host_chunks import HostChunks, OffloadOrder

UNBOUNDED = 1 << 30
"""Tokens or sequences, where a recording sets no limit."""
COMMON = ("nf", "fqc", "fq", "st", "nc")
"""Fields of every record: free blocks, checksum of their queue, the queue, checksum of all blocks, cached blocks."""
_VERSION = "0.33.0"
_MASK = (1 << 32) - 1
P = TypeVar("P", bound=PagedPolicy)


@dataclass(frozen=True)
class VllmCache:
    """How a recorded cache manager was set up."""

    blocks: int
    block_size: int
    caching: bool
    max_tokens: int
    """The most tokens of a sequence."""
    max_in_flight: int = UNBOUNDED
    """Tokens of a step."""
    watermark: float = 0.0
    window: int | None = None
    tail_only: bool = False
    drops_last_found: bool = False
    """Whether the last block of a cached prefix is computed again, for a drafter."""
    key_lookahead: int = 0
    """Tokens behind a block that its key covers, instead, for a drafter: since vLLM 0.33."""
    chunks: Record | None = None
    """What host memory holds beside the steps, where there is any: ``offload`` of a recording's header."""

    @staticmethod
    def of(header: Record, max_tokens: int) -> VllmCache:
        """By the header of a recording of the cache manager or the scheduler."""
        effective = header.get("effective", header)
        reads_hidden_states = header.get("speculation", {}).get("method") in ("eagle", "mtp")
        key_lookahead = whole_number(effective, "key_lookahead", least=0) if "key_lookahead" in effective else 0
        return VllmCache(
            whole_number(header, "num_blocks"),
            1 if "groups" in header else whole_number(header, "block_size"),
            bool(header["caching"]),
            max_tokens,
            max_in_flight=effective.get("max_in_flight", UNBOUNDED) // effective.get("max_concurrent_batches", 1),
            watermark=float(header.get("watermark", 0.0)),
            window=whole_number(header, "window") if "window" in header else None,
            tail_only=header.get("retention") == 0,
            drops_last_found=reads_hidden_states and not key_lookahead,
            key_lookahead=key_lookahead,
            chunks=header.get("offload"),
        )

    def build(self, policy: Callable[..., P]) -> P:
        """A policy that is set up like this."""
        config = CacheConfig(
            cells=self.blocks * self.block_size,
            n_ubatch=self.max_in_flight,
            sequences=UNBOUNDED,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            watermark=self.watermark,
            drops_last_found=self.drops_last_found,
            key_lookahead=self.key_lookahead,
        )
        built = policy(
            f"vllm {_VERSION}",
            config,
            block_size=self.block_size,
            free=partial(free_blocks, "lru"),
            prefix_cache=self.caching,
            window=self.window,
            tail_only=self.tail_only,
            chunks=None if self.chunks is None else _host_chunks(self.chunks),
        )
        built.blocks.forgets_uncomputed = False
        return built


def _host_chunks(given: Record) -> HostChunks:
    orders: dict[str, OffloadOrder] = {"lru": "lru", "arc": "arc"}
    per_chunk, threshold = whole_number(given, "blocks_per_chunk"), whole_number(given, "store_threshold", least=0)
    answers = not given["prompt_only"]
    if given["order"] not in orders:
        raise ValueError(f"order is {given['order']!r:.40}; accepted: {', '.join(orders)}")
    n, order = whole_number(given, "chunks"), orders[given["order"]]
    if "disk" in given:
        return TieredChunks(n, per_chunk, order, answers=answers, most_files=whole_number(given, "disk"))
    return HostChunks(n, per_chunk, order, threshold, answers=answers)


class PolicyStates:
    """The states of a policy in the fields of recordings, whose ids of full blocks are hashes of their tokens."""

    def __init__(self, pool: BlockPool, size: int, groups: int = 0, lookahead: int = 0):
        """``size``: tokens that have an id together. ``groups``: cache groups whose blocks the pool has, if several.
        ``lookahead``: tokens behind a block that its id covers."""
        self._pool, self._size, self._groups, self._lookahead = pool, size, groups, lookahead
        self._evicted: list[list[object]] = []
        self._ids: dict[Key, str] = {}
        """The recordings' ids, by our content keys."""
        self._texts: dict[Content, tuple[list[int], list[str]]] = {}
        """By content: the tokens of its last, incomplete block, and the ids of the full blocks before it."""
        pool.on_evict = lambda block, key: self._evicted.append([block, self._ids[key]])

    def extend(self, content: Content, piece: Sequence[int]) -> None:
        """Let a content grow by a segment, and learn the ids of the blocks that become full."""
        seed, start, n = piece
        content.extend((seed, start, n))
        tokens, ids = self._texts.setdefault(content, ([], []))
        tokens += _tokens_of(seed, start, n)
        size, lookahead = self._size, self._lookahead
        while len(tokens) >= size + lookahead:
            block = ",".join(map(str, tokens[: size + lookahead]))
            del tokens[:size]
            parent = ids[-1] if ids else "root"
            ids.append(blake2b(f"{parent}|{block}".encode(), digest_size=6).hexdigest())
        for key, own in zip(content.keys(size, len(ids), lookahead), ids, strict=False):
            if not self._groups:
                self._ids.setdefault(key, own)
            for group in range(self._groups):
                self._ids.setdefault(group_key(key, group), f"{own}:{group}")

    def names_of(self, keys: Iterable[Key]) -> list[str]:
        """The recordings' ids of blocks."""
        return [self._ids[key] for key in keys]

    def after(self, record: Record) -> State:
        """Our values of the fields that every record has, since the last call."""
        pool = self._pool
        queue = pool.free.order()
        blocks = [[pool.refs[b], 0 if (key := pool.keys[b]) is None else self._ids[key]] for b in range(1, pool.n)]
        evicted, self._evicted = self._evicted, []
        state: State = {"nf": len(queue), "fqc": crc(queue), "st": crc(blocks), "nc": pool.n_cached, "ev": evicted}
        return state | ({"fq": queue} if "fq" in record else {})


def recorded_state(record: Record, fields: tuple[str, ...]) -> State:
    """The record's own fields and the common ones, of which the queue is optional."""
    common = {key: record[key] for key in COMMON if key != "fq" or key in record}
    return {key: record[key] for key in fields} | common | {"ev": record.get("ev", [])}


def crc(value: object) -> int:
    """The recordings' checksum of a JSON value."""
    return zlib.crc32(json.dumps(value, separators=(",", ":")).encode())


def _tokens_of(seed: int, start: int, n: int) -> Iterator[int]:
    """The token ids of a segment, by the recordings' formula."""
    for i in range(start, start + n):
        x = (seed * 2654435761 + i * 40503 + i * i * 97 + 12345) & _MASK
        x = ((x ^ (x >> 15)) * 2246822519) & _MASK
        yield (x >> 13) & 0x7FFF
