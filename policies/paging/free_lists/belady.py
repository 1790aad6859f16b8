"""Clairvoyant eviction: the block whose next use is farthest in the future is forgotten first.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.content import Key
from policies.paging.free_lists.protocol import BlockKeys

NEVER = 1 << 62
"""The next use of a block that no request will ask for."""


class Future:
    """When each block will be asked for, in numbers of requests."""

    def __init__(self, requests: Iterable[tuple[int, Sequence[Key]]]):
        """``requests``: in the order expected, the number of each and the keys that it will look up."""
        self._place: dict[int, int] = {}
        """Which of all requests each one is expected to be, by its number."""
        self._started: set[int] = set()
        """Places of the requests that have started."""
        self._uses: dict[Key, list[int]] = {}
        """The places of the requests that will look a key up, the first one last."""
        for place, (number, keys) in enumerate(requests):
            self._place[number] = place
            for key in keys:
                self._uses.setdefault(key, []).append(place)
        for uses in self._uses.values():
            uses.reverse()

    def advance(self, request: int) -> None:
        """Note that a request has started, if it is one of those; others that were expected before may still come."""
        place = self._place.get(request)
        if place is not None:
            self._started.add(place)

    def next_use(self, key: Key) -> int:
        """The place of the next request that will ask for the block, or ``NEVER``."""
        uses = self._uses.get(key)
        while uses and uses[-1] in self._started:
            uses.pop()
        return uses[-1] if uses else NEVER


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
        """Minus the place of the next request that will use the block."""
        duplicates = self._duplicates[key]
        while self._keys[duplicates[0]] != key:
            duplicates.pop(0)
        return -self._future.next_use(key) if duplicates[0] == block else -NEVER
