"""Free lists for pools without a prefix cache, in which every free block is plain."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from policies.content import Key


class Uncached:
    """The notifications about cached blocks, none of which ever comes."""

    tracks_use = False

    def remove(self, block: int) -> None:
        """Raise ``AssertionError``: no block is cached."""
        raise AssertionError("no block is cached here")

    def forget(self, block: int) -> None:
        """No effect: no block is cached."""

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect: no block is cached."""

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect: no block is cached."""


class FreeStack(Uncached):
    """Last released, first handed out; equivalent to ``LruQueue`` where no block is ever cached."""

    def __init__(self, blocks: Iterable[int]):
        self._free = list(blocks)[::-1]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Hand out the ``n`` top blocks."""
        if n == 1:
            return [self._free.pop()]
        taken = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - n :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Push blocks, so that the first of them is handed out next."""
        self._free += reversed(blocks)

    def push(self, block: int) -> None:
        """Push a block, which is handed out next."""
        self._free.append(block)

    def order(self) -> list[int]:
        """The stack from the top down."""
        return self._free[::-1]


class LowestFirst(Uncached):
    """Always hands out the lowest free block."""

    def __init__(self, blocks: Iterable[int]):
        self._free = list(blocks)
        heapq.heapify(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Hand out the ``n`` lowest blocks, ascending."""
        return [heapq.heappop(self._free) for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back; their order does not matter."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def order(self) -> list[int]:
        """All free blocks, ascending."""
        return sorted(self._free)
