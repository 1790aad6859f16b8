"""A second tier in host memory, for blocks that the cache evicts and for the blocks of preempted sequences."""

from __future__ import annotations

from collections import OrderedDict

from policies.content import Key
from policies.vocabulary import Transfer


class HostTier:
    """Slots for blocks: evicted blocks leave in LRU order, those of swapped sequences stay until they are released."""

    def __init__(self, n_blocks: int):
        self.n = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._evicted: OrderedDict[Key, int] = OrderedDict()
        """Slots of evicted blocks by key, the least recently used first."""

    @property
    def used(self) -> int:
        """Number of slots that hold a block."""
        return self.n - len(self._free)

    def keep(self, key: Key) -> int | None:
        """A slot to copy an evicted block to; None where it is there already, or swapped sequences fill the tier."""
        if key in self._evicted:
            self._evicted.move_to_end(key)
            return None
        slots = self.hold(1)
        if slots is None:
            return None
        self._evicted[key] = slots[0]
        return slots[0]

    def find(self, key: Key) -> int | None:
        """The slot of an evicted block, or None."""
        return self._evicted.get(key)

    def pin(self, keys: list[Key]) -> list[int]:
        """The slots of evicted blocks that are there; they will not be reused before ``unpin``."""
        return [self._evicted.pop(key) for key in keys]

    def unpin(self, keys: list[Key], slots: list[int]) -> None:
        """Let pinned slots be reused again, as the most recently used; the last of them before the others."""
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            if key in self._evicted:
                self._free.append(slot)
            else:
                self._evicted[key] = slot

    def hold(self, n: int) -> list[int] | None:
        """Take ``n`` slots for a swapped sequence, forgetting evicted blocks; None where there are too few."""
        if len(self._free) + len(self._evicted) < n:
            return None
        while len(self._free) < n:
            self._free.append(self._evicted.popitem(last=False)[1])
        return [self._free.pop() for _ in range(n)]

    def release(self, slots: list[int]) -> None:
        """Return the slots of a swapped sequence."""
        self._free.extend(reversed(slots))


class TransferLog:
    """Copies between the cache and the host tier that an engine has yet to make, in order."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._runs: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, block: int, slot: int, *, to_host: bool) -> None:
        """Note the copy of one block; it is merged with the last one if it continues that in both tiers."""
        size = self._block_size
        cell, host = block * size, slot * size
        if self._runs:
            last = self._runs[-1]
            if last.to_host == to_host and (last.cell + last.n, last.host + last.n) == (cell, host):
                self._runs[-1] = last._replace(n=last.n + size)
                return
        self._runs.append(Transfer(to_host, cell, host, size))

    def settle(self) -> tuple[Transfer, ...]:
        """Hand over all copies, which are then no longer due."""
        runs, self._runs = tuple(self._runs), []
        return runs
