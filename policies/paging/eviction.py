"""Which free block is handed out next: the order of free blocks, and with it what a prefix cache forgets first.

A free block is *plain*, or *cached*: it still holds a prefix that may be asked for again. Plain ones always go first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, get_args

from policies.content import Key

Eviction = Literal["lru", "fifo", "lfu", "sieve", "belady"]
"""``lru``: the block released longest ago, as vLLM. ``fifo``: the one cached first. ``lfu``: the one hit least often,
the longest released among equals. ``sieve``: Zhang et al., "SIEVE is Simpler than LRU" (NSDI 2024). ``belady``: the one
whose next use is farthest in the future (Belady 1966); it must know that future. No order does better, but for a block
now and then where prompts end with a full block, which is computed anew although it is cached."""

EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

FreeOrder = Literal["0.33.0", "0.22.1"]
"""Where vLLM puts a plain block that is released: at the front, or (up to 0.22.1) at the back like all others."""

Keys = list[Key | None]
"""Of each block its key, None where it is plain; the pool's own list."""

NEVER = 1 << 62


class FreeBlocks(Protocol):
    """The free blocks in the order in which they will be handed out."""

    notes: bool
    """Whether it matters in which order blocks become cached ones, and are hit."""

    def __len__(self) -> int: ...

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` blocks, which must be there."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back, in this order."""
        ...

    def remove(self, block: int) -> None:
        """A cached block is in use again."""
        ...

    def forget(self, block: int) -> None:
        """A free block has become plain."""
        ...

    def stored(self, block: int, key: Key) -> None:
        """A block in use has become a cached one."""
        ...

    def hit(self, block: int, key: Key) -> None:
        """A cached block, free or not, has been asked for."""
        ...

    def order(self) -> list[int]:
        """All of them, the next victim first."""
        ...


class Lru:
    """vLLM's queue: plain blocks to the front (or, in the older order, to the back), cached ones to the back."""

    notes = False

    def __init__(self, blocks: Iterable[int], keys: Keys, *, plain_first: bool = True):
        self._queue = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._plain_first = plain_first

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, n: int) -> list[int]:
        """From the front."""
        pop = self._queue.popitem
        return [pop(False)[0] for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Plain ones so that the first of them is handed out next; the last cached one is handed out last."""
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
        """Out of the middle."""
        del self._queue[block]

    def forget(self, block: int) -> None:
        """It stays where it is."""

    def stored(self, block: int, key: Key) -> None:
        """Nothing to note."""

    def hit(self, block: int, key: Key) -> None:
        """Nothing to note: only a release reorders the queue."""

    def order(self) -> list[int]:
        """The queue."""
        return list(self._queue)


class _NeverCached:
    """What a cached block would be told of."""

    notes = False

    def remove(self, block: int) -> None:
        """There are no cached blocks."""
        raise AssertionError("no block is cached here")

    def forget(self, block: int) -> None:
        """There are no cached blocks."""

    def stored(self, block: int, key: Key) -> None:
        """There are no cached blocks."""

    def hit(self, block: int, key: Key) -> None:
        """There are no cached blocks."""


class Stack(_NeverCached):
    """Blocks that are never cached, the one released last handed out first: as ``Lru`` then has it."""

    def __init__(self, blocks: Iterable[int]):
        self._free = list(blocks)[::-1]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """From the top."""
        if n == 1:
            return [self._free.pop()]
        taken = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - n :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """So that the first of them is handed out next."""
        self._free += reversed(blocks)

    def order(self) -> list[int]:
        """From the top."""
        return self._free[::-1]


class LowestFirst(_NeverCached):
    """Always the lowest free block; for layouts without a prefix cache."""

    def __init__(self, blocks: Iterable[int]):
        self._free = list(blocks)
        heapq.heapify(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """The lowest."""
        return [heapq.heappop(self._free) for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """In any order."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def order(self) -> list[int]:
        """Ascending."""
        return sorted(self._free)


class Rank(Protocol):
    """How much a cached block is worth: the smallest rank is forgotten first."""

    def stored(self, block: int, key: Key) -> None:
        """The block has become a cached one."""
        ...

    def hit(self, block: int, key: Key) -> None:
        """The block has been asked for."""
        ...

    def of(self, block: int, key: Key) -> int:
        """Its worth, when it is released."""
        ...


class Birth:
    """By when it was cached (FIFO)."""

    def __init__(self) -> None:
        self._clock = 0
        self._born: dict[int, int] = {}

    def stored(self, block: int, key: Key) -> None:
        """Born now."""
        self._clock += 1
        self._born[block] = self._clock

    def hit(self, block: int, key: Key) -> None:
        """Makes it no younger."""

    def of(self, block: int, key: Key) -> int:
        """When it was cached."""
        return self._born[block]


class Uses:
    """By how often it was asked for since it was cached (LFU)."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def stored(self, block: int, key: Key) -> None:
        """Used for the first time."""
        self._uses[block] = 1

    def hit(self, block: int, key: Key) -> None:
        """Once more."""
        self._uses[block] += 1

    def of(self, block: int, key: Key) -> int:
        """Uses."""
        return self._uses[block]


class Future:
    """When each block will be asked for: what clairvoyant eviction must know. Times are numbers of requests."""

    def __init__(self, requests: Iterable[Sequence[Key]]):
        self.now = -1
        """The last request that has been served, or is being."""
        self._uses: dict[Key, list[int]] = {}
        for number, keys in enumerate(requests):
            for key in keys:
                self._uses.setdefault(key, []).append(number)

    def advance(self, request: int) -> None:
        """Time has come to this request."""
        self.now = max(self.now, request)

    def next_use(self, key: Key) -> int:
        """The next request that will ask for the block, or ``NEVER``."""
        uses = self._uses.get(key, ())
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER


class NextUse:
    """By how soon it will be asked for (Belady); a copy of a block that is found in its stead never will."""

    def __init__(self, future: Future, keys: Keys):
        self._future = future
        self._keys = keys
        self._copies: dict[Key, list[int]] = {}
        """The blocks that were cached under a key, in order; the first that still is will be found."""

    def stored(self, block: int, key: Key) -> None:
        """Behind those that were cached before."""
        self._copies.setdefault(key, []).append(block)

    def hit(self, block: int, key: Key) -> None:
        """The past does not matter."""

    def of(self, block: int, key: Key) -> int:
        """The sooner, the more."""
        copies = self._copies[key]
        while self._keys[copies[0]] != key:
            copies.pop(0)
        return -self._future.next_use(key) if copies[0] == block else -NEVER


class Ranked:
    """Cached blocks by rank; among equals the one released longest ago, so that a chain loses its tail first."""

    notes = True

    def __init__(self, blocks: Iterable[int], keys: Keys, rank: Rank):
        self._plain = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._rank = rank
        self._heap: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}
        """Of each free cached block its entry in the heap; other entries there are stale."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._entries)

    def take(self, n: int) -> list[int]:
        """Plain ones, then those of least rank."""
        taken = []
        for _ in range(n):
            if self._plain:
                taken.append(self._plain.popitem(last=False)[0])
                continue
            entry = heapq.heappop(self._heap)
            while self._entries.get(entry[2]) is not entry:
                entry = heapq.heappop(self._heap)
            del self._entries[entry[2]]
            taken.append(entry[2])
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Each by its rank at this moment."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                self.forget(block)
            else:
                self._clock += 1
                entry = (self._rank.of(block, key), self._clock, block)
                self._entries[block] = entry
                heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Its entry in the heap is stale from now on."""
        del self._entries[block]

    def forget(self, block: int) -> None:
        """To the front of the plain ones."""
        self._entries.pop(block, None)
        self._plain[block] = None
        self._plain.move_to_end(block, last=False)

    def stored(self, block: int, key: Key) -> None:
        """For the rank."""
        self._rank.stored(block, key)

    def hit(self, block: int, key: Key) -> None:
        """For the rank."""
        self._rank.hit(block, key)

    def order(self) -> list[int]:
        """Plain ones, then by rank."""
        return [*self._plain, *(block for _, _, block in sorted(self._entries.values()))]


class Sieve:
    """A queue by age and a hand that goes from the oldest to the newest, sparing once what was hit since.

    Blocks in use keep their place, and the hand passes over them.
    """

    notes = True

    def __init__(self, blocks: Iterable[int], keys: Keys):
        self._plain = OrderedDict.fromkeys(blocks)
        self._keys = keys
        self._free: set[int] = set()
        """Cached and not in use."""
        self._end = len(keys)
        """A sentinel: it follows the newest and comes before the oldest."""
        self._newer = list(range(len(keys) + 1))
        self._older = list(range(len(keys) + 1))
        self._hit = bytearray(len(keys) + 1)
        self._hand = self._end

    def __len__(self) -> int:
        return len(self._plain) + len(self._free)

    def take(self, n: int) -> list[int]:
        """Plain ones, then whatever the hand finds that was not hit since it last came by."""
        taken = []
        for _ in range(n):
            taken.append(self._plain.popitem(last=False)[0] if self._plain else self._sift())
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Cached blocks have kept their place."""
        for block in blocks:
            if self._keys[block] is None:
                self._plain[block] = None
                self._plain.move_to_end(block, last=False)
            else:
                self._free.add(block)

    def remove(self, block: int) -> None:
        """It keeps its place."""
        self._free.discard(block)

    def forget(self, block: int) -> None:
        """To the front of the plain ones."""
        self._free.discard(block)
        self._unlink(block)
        self.release((block,))

    def stored(self, block: int, key: Key) -> None:
        """The newest."""
        if self._linked(block):
            self._unlink(block)
        newest = self._older[self._end]
        self._newer[newest], self._older[block] = block, newest
        self._newer[block], self._older[self._end] = self._end, block
        self._hit[block] = 0

    def hit(self, block: int, key: Key) -> None:
        """The hand will spare it once."""
        self._hit[block] = 1

    def order(self) -> list[int]:
        """Plain ones, then those that the hand comes to, the spared ones last."""
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


def free_blocks(
    eviction: Eviction, blocks: Iterable[int], keys: Keys, *, order: FreeOrder = "0.33.0", future: Future | None = None
) -> FreeBlocks:
    """The free blocks under an eviction policy. Raises ``ValueError`` where it is not told a future it must know."""
    if eviction == "lru":
        return Lru(blocks, keys, plain_first=order == "0.33.0")
    if eviction == "sieve":
        return Sieve(blocks, keys)
    if eviction == "belady" and future is None:
        raise ValueError("eviction 'belady' must know which requests will come; no workload was given")
    ranks: dict[str, Callable[[], Rank]] = {"fifo": Birth, "lfu": Uses}
    rank = NextUse(future, keys) if future is not None and eviction == "belady" else ranks[eviction]()
    return Ranked(blocks, keys, rank)
