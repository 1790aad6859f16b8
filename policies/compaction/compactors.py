"""Compactors: which moves tidy an arena. A compactor plans; ``Arena.compact`` and the engine carry the moves out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from policies.cells.arena import Arena
from policies.cells.ordering import in_safe_order
from policies.vocabulary import NO_MOVES, IntArray, Moves


class Compactor(ABC):
    """Plans moves that tidy an arena; leaves the arena as it is."""

    @abstractmethod
    def __call__(self, arena: Arena) -> Moves:
        """The moves, in an order in which they can be carried out."""


@dataclass(frozen=True, slots=True)
class FillHoles(Compactor):
    """llama.cpp's defragmentation (see ``fill_holes``)."""

    most_runs: int
    """Runs that one pass may move."""

    def __call__(self, arena: Arena) -> Moves:
        """Fill the holes in the order of ``fill_holes``."""
        return fill_holes(arena, self.most_runs)


class Pack(Compactor):
    """Moves everything to the low end, each sequence contiguous and in order of position.

    The layout that llama.cpp issue 13497 asks for. Cells that several sequences share are packed once, as a
    sequence of their own. Four orders of the sequences are tried: by first cell, by middle cell, by the offset that
    leaves most of their cells in place, and the first of these with gaps filled by sequences from the end. The one
    that moves fewest cells is taken. Each cell moves once, or twice in a short run that is set aside first, so that
    longer ones stay whole and cycles end.
    """

    def __call__(self, arena: Arena) -> Moves:
        """No moves if the arena is packed, or if it is full and cells would have to move in cycles."""
        if is_packed(arena):
            return NO_MOVES
        return in_safe_order(Pieces(arena).fewest_moves(), arena.used, arena.size)


pack = Pack()


def fill_holes(arena: Arena, most_runs: int) -> Moves:
    """llama.cpp's defragmentation: cells from the end fill the holes below, as they come.

    ``llama_kv_cache_defrag_internal`` / ``build_defrag`` (b1618 to b6244). Each hole below the ``used``-th cell is
    filled by the last cells that have not been moved, in order; the pass ends when ``most_runs`` runs have been
    moved. Nothing is sorted: sequences end up scattered.
    """
    used = arena.used
    moving = np.flatnonzero(~arena.free.mask[used : arena.top]) + used
    if len(moving) == 0:
        return NO_MOVES
    starts, ends = arena.free.arrays(0, used)
    # Each hole takes a run or more.
    starts = starts[:most_runs]
    lengths = ends[:most_runs] - starts
    upto = np.cumsum(lengths)
    # For each cell of each hole, the cell that fills it, counted from the end of those that move.
    inside = np.arange(upto[-1]) - np.repeat(upto - lengths, lengths)
    source = moving[np.repeat(len(moving) - upto, lengths) + inside]
    target = np.repeat(starts, lengths) + inside
    first = np.concatenate(([0], np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1))
    runs = np.diff(first, append=len(source))[:most_runs]
    first = first[:most_runs]
    return Moves(source[first], target[first], runs)


def is_packed(arena: Arena) -> bool:
    """Whether no hole is below the highest used cell, and each sequence is contiguous and in order of position."""
    top = arena.top
    if arena.used < top or top == 0:
        return top == 0
    owner, position = arena.owner[:top], arena.position[:top]
    changes = owner[1:] != owner[:-1]
    borders = changes.nonzero()[0]
    if len(borders) >= len(arena.sets):
        return False
    first = {int(owner[0]) if top else 0, *owner[borders + 1].tolist()}
    return len(first) == len(borders) + 1 and not ((position[1:] < position[:-1]) > changes).any()


def min_cells_to_move(arena: Arena) -> int:
    """Fewest cells that packing must move: those at or above the ``used``-th, as many as are free below it."""
    return int(np.count_nonzero(arena.free.mask[: arena.used]))


