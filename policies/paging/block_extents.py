"""Free extents of a pool of blocks, kept as blocks are taken and given back: how many there are, and the largest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from policies.compiled import i32, i64, u8, vec

_SHIFT: Final[i64] = 6
"""So many neighbours, as a power of two, are counted together, so that a search passes over many at a time."""
_GROUP: Final[i64] = 64


class BlockExtents:
    """Which blocks are free, and what extents they form."""

    def __init__(self, n: int, free: Iterable[int]):
        """``free``: the blocks below ``n`` that are free."""
        self.n_free: i64 = 0
        """Number of free blocks."""
        self.count: i64 = 0
        """Number of free extents."""
        # Blocks are counted from 1 in here: a used one is before the first, and another behind the last.
        size: i64 = n + 2
        self._free = vec[u8]([0] * int(size))
        """1 for each block that is free, 0 for all others."""
        self._free_in_group = vec[i32]([0] * int((size >> _SHIFT) + 1))
        self._length = vec[i32]([0] * int(size))
        """Of each extent, at its first and its last block; of other blocks it says nothing."""
        self._of_length = vec[i32]([0] * int(size))
        """Number of extents of each length, from 1."""
        self._in_group = vec[i32]([0] * int((size >> _SHIFT) + 1))
        """Number of extents of the lengths of each group."""
        self._most: i64 = 0
        """No extent is longer."""
        self.give_back(list(free))

    def take(self, blocks: list[int]) -> None:
        """These blocks are no longer free."""
        free, lengths, numbers, in_group = self._free, self._length, self._of_length, self._in_group
        self.n_free -= len(blocks)
        for block in blocks:
            at: i64 = block + 1
            below, above = free[at - 1] > 0, free[at + 1] > 0
            length: i64 = i64(lengths[at])
            left: i64 = 0
            if below and above:
                left = at - self._start(at)
                length = i64(lengths[at - left])
            elif below:
                left = length - 1
            free[at] = 0
            self._free_in_group[at >> _SHIFT] -= 1
            numbers[length] -= 1
            in_group[length >> _SHIFT] -= 1
            self.count -= 1
            if below:
                lengths[at - left] = lengths[at - 1] = i32(left)
                numbers[left] += 1
                in_group[left >> _SHIFT] += 1
                self.count += 1
            if above:
                right = length - 1 - left
                lengths[at + 1] = lengths[at + right] = i32(right)
                numbers[right] += 1
                in_group[right >> _SHIFT] += 1
                self.count += 1

    def give_back(self, blocks: list[int]) -> None:
        """These blocks are free from now on."""
        free, lengths, numbers, in_group = self._free, self._length, self._of_length, self._in_group
        self.n_free += len(blocks)
        for block in blocks:
            at: i64 = block + 1
            left: i64 = 0
            right: i64 = 0
            self.count += 1
            if free[at - 1] > 0:
                left = i64(lengths[at - 1])
                numbers[left] -= 1
                in_group[left >> _SHIFT] -= 1
                self.count -= 1
            if free[at + 1] > 0:
                right = i64(lengths[at + 1])
                numbers[right] -= 1
                in_group[right >> _SHIFT] -= 1
                self.count -= 1
            free[at] = 1
            self._free_in_group[at >> _SHIFT] += 1
            length = left + right + 1
            lengths[at - left] = lengths[at + right] = i32(length)
            numbers[length] += 1
            in_group[length >> _SHIFT] += 1
            if length > self._most:
                self._most = length

    @property
    def largest(self) -> int:
        """Blocks in the largest free extent; 0 if there is none."""
        most, numbers, in_group = self._most, self._of_length, self._in_group
        while most > 0 and numbers[most] == 0:
            most = most - 1 if in_group[most >> _SHIFT] > 0 else (most >> _SHIFT << _SHIFT) - 1
        self._most = most = max(most, 0)
        return int(most)

    def used_below(self, block: int) -> int:
        """The highest block below this one that is not free; 0 if there is none."""
        at: i64 = block + 1
        if self._free[at] > 0:
            at = self._start(at)
        elif self._free[at - 1] > 0:
            at -= i64(self._length[at - 1])
        return int(at - 2) if at > 1 else 0

    def _start(self, at: i64) -> i64:
        """The first block of the extent that a block is inside of."""
        free, in_group = self._free, self._free_in_group
        while free[at - 1] > 0:
            at -= 1
            while at & (_GROUP - 1) == 0 and i64(in_group[(at >> _SHIFT) - 1]) == _GROUP:
                at -= _GROUP
        return at
