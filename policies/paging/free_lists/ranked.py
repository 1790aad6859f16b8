"""Free cached blocks by a rank, the lowest forgotten first; with the ranks of FIFO and LFU."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys


class EvictionRank(Protocol):
    """How much a cached block is worth: the block with the smallest rank is forgotten first."""

    def stored(self, block: int, key: Key) -> None:
        """The block has become a cached one."""
        ...

    def hit(self, block: int, key: Key) -> None:
        """The block has been found by a sequence."""
        ...

    def rank(self, block: int, key: Key) -> int:
        """The block's rank at the moment when it is released."""
        ...


class FifoRank:
    """Ranks blocks by when they were cached (FIFO)."""

    def __init__(self) -> None:
        self._clock = 0
        self._cached_at: dict[int, int] = {}

    def stored(self, block: int, key: Key) -> None:
        """Note when the block was cached."""
        self._clock += 1
        self._cached_at[block] = self._clock

    def hit(self, block: int, key: Key) -> None:
        """No effect."""

    def rank(self, block: int, key: Key) -> int:
        """When the block was cached, counted in cached blocks."""
        return self._cached_at[block]


class LfuRank:
    """Ranks blocks by how often they were used since they were cached (LFU)."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def stored(self, block: int, key: Key) -> None:
        """Count the first use."""
        self._uses[block] = 1

    def hit(self, block: int, key: Key) -> None:
        """Count one use more."""
        self._uses[block] += 1

    def rank(self, block: int, key: Key) -> int:
        """Uses since the block was cached, caching it included."""
        return self._uses[block]


class RankedFreeBlocks:
    """Plain blocks, last released first, then cached ones by rank.

    Among equal ranks the block released longest ago is forgotten first, so that a chain of blocks loses its end first.
    """

    tracks_use = True

    def __init__(self, blocks: Iterable[int], keys: BlockKeys, rank: EvictionRank):
        self._plain = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._rank = rank
        self._heap: list[tuple[int, int, int]] = []
        """Entries (rank, time of release, block), some of them stale."""
        self._entries: dict[int, tuple[int, int, int]] = {}
        """Each free cached block's entry in the heap; all other entries there are stale."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._entries)

    def take(self, n: int) -> list[int]:
        """Hand out plain blocks, then those with the smallest rank."""
        taken = []
        for _ in range(n):
            if self._plain:
                taken.append(self._plain.popitem(last=False)[0])
                continue
            entry = heapq.heappop(self._heap)
            while self._entries.get(entry[2]) != entry:  # No two are equal, by their times.
                entry = heapq.heappop(self._heap)
            del self._entries[entry[2]]
            taken.append(entry[2])
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back, each at its rank of this moment."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                self.forget(block)
            else:
                self._clock += 1
                entry = (self._rank.rank(block, key), self._clock, block)
                self._entries[block] = entry
                heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Make the block's entry in the heap stale."""
        del self._entries[block]

    def forget(self, block: int) -> None:
        """Put the block in front of the plain ones."""
        self._entries.pop(block, None)
        self._plain[block] = None
        self._plain.move_to_end(block, last=False)

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """Tell the rank."""
        self._rank.stored(block, key)

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """Tell the rank."""
        self._rank.hit(block, key)

    def order(self) -> list[int]:
        """Plain blocks, then cached ones by rank."""
        return [*self._plain, *[block for _, _, block in sorted(self._entries.values())]]
