"""Clairvoyant eviction: the block whose next use is farthest in the future is forgotten first.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys

NEVER = 1 << 62
"""The next use of a block that no request will ask for."""


class Future:
    """When each block will be asked for, in numbers of requests."""

    def __init__(self, requests: Iterable[Sequence[Key]]):
        """``requests``: in order of arrival, the keys that each request will look up."""
        self.now = -1
        """The last request that has started; -1 before the first."""
        self._uses: dict[Key, list[int]] = {}
        for number, keys in enumerate(requests):
            for key in keys:
                self._uses.setdefault(key, []).append(number)

    def advance(self, request: int) -> None:
        """Move on to this request; an earlier one changes nothing."""
        self.now = max(self.now, request)

    def next_use(self, key: Key) -> int:
        """The next request that will ask for the block, or ``NEVER``."""
        uses = self._uses.get(key, ())
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER


class BeladyRank:
    """Ranks blocks by how soon they will be used; a duplicate of a block that is found in its stead never will be."""

    def __init__(self, future: Future, keys: BlockKeys):
        self._future = future
        self._keys = keys
        self._duplicates: dict[Key, list[int]] = {}
        """The blocks that were cached under a key, in order; the first that still is cached under it will be found."""

    def stored(self, block: int, key: Key) -> None:
        """Queue the block behind those that were cached under the same key before."""
        self._duplicates.setdefault(key, []).append(block)

    def hit(self, block: int, key: Key) -> None:
        """No effect: the past does not matter."""

    def rank(self, block: int, key: Key) -> int:
        """Minus the number of the next request that will use the block."""
        duplicates = self._duplicates[key]
        while self._keys[duplicates[0]] != key:
            duplicates.pop(0)
        return -self._future.next_use(key) if duplicates[0] == block else -NEVER
