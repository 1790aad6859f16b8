"""vLLM's free queue: the block released longest ago is forgotten first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from policies.compiled import i64
from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys

_FEWEST: Final = 64
"""So many blocks must at least have left a list before those behind them are moved up."""


class LruQueue:
    """vLLM's queue: plain blocks go to the front (in the order up to 0.22.1, to the back), cached ones to the back."""

    tracks_use = False

    def __init__(self, blocks: Iterable[int], keys: BlockKeys, *, plain_first: bool = True):
        self._keys = keys
        self._plain_first = plain_first
        self._front: list[int] = []
        """Plain blocks that go before all others, the next to be handed out last."""
        self._queue = list(blocks)
        """All others in order, from the index ``_next`` on."""
        self._next = 0
        self._gone: dict[int, int] = {}
        """Blocks that were taken out of the middle, and how often: their first so many entries do not count."""
        self._n = len(self._queue)

    def __len__(self) -> int:
        return self._n

    def take(self, n: int) -> list[int]:
        """Hand out the first ``n`` blocks of the queue."""
        front, queue, first = self._front, self._queue, self._next
        self._n -= n
        taken: list[int] = []
        if front:
            taken = front[: -n - 1 : -1]
            del front[len(front) - len(taken) :]
            n -= len(taken)
        if not self._gone:
            taken += queue[first : first + n]
            first += n
        else:
            while n:
                block = queue[first]
                first += 1
                if not self._is_gone(block):
                    taken.append(block)
                    n -= 1
        if first >= _FEWEST and 2 * first > len(queue):
            del queue[:first]
            first = 0
        self._next = first
        return taken

    def release(self, blocks: list[int]) -> None:
        """Queue blocks: the first plain one will be handed out next, the last cached one after all others."""
        self._n += len(blocks)
        if not self._plain_first:
            self._queue += blocks
            return
        keys, plain, cached = self._keys, list[int](), self._queue
        for block in blocks:
            at: i64 = block
            if keys[at] is None:
                plain.append(block)
            else:
                cached.append(block)
        plain.reverse()
        self._front += plain

    def remove(self, block: int) -> None:
        """Take a block out of the middle of the queue."""
        self._gone[block] = self._gone.get(block, 0) + 1
        self._n -= 1

    def forget(self, block: int) -> None:
        """The block keeps its place in the queue."""

    def stored(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect."""

    def hit(self, block: int, key: Key, kind: int = 0) -> None:
        """No effect: only a release changes the order."""

    def order(self) -> list[int]:
        """The queue, front first."""
        gone = dict(self._gone)
        found = self._front[::-1]
        for block in self._queue[self._next :]:
            if gone.get(block):
                gone[block] -= 1
            else:
                found.append(block)
        return found

    def _is_gone(self, block: int) -> bool:
        """Whether the next entry, which is the block's, does not count."""
        times = self._gone.get(block)
        if times is None:
            return False
        if times == 1:
            del self._gone[block]
        else:
            self._gone[block] = times - 1
        return True
