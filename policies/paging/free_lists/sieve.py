"""SIEVE: a queue by age, and a hand that spares what was hit since it last came by.

Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches" (NSDI 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys


class SieveQueue:
    """Cached blocks from the oldest to the newest, and a hand that moves that way, sparing each hit block once.

    Blocks in use keep their place in the queue; the hand passes over them.
    """

    tracks_use = True

    def __init__(self, blocks: Iterable[int], keys: BlockKeys):
        self._plain = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._free: set[int] = set()
        """Cached blocks that are not in use."""
        self._end = len(keys)
        """A sentinel behind the newest block and before the oldest."""
        self._newer = list(range(len(keys) + 1))
        self._older = list(range(len(keys) + 1))
        self._hit = bytearray(len(keys) + 1)
        self._hand = self._end

    def __len__(self) -> int:
        return len(self._plain) + len(self._free)

    def take(self, n: int) -> list[int]:
        """Hand out plain blocks, then those that the hand stops at."""
        taken = []
        for _ in range(n):
            taken.append(self._plain.popitem(last=False)[0] if self._plain else self._sift())
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back; cached ones have kept their place in the queue."""
        for block in blocks:
            if self._keys[block] is None:
                self._plain[block] = None
                self._plain.move_to_end(block, last=False)
            else:
                self._free.add(block)

    def remove(self, block: int) -> None:
        """The block is in use and keeps its place in the queue."""
        self._free.discard(block)

    def forget(self, block: int) -> None:
        """Put the block in front of the plain ones."""
        self._free.discard(block)
        self._unlink(block)
        self.release((block,))

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """Queue the block as the newest, not hit yet."""
        if self._linked(block):
            self._unlink(block)
        newest = self._older[self._end]
        self._newer[newest], self._older[block] = block, newest
        self._newer[block], self._older[self._end] = self._end, block
        self._hit[block] = 0

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """Mark the block, so that the hand spares it once."""
        self._hit[block] = 1

    def order(self) -> list[int]:
        """Plain blocks, then cached ones as the hand comes to them, marked ones last."""
        found: tuple[list[int], list[int]] = ([], [])
        block = self._hand
        for _ in range(len(self._keys) + 1):
            if block in self._free:
                found[self._hit[block]].append(block)
            block = self._newer[block]
            if block == self._hand:
                break
        return [*self._plain, *found[0], *found[1]]

    def _sift(self) -> int:
        """Move the hand to the next free block that is not marked, and take that block out of the queue."""
        block = self._hand
        while block not in self._free or self._hit[block]:
            if block in self._free:
                self._hit[block] = 0
            block = self._newer[block]
        self._hand = block
        self._unlink(block)
        self._free.discard(block)
        return block

    def _linked(self, block: int) -> bool:
        return self._newer[block] != block

    def _unlink(self, block: int) -> None:
        if self._hand == block:
            self._hand = self._newer[block]
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older
        self._newer[block] = self._older[block] = block
