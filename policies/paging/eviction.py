"""Eviction policies: the orders of free blocks, which are also what a prefix cache forgets first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from policies.paging.free_lists.belady import BeladyRank, Future
from policies.paging.free_lists.lru import LruQueue
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.paging.free_lists.ranked import EvictionRank, FifoRank, LfuRank, RankedFreeBlocks
from policies.paging.free_lists.sieve import SieveQueue
from policies.paging.free_lists.workload_aware import WorkloadAwareQueues

Eviction = Literal["lru", "fifo", "lfu", "sieve", "workload-aware", "belady"]
"""Which cached block is forgotten first. ``lru``: the one released longest ago, as in vLLM. ``fifo``: the one cached
first. ``lfu``: the one used least often, among equals the one released longest ago. ``sieve``: Zhang et al., "SIEVE is
Simpler than LRU" (NSDI 2024). ``workload-aware``: the one that is least likely to be used again soon, as blocks of its
kind of request have been so far (Wang et al., USENIX ATC 2025). ``belady``: the one whose next use is farthest in the
future (Belady 1966); it must know that future. No order does better than ``belady``, except by a block now and then
where prompts end with a full block, which is computed anew although it is cached."""

EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

FreeOrder = Literal["0.33.0", "0.22.1"]
"""The version of vLLM whose order of free blocks is kept: a plain block that is released goes to the front of the queue
(0.33.0), or to the back like all others (up to 0.22.1)."""


def free_blocks(
    eviction: Eviction,
    blocks: Iterable[int],
    keys: BlockKeys,
    *,
    order: FreeOrder = "0.33.0",
    future: Future | None = None,
) -> FreeBlocks:
    """Build the free list of an eviction policy. Raises ``ValueError`` where ``belady`` is given no future."""
    if eviction == "lru":
        return LruQueue(blocks, keys, plain_first=order == "0.33.0")
    if eviction == "sieve":
        return SieveQueue(blocks, keys)
    if eviction == "workload-aware":
        return WorkloadAwareQueues(blocks, keys)
    if eviction == "belady" and future is None:
        raise ValueError("eviction 'belady' must know which requests will come; no workload was given")
    ranks: dict[str, Callable[[], EvictionRank]] = {"fifo": FifoRank, "lfu": LfuRank}
    rank = BeladyRank(future, keys) if future is not None and eviction == "belady" else ranks[eviction]()
    return RankedFreeBlocks(blocks, keys, rank)
