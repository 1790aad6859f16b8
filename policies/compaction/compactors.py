"""Compactors: which moves tidy an arena. A compactor plans; ``Arena.compact`` and the engine carry the moves out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from policies.cells.arena import Arena
from policies.cells.ordering import in_safe_order
from policies.compaction.packing import Pieces
from policies.vocabulary import NO_MOVES, Moves


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
    that moves fewest cells is taken. Each cell moves at most once, except in cycles, of which one run is moved aside
    first.
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
    return arena.free.count_below(arena.used)
