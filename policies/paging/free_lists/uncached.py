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


_Place = tuple[int, int]
"""A slot, and the number of a page in its range of addresses."""


class ParkedPages(Uncached):
    """Hands out first what is still mapped just there, then pages that are mapped nowhere, then the longest parked.

    A block is a page of all layers. Pages of a sequence are released from its end, so that those of a slot are taken
    away from the end of its range.
    """

    def __init__(self, blocks: Iterable[int]):
        self._unmapped = list(blocks)[::-1]
        """Pages that were never mapped, the next one last."""
        self._place: dict[int, _Place] = {}
        """Where each page is mapped, in use or not."""
        self._parked: dict[_Place, int] = {}
        """The free pages that are mapped, by their place, the longest parked first."""
        self._slot = self._at = 0
        self._ahead = False
        self.due = 0
        """Pages that were mapped since the last ``settle`` while the sequence waited for them."""
        self.n_mapped = 0
        """Pages mapped so far."""
        self.n_found = 0
        """Pages so far that were found mapped in the slot that needed them."""

    def __len__(self) -> int:
        return len(self._unmapped) + len(self._parked)

    def turn_to(self, slot: int, at: int, *, ahead: bool) -> None:
        """Say for whom the next pages are: those of a slot from number ``at`` on.

        ``ahead``: the first of them is mapped while the step before is computed.
        """
        self._slot, self._at, self._ahead = slot, at, ahead

    def take(self, n: int) -> list[int]:
        """Hand out ``n`` pages for where ``turn_to`` said, and go on behind them."""
        taken, slot, at, parked = list[int](), self._slot, self._at, self._parked
        for number in range(at, at + n):
            place = slot, number
            page = parked.pop(place, -1)
            if page >= 0:
                self.n_found += 1
            else:
                page = self._unmapped.pop() if self._unmapped else parked.pop(next(iter(parked)))
                self._place[page] = place
                self.n_mapped += 1
                self.due += not (self._ahead and number == at)
            taken.append(page)
        self._at, self._ahead = at + n, False
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take pages back, which stay mapped where they are."""
        for page in blocks:
            self._parked[self._place[page]] = page

    def settle(self) -> int:
        """Pages that were mapped since the last call while their sequences waited."""
        due, self.due = self.due, 0
        return due

    def order(self) -> list[int]:
        """All free pages, in the order in which a slot without parked ones would get them."""
        return [*self._unmapped[::-1], *self._parked.values()]