class Pieces:
    """The pieces of an arena's sequences, sequence by sequence, each in order of position.

    Cells that several sequences share count as a sequence of their own.
    """

    def __init__(self, arena: Arena):
        """The arena holds at least one token."""
        sequences = arena.cells_by_set()
        self._lengths = [len(cells) for cells in sequences]
        """Tokens of each sequence."""
        self._cells = cells = np.concatenate(sequences)
        """The cell of each token, sequence by sequence."""
        self._firsts = firsts = np.array([0, *accumulate(self._lengths[:-1])])
        """Index of the first token of each sequence."""
        breaks = np.empty(len(cells), dtype=np.bool_)
        np.not_equal(cells[1:] - cells[:-1], 1, out=breaks[1:])
        breaks[firsts] = True
        at = breaks.nonzero()[0]
        self._start: IntArray = cells[at]
        """First cell of each piece."""
        self._length: IntArray = np.diff(at, append=len(cells))
        """Cells of each piece."""
        self._sequence: IntArray = firsts.searchsorted(at, side="right") - 1
        """The sequence of each piece, as an index."""
        self._inside: IntArray = at - firsts[self._sequence]
        """Tokens of the sequence before each piece."""
        self._offset: IntArray = self._start - self._inside
        """Where the sequence would begin if it were all in a row with each piece."""
        self._first_piece: IntArray = at.searchsorted(firsts)

    def fewest_moves(self) -> Moves:
        """The moves to the best of the orders, and as if all were carried out at once; none if all is in place."""
        lowest, orders = self._lowest_cells(), list[list[int]]()
        for rank in (lowest, self._middle_cells(), self._commonest_offsets()):
            orders.append(sorted(range(len(rank)), key=rank.__getitem__))
        orders.append(_filling_gaps(orders[0], lowest, self._lengths))
        best, fewest = self._offset, len(self._cells) + 1
        # Of few sequences several orders are often the same.
        for order in dict.fromkeys(map(tuple, orders)):
            offsets = self._begins(order)[self._sequence]
            moved = int(self._length[offsets != self._offset].sum())
            if moved < fewest:
                best, fewest = offsets, moved
        return self._moves_to(best)

    def _begins(self, order: Sequence[int]) -> IntArray:
        """The first cell of each sequence if they follow each other in an order."""
        begins = np.empty(len(order), dtype=np.int64)
        begins[list(order)] = [0, *accumulate([self._lengths[i] for i in order[:-1]])]
        return begins

    def _moves_to(self, offsets: IntArray) -> Moves:
        """The runs that change their place, ascending by where they go; ``offsets``: for each piece that it will have.

        Pieces that stay together are one run.
        """
        moving = (offsets != self._offset).nonzero()[0]
        if not len(moving):
            return NO_MOVES
        dst = (offsets + self._inside)[moving]
        order = dst.argsort()
        moving, dst = moving[order], dst[order]
        src, length = self._start[moving], self._length[moving]
        joins = (src[1:] == (src + length)[:-1]) & (dst[1:] == (dst + length)[:-1])
        first = np.concatenate(([0], (~joins).nonzero()[0] + 1))
        return Moves(src[first], dst[first], np.add.reduceat(length, first))

    def _lowest_cells(self) -> list[int]:
        """The lowest cell of each sequence."""
        lowest: list[int] = np.minimum.reduceat(self._start, self._first_piece).tolist()
        return lowest

    def _middle_cells(self) -> list[float]:
        """The median of each sequence's cells."""
        cells, firsts, lengths = self._cells, self._firsts, np.array(self._lengths)
        middles: list[float] = ((cells[firsts + (lengths - 1) // 2] + cells[firsts + lengths // 2]) / 2).tolist()
        descends = (self._start[1:] < self._start[:-1]) & (self._sequence[1:] == self._sequence[:-1])
        for i in set(self._sequence[1:][descends].tolist()):
            middles[i] = float(np.median(cells[firsts[i] : firsts[i] + lengths[i]]))
        return middles

    def _commonest_offsets(self) -> list[int]:
        """The commonest offset of each sequence's tokens; the smallest, if several are."""
        order = np.lexsort((self._offset, self._sequence))
        sequence, offset = self._sequence[order], self._offset[order]
        first = ((sequence[1:] != sequence[:-1]) | (offset[1:] != offset[:-1])).nonzero()[0] + 1
        first = np.concatenate(([0], first))
        sequence, offset, tokens = sequence[first], offset[first], np.add.reduceat(self._length[order], first)
        ranked = np.lexsort((offset, -tokens, sequence))
        best: list[int] = offset[ranked[sequence[ranked].searchsorted(np.arange(len(self._lengths)))]].tolist()
        return best


def _filling_gaps(order: Sequence[int], lowest: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The given order, but the last sequence that fits into a gap before the next one is placed there."""
    left, ordered, at = deque(order), list[int](), 0
    while left:
        gap = lowest[left[0]] - at
        fits = next((i for i in range(len(left) - 1, 0, -1) if lengths[left[i]] <= gap), 0)
        ordered.append(left[fits])
        del left[fits]
        at += lengths[ordered[-1]]
    return ordered
