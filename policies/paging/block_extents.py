"""Free extents of a pool of blocks, kept as blocks are taken and given back: how many there are, and the largest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_NEAR = 12
"""How many blocks are looked at on either side for the end of an extent before it is searched for."""

_RENEWAL = 1.0
"""How often each block must on average have been taken or given back before lengths that are kept are dropped."""


class BlockExtents:
    """Which blocks are free, and what extents they form.

    While one extent has most of the free blocks, none can be larger; only otherwise are the lengths of all kept.
    """

    def __init__(self, n: int, free: Iterable[int]):
        """``free``: the blocks below ``n`` that are free."""
        self._map = _FreeMap(n)
        self.n_free = 0
        """Number of free blocks."""
        self.count = 0
        """Number of free extents."""
        self._lengths: _ExtentLengths | None = None
        """The lengths of all extents; None while one of them has most of the free blocks."""
        self._largest = -1
        """Blocks in the largest extent when it was last looked for; -1 if it may have changed since."""
        self._inside = n - 1
        """A block in that extent, where lengths are not kept."""
        self._lowest = -1
        """That extent has changed only if this block or a higher one has."""
        self.give_back(list(free))

    def take(self, blocks: list[int]) -> None:
        """These blocks are no longer free."""
        if not blocks:
            return
        if max(blocks) >= self._lowest:
            self._largest = -1
        self.n_free -= len(blocks)
        joints = self._map.take(blocks) if self._lengths is None else self._lengths.take(blocks)
        self.count += joints - len(blocks)

    def take_one(self, block: int) -> None:
        """The block is no longer free."""
        free_map = self._map
        if self._lengths is not None or len(free_map.changed) > free_map.n:
            self.take([block])
            return
        if block >= self._lowest:
            self._largest = -1
        free = free_map.free
        free[block] = 0
        free_map.changed.append(block)
        self.n_free -= 1
        self.count += free[block - 1] + free[block + 1] - 1

    def give_back(self, blocks: list[int]) -> None:
        """These blocks are free from now on."""
        if not blocks:
            return
        if max(blocks) >= self._lowest:
            self._largest = -1
        self.n_free += len(blocks)
        joints = self._map.give_back(blocks) if self._lengths is None else self._lengths.give_back(blocks)
        self.count += len(blocks) - joints

    @property
    def largest(self) -> int:
        """Blocks in the largest free extent; 0 if there is none."""
        if self._lengths is None and 2 * self._largest < self.n_free:
            self._look_inside()
        if self._lengths is not None and self._largest < 0:
            self._look_through_lengths(self._lengths)
        return self._largest

    def used_below(self, block: int) -> int:
        """The highest block below this one that is not free; 0 if there is none."""
        return max(self._map.start(block) - 1, 0)

    def _look_inside(self) -> None:
        """See whether the extent that was the largest is so still; if that is not sure, keep the lengths of all."""
        block, found = self._inside, 0
        if self._map.free[block]:
            start = self._map.start(block)
            found, self._lowest = self._map.end(block) - start, start - 1
        self._largest = found
        if 2 * found < self.n_free:
            self._largest, self._lowest, self._lengths = -1, -1, _ExtentLengths(self._map)

    def _look_through_lengths(self, lengths: _ExtentLengths) -> None:
        """Find the greatest length; where its extent has most of what is free, the others need not be kept."""
        self._largest = lengths.largest
        if 2 * self._largest >= self.n_free and lengths.n_changed >= _RENEWAL * self._map.n:
            start = self._map.first(self._largest)
            self._inside, self._lowest, self._lengths = start + self._largest - 1, start - 1, None


class _FreeMap:
    """Which blocks are free: a list, which is quick by element, and its bytes, which are quick to search."""

    def __init__(self, n: int):
        self.n = n
        # A used block behind the last one is also the one before block 0, whose neighbour has the index -1.
        self.free = [0] * (n + 1)
        """1 for each block that is free, 0 for all others."""
        self.changed: list[int] = []
        """Blocks that have been taken or given back since the last search."""
        self._bytes = bytearray(n + 1)

    def take(self, blocks: list[int]) -> int:
        """These blocks are no longer free; returns how many pairs of neighbours were so."""
        free, joints = self.free, 0
        for block in blocks:
            free[block] = 0
            joints += free[block - 1] + free[block + 1]
        self._note(blocks)
        return joints

    def give_back(self, blocks: list[int]) -> int:
        """These blocks are free; returns how many more pairs of neighbours are so."""
        free, joints = self.free, 0
        for block in blocks:
            joints += free[block - 1] + free[block + 1]
            free[block] = 1
        self._note(blocks)
        return joints

    def start(self, block: int) -> int:
        """The first block of the free extent that reaches up to ``block``; itself if the block below is not free."""
        return self._searchable().rfind(0, 0, block) + 1

    def end(self, block: int) -> int:
        """One past the last block of the free extent that a block is in."""
        return self._searchable().find(0, block)

    def first(self, length: int) -> int:
        """The first extent of at least that length, which must exist."""
        return self._searchable().find(b"\1" * length)

    def extents(self) -> Iterator[tuple[int, int]]:
        """First block, and one past the last, of each free extent, in order."""
        found = self._searchable()
        start = found.find(1)
        while start >= 0:
            end = found.find(0, start)
            yield start, end
            start = found.find(1, end)

    def _note(self, blocks: list[int]) -> None:
        self.changed += blocks
        if len(self.changed) > len(self.free):
            self._bytes = bytearray(self.free)
            self.changed.clear()

    def _searchable(self) -> bytearray:
        found, free = self._bytes, self.free
        for block in self.changed:
            found[block] = free[block]
        self.changed.clear()
        return found


class _ExtentLengths:
    """The length of each free extent, noted at both of its ends, and how many have each length."""

    def __init__(self, free_map: _FreeMap):
        self._map = free_map
        n = len(free_map.free)
        self._length = [0] * n
        """Right for the first and the last block of each extent; of others it says nothing."""
        self._counts = [0] * n
        """Number of extents of each length, from 1."""
        self._occurs = bytearray(n)
        """For each length whether there is an extent of it."""
        self._most = n - 1
        """No extent is longer."""
        self.n_changed = 0
        """Blocks that have been taken or given back since."""
        for start, end in free_map.extents():
            length = end - start
            self._length[start] = self._length[end - 1] = length
            self._counts[length] += 1
            self._occurs[length] = 1

    def take(self, blocks: list[int]) -> int:
        """Cut blocks out of their extents; returns how many pairs of free neighbours there were."""
        free, changed, joints = self._map.free, self._map.changed, 0
        lengths, counts, occurs = self._length, self._counts, self._occurs
        self.n_changed += len(blocks)
        for block in blocks:
            below, above = free[block - 1], free[block + 1]
            if below and above:
                start = self._start(block)
                length = lengths[start]
                left = block - start
            else:
                length = lengths[block]
                left = length - 1 if below else 0
            free[block] = 0
            changed.append(block)
            joints += below + above
            counts[length] -= 1
            if not counts[length]:
                occurs[length] = 0
            if below:
                lengths[block - left] = lengths[block - 1] = left
                counts[left] += 1
                occurs[left] = 1
            if above:
                right = length - 1 - left
                lengths[block + 1] = lengths[block + right] = right
                counts[right] += 1
                occurs[right] = 1
        return joints

    def give_back(self, blocks: list[int]) -> int:
        """Join blocks to the extents beside them; returns how many more pairs of free neighbours there are."""
        free, changed, joints, most = self._map.free, self._map.changed, 0, self._most
        lengths, counts, occurs = self._length, self._counts, self._occurs
        self.n_changed += len(blocks)
        for block in blocks:
            left = right = 0
            if free[block - 1]:
                left = lengths[block - 1]
                joints += 1
                counts[left] -= 1
                if not counts[left]:
                    occurs[left] = 0
            if free[block + 1]:
                right = lengths[block + 1]
                joints += 1
                counts[right] -= 1
                if not counts[right]:
                    occurs[right] = 0
            free[block] = 1
            changed.append(block)
            length = left + right + 1
            lengths[block - left] = lengths[block + right] = length
            counts[length] += 1
            occurs[length] = 1
            if length > most:
                most = length
        self._most = most
        return joints

    def _start(self, block: int) -> int:
        """The first block of the extent that a block is inside of."""
        free, low, high = self._map.free, block - 1, block + 1
        while block - low < _NEAR:
            if not free[low - 1]:
                return low
            if not free[high + 1]:
                return high + 1 - self._length[high]
            low -= 1
            high += 1
        return self._map.start(block)

    @property
    def largest(self) -> int:
        """The longest of all; 0 if there is none."""
        self._most = max(self._occurs.rfind(1, 0, self._most + 1), 0)
        return self._most
