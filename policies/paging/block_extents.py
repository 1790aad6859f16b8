"""Free extents of a pool of blocks, kept as blocks are taken and given back: how many there are, and the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_MANY = 1024
"""Free blocks from which on it pays to look for one extent that has most of them."""


class BlockExtents:
    """Which blocks are free, and what extents they form.

    While one extent has most of the free blocks, none can be larger; only otherwise are the lengths of all kept.
    """

    def __init__(self, n: int, free: Iterable[int]):
        """``free``: the blocks below ``n`` that are free."""
        # A used block behind the last one is also the one before block 0, whose neighbour has the index -1.
        self._free = bytearray(n + 1)
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

    def take(self, blocks: Sequence[int]) -> None:
        """These blocks are no longer free."""
        if not blocks:
            return
        if self._lengths is not None:
            self._lengths.take(blocks)
        if max(blocks) >= self._lowest:
            self._largest = -1
        free, joints = self._free, 0
        for block in blocks:
            joints += free[block - 1] + free[block + 1]
            free[block] = 0
        self.count += joints - len(blocks)
        self.n_free -= len(blocks)

    def take_one(self, block: int) -> None:
        """The block is no longer free."""
        if self._lengths is not None:
            self._lengths.take((block,))
        if block >= self._lowest:
            self._largest = -1
        free = self._free
        free[block] = 0
        self.count += free[block - 1] + free[block + 1] - 1
        self.n_free -= 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """These blocks are free from now on."""
        if not blocks:
            return
        if self._lengths is not None:
            self._lengths.give_back(blocks)
        if max(blocks) >= self._lowest:
            self._largest = -1
        free, joints = self._free, 0
        for block in blocks:
            joints += free[block - 1] + free[block + 1]
            free[block] = 1
        self.count += len(blocks) - joints
        self.n_free += len(blocks)

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
        return max(self._free.rfind(0, 0, block), 0)

    def _look_inside(self) -> None:
        """See whether the extent that was the largest is so still; if that is not sure, keep the lengths of all."""
        free, block, found = self._free, self._inside, 0
        if free[block]:
            start = free.rfind(0, 0, block) + 1
            found, self._lowest = free.find(0, block) - start, start - 1
        self._largest = found
        if 2 * found < self.n_free:
            self._largest, self._lowest, self._lengths = -1, -1, _ExtentLengths(free)

    def _look_through_lengths(self, lengths: _ExtentLengths) -> None:
        """Find the greatest length; where its extent has nearly all that is free, the others need not be kept."""
        self._largest = lengths.largest
        if self.n_free >= _MANY and 4 * self._largest >= 3 * self.n_free:
            start = self._free.find(b"\1" * self._largest)
            self._inside, self._lowest, self._lengths = start + self._largest - 1, start - 1, None


class _ExtentLengths:
    """The length of each free extent, noted at both of its ends, and how many have each length."""

    def __init__(self, free: bytearray):
        """``free``: 1 for each free block, 0 for the others and behind the last."""
        self._free = bytearray(free)
        n = len(free)
        self._length = [0] * n
        """Right for the first and the last block of each extent; of others it says nothing."""
        self._counts = [0] * n
        """Number of extents of each length."""
        self._occurs = bytearray(n)
        """For each length whether there is an extent of it."""
        self._most = n - 1
        """No extent is longer."""
        edges = np.flatnonzero(np.diff(np.frombuffer(free, dtype=np.int8), prepend=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            self._add(start, end - 1, end - start)

    def take(self, blocks: Sequence[int]) -> None:
        """Cut these blocks out of their extents."""
        free, lengths, counts = self._free, self._length, self._counts
        for block in blocks:
            free[block] = 0
            if not free[block - 1]:
                length = lengths[block]
                left, right = 0, length - 1
            elif not free[block + 1]:
                length = lengths[block]
                left, right = length - 1, 0
            else:
                start = free.rfind(0, 0, block) + 1
                length = lengths[start]
                left = block - start
                right = length - 1 - left
            counts[length] -= 1
            if not counts[length]:
                self._occurs[length] = 0
            if left:
                self._add(block - left, block - 1, left)
            if right:
                self._add(block + 1, block + right, right)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Join these blocks to the extents beside them."""
        free, lengths, counts = self._free, self._length, self._counts
        for block in blocks:
            free[block] = 1
            left = lengths[block - 1] if free[block - 1] else 0
            right = lengths[block + 1] if free[block + 1] else 0
            for length in (left, right):
                if length:
                    counts[length] -= 1
                    if not counts[length]:
                        self._occurs[length] = 0
            length = left + right + 1
            self._add(block - left, block + right, length)
            if length > self._most:
                self._most = length

    @property
    def largest(self) -> int:
        """The longest of all; 0 if there is none."""
        self._most = max(self._occurs.rfind(1, 0, self._most + 1), 0)
        return self._most

    def _add(self, first: int, last: int, length: int) -> None:
        self._length[first] = self._length[last] = length
        self._counts[length] += 1
        if self._counts[length] == 1:
            self._occurs[length] = 1
