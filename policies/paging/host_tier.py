"""A second tier in host memory: room for blocks that the cache evicts or that a preempted sequence leaves behind."""

from __future__ import annotations

from collections import OrderedDict

from policies.content import Key
from policies.vocabulary import Transfer


class HostTier:
    """Slots for blocks. Evicted ones are kept least recently used first; swapped ones stay until they are released."""

    def __init__(self, n_blocks: int):
        self.n = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._kept: OrderedDict[Key, int] = OrderedDict()

    @property
    def used(self) -> int:
        """Slots that hold a block."""
        return self.n - len(self._free)

    def keep(self, key: Key) -> int | None:
        """A slot for an evicted block; None where it is there already, or everything else is swapped."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return None
        slots = self.hold(1)
        if slots is None:
            return None
        self._kept[key] = slots[0]
        return slots[0]

    def find(self, key: Key) -> int | None:
        """The slot of a block that was kept."""
        return self._kept.get(key)

    def pin(self, keys: list[Key]) -> list[int]:
        """The slots of blocks that are there, and are not to be given up before ``unpin``."""
        return [self._kept.pop(key) for key in keys]

    def unpin(self, keys: list[Key], slots: list[int]) -> None:
        """They may be given up again, after all others and the last of them first."""
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            if key in self._kept:
                self._free.append(slot)
            else:
                self._kept[key] = slot

    def hold(self, n: int) -> list[int] | None:
        """``n`` slots for swapped blocks, at the cost of kept ones; None where there is no room."""
        if len(self._free) + len(self._kept) < n:
            return None
        while len(self._free) < n:
            self._free.append(self._kept.popitem(last=False)[1])
        return [self._free.pop() for _ in range(n)]

    def release(self, slots: list[int]) -> None:
        """Swapped blocks are back, or their sequence has ended."""
        self._free.extend(reversed(slots))


class TransferLog:
    """Copies between the tiers that an engine has yet to make, in order."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._runs: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, block: int, slot: int, *, to_host: bool) -> None:
        """One whole block; blocks that are neighbours on both sides make one run."""
        size = self._block_size
        cell, host = block * size, slot * size
        if self._runs:
            last = self._runs[-1]
            if last.to_host == to_host and (last.cell + last.n, last.host + last.n) == (cell, host):
                self._runs[-1] = last._replace(n=last.n + size)
                return
        self._runs.append(Transfer(to_host, cell, host, size))

    def settle(self) -> tuple[Transfer, ...]:
        """All that is owed, which is then owed no more."""
        runs, self._runs = tuple(self._runs), []
        return runs
