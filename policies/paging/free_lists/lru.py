"""vLLM's free queue: the block released longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys


class LruQueue:
    """vLLM's queue: plain blocks go to the front (in the order up to 0.22.1, to the back), cached ones to the back."""

    tracks_use = False

    def __init__(self, blocks: Iterable[int], keys: BlockKeys, *, plain_first: bool = True):
        self._queue = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._plain_first = plain_first

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, n: int) -> list[int]:
        """Hand out the first ``n`` blocks of the queue."""
        pop = self._queue.popitem
        return [pop(False)[0] for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Queue blocks: the first plain one will be handed out next, the last cached one after all others."""
        queue, keys = self._queue, self._keys
        if not self._plain_first:
            queue.update(dict.fromkeys(blocks))
            return
        plain = []
        for block in blocks:
            if keys[block] is not None:
                queue[block] = None
            else:
                plain.append(block)
        for block in reversed(plain):
            queue[block] = None
            queue.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """Take a block out of the middle of the queue."""
        del self._queue[block]

    def forget(self, block: int) -> None:
        """The block keeps its place in the queue."""

    def stored(self, block: int, key: Key) -> None:
        """No effect."""

    def hit(self, block: int, key: Key) -> None:
        """No effect: only a release changes the order."""

    def order(self) -> list[int]:
        """The queue, front first."""
        return list(self._queue)
