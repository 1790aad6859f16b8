"""Orders of eviction: the orders of free blocks, which are also what a prefix cache forgets first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from policies.paging.free_lists.belady import BeladyRank, Future
from policies.paging.free_lists.lru import LruQueue
from policies.paging.free_lists.protocol import BlockKeys, FreeBlocks
from policies.paging.free_lists.ranked import EvictionRank, FifoRank, LfuRank, RankedFreeBlocks
from policies.paging.free_lists.sieve import SieveQueue
from policies.paging.free_lists.workload_aware import WorkloadAwareQueues
from policies.registry import Registry

Eviction = str
"""Which cached block is forgotten first. ``lru``: the one released longest ago, as in vLLM. ``fifo``: the one cached
first. ``lfu``: the one used least often, among equals the one released longest ago. ``sieve``: Zhang et al., "SIEVE is
Simpler than LRU" (NSDI 2024). ``workload-aware``: the one that is least likely to be used again soon, as blocks of its
kind of request have been so far (Wang et al., USENIX ATC 2025). ``belady``: the one whose next use is farthest in the
future (Belady 1966); it must know that future. No order does better than ``belady``, except by a block now and then
where prompts end with a full block, which is computed anew although it is cached."""

EVICTION_ORDERS = Registry(
    "order of eviction",
    "kvsim.evictions",
    "EVICTIONS",
    {
        "lru": "the block released longest ago is forgotten first, as in vLLM",
        "fifo": "the block cached first",
        "lfu": "the block used least often",
        "sieve": "the first block behind the hand that was not used since it passed (Zhang et al., NSDI 2024)",
        "workload-aware": "the block least likely to be used again soon, by its kind of request (USENIX ATC 2025)",
        "belady": "the block whose next use is farthest in the future; it must know that future",
    },
)
"""These, and those of others: by name what makes an ``EvictionRank``, called without arguments."""

EVICTIONS: tuple[Eviction, ...] = tuple(EVICTION_ORDERS.built_in)
"""Those that are built in."""

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
    """Build the free list of an order of eviction. Raises ``ValueError`` where ``belady`` is given no future."""
    if eviction == "lru":
        return LruQueue(blocks, keys, plain_first=order == "0.33.0")
    if eviction == "sieve":
        return SieveQueue(blocks, keys)
    if eviction == "workload-aware":
        return WorkloadAwareQueues(blocks, keys)
    if eviction == "belady" and future is None:
        raise ValueError("eviction 'belady' must know which requests will come; no workload was given")
    ranks: dict[str, Callable[[], EvictionRank]] = {"fifo": FifoRank, "lfu": LfuRank}
    if future is not None and eviction == "belady":
        return RankedFreeBlocks(blocks, keys, BeladyRank(future, keys))
    return RankedFreeBlocks(blocks, keys, (ranks.get(eviction) or EVICTION_ORDERS.added(eviction))())
