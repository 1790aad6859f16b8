"""The blocks of sequences that give up single tokens: a block is free again only when all its tokens have gone."""

from __future__ import annotations

import numpy as np

from policies.compaction.threshold import fragmentation
from policies.paging.blocks import BlockPool
from policies.paging.free_lists.uncached import FreeStack
from policies.paging.growth import blocks_for
from policies.vocabulary import NO_MOVES, IntArray, Moves, Usage, View

_NO_CELLS: IntArray = np.zeros(0, dtype=np.int64)


class HeldTokens:
    """What one sequence holds in one group of layers."""

    __slots__ = ("blocks", "cells", "empty", "positions", "reserved")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        """In the order in which they were taken."""
        self.positions = _NO_CELLS
        """Ascending; shape (tokens,)."""
        self.cells = _NO_CELLS
        """The cell of each of them; shape (tokens,)."""
        self.empty = _NO_CELLS
        """Cells of its blocks that its next tokens may go to, in order, unless holes are refilled."""
        self.reserved = 0
        """Tokens that room was set aside for, and that are not written yet."""


class TokenBlocks:
    """The pool of one group of layers, and which cells of which blocks each sequence's tokens lie in."""

    def __init__(self, n_blocks: int, size: int, *, refill: bool):
        """``refill``: new tokens go to the cells of evicted ones, in the fullest block first, before any new block."""
        self.size = size
        self.pool = BlockPool(n_blocks, lambda blocks, _: FreeStack(blocks), first=1)
        self.held: dict[int, HeldTokens] = {}
        self.stored = 0
        """Tokens of all sequences."""
        self._refill = refill
        self._tokens = np.zeros(n_blocks, dtype=np.int64)
        """Tokens in each block."""
        self._used = np.zeros(n_blocks * size, dtype=np.bool_)
        """Whether each cell holds a token."""
        self._unwritten = np.zeros(n_blocks * size, dtype=np.bool_)
        """Whether each cell of a sequence's blocks is behind all that its block has ever held: no kernel reads it."""

    def of(self, seq: int) -> HeldTokens:
        """What a sequence holds; nothing, if it is new."""
        found = self.held.get(seq)
        if found is None:
            found = self.held[seq] = HeldTokens()
        return found

    def missing(self, seq: int, tokens: int) -> int:
        """Blocks that a sequence must be given before ``tokens`` more tokens can be written."""
        found = self.held.get(seq)
        return blocks_for(max(tokens - (0 if found is None else len(found.empty)), 0), self.size)

    def reserve(self, seq: int, tokens: int) -> None:
        """Give a sequence the blocks that are missing for its next tokens; enough must be free."""
        own, more = self.of(seq), self.missing(seq, tokens)
        own.reserved = tokens
        if more:
            blocks = self.pool.take(more)
            own.blocks += blocks
            cells = self._cells_of(np.array(blocks))
            own.empty = np.concatenate((own.empty, cells))
            self._unwritten[cells] = True

    def write(self, seq: int, start: int, n: int) -> IntArray:
        """Place tokens of positions ``[start, start + n)``, for which there is room; returns their cells."""
        own = self.held[seq]
        cells = self._next_cells(own, n)
        own.positions = np.concatenate((own.positions, np.arange(start, start + n)))
        own.cells = np.concatenate((own.cells, cells))
        own.reserved = max(own.reserved - n, 0)
        self._used[cells], self._unwritten[cells] = True, False
        self._count(cells, 1)
        return cells

    def _next_cells(self, own: HeldTokens, n: int) -> IntArray:
        empty = own.empty
        if self._refill and n < len(empty):
            order = (-self._tokens[empty // self.size]).argsort(kind="stable")
            cells, own.empty = empty[order[:n]], empty[np.sort(order[n:])]
        else:
            cells, own.empty = empty[:n], empty[n:]
        return cells

    def evict(self, seq: int, which: IntArray) -> None:
        """Empty the cells of the tokens with these indices, and free the blocks that hold none any more."""
        own = self.held[seq]
        keep = np.ones(len(own.cells), dtype=np.bool_)
        keep[which] = False
        gone = own.cells[which]
        own.cells, own.positions = own.cells[keep], own.positions[keep]
        self._used[gone] = False
        self._count(gone, -1)
        if self._refill:
            own.empty = np.concatenate((own.empty, gone))
        touched = gone // self.size
        touched = touched[self._tokens[touched] == 0]
        if len(touched):
            self._free(own, np.unique(touched))

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence that has lost none, and what its last block has room for."""
        own = self.held[seq]
        gone = own.cells[n:]
        own.cells, own.positions, own.reserved = own.cells[:n], own.positions[:n], 0
        self._used[gone] = False
        self._count(gone, -1)
        keep = blocks_for(n, self.size)
        blocks, own.blocks = own.blocks[keep:], own.blocks[:keep]
        own.empty = self._cells_of(np.array(own.blocks, dtype=np.int64))[n:]
        self._unwritten[own.empty] = True
        self.pool.release(blocks[::-1])

    def release(self, seq: int) -> None:
        """Give up all that a sequence holds."""
        own = self.held.pop(seq, None)
        if own is not None:
            self._used[own.cells] = False
            self._count(own.cells, -1)
            self.pool.release(own.blocks[::-1])

    # Compaction

    def fragmentation(self, seq: int) -> float:
        """Share of the cells which attention reads of a sequence that hold no token."""
        read = self.cells_read(seq)
        return fragmentation(len(self.held[seq].cells), read) if read else 0.0

    def excess_blocks(self, seq: int, more: int = 0) -> int:
        """Blocks that compacting a sequence would free, if it has to have room for ``more`` tokens."""
        own = self.held[seq]
        return len(own.blocks) - blocks_for(len(own.cells) + max(own.reserved, more), self.size)

    def compact(self, seq: int, more: int = 0) -> Moves:
        """Copy the tokens of a sequence's emptiest blocks into the holes of its fullest, if that frees a block.

        Fewest cells move that way. No run overlaps another, so that any order is safe. ``more``: leave room for so
        many further tokens.
        """
        own = self.held[seq]
        excess = self.excess_blocks(seq, more)
        if excess <= 0:
            return NO_MOVES
        blocks = np.array(own.blocks)
        by_tokens = (-self._tokens[blocks]).argsort(kind="stable")
        kept, gone = blocks[by_tokens[:-excess]], blocks[by_tokens[-excess:]]
        room = self._cells_of(kept)
        filled = np.zeros(len(self._used), dtype=np.bool_)
        filled[room[: len(own.cells)]] = True
        moving = np.flatnonzero(~filled[own.cells])
        moving = moving[own.cells[moving].argsort()]
        src, dst = own.cells[moving], np.flatnonzero(filled & ~self._used)
        own.cells = own.cells.copy()
        own.cells[moving] = dst
        self._used[src], self._used[dst] = False, True
        self._count(src, -1)
        self._count(dst, 1)
        own.blocks, own.empty = kept.tolist(), room[len(own.cells) :]
        self._unwritten[own.empty] = True
        self.pool.release(gone.tolist()[::-1])
        return _runs(src, dst)

    # Looking in

    def cells_read(self, seq: int) -> int:
        """Cells that a kernel reads which goes through a sequence's blocks: its tokens, and the holes among them."""
        own = self.held[seq]
        return len(own.blocks) * self.size - self._n_unwritten(own)

    def blocks_read(self, seq: int) -> int:
        """Blocks in which these cells lie."""
        own = self.held[seq]
        return len(own.blocks) - self._n_unwritten(own) // self.size

    def view(self, seq: int) -> View:
        """The cells that hold a token of a sequence, in order of position."""
        own = self.held[seq]
        return View(own.cells, own.positions)

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token; 0 if there is none."""
        filled = self._tokens.nonzero()[0]
        if not len(filled):
            return 0
        first = int(filled[-1]) * self.size
        return first + int(self._used[first : first + self.size].nonzero()[0][-1]) + 1

    def usage(self, capacity: int) -> Usage:
        """How full the pool is; any free block serves any sequence."""
        extents = self.pool.keep_extents()
        free, largest = extents.n_free * self.size, extents.largest * self.size
        return Usage(capacity, self.stored, capacity - free, free, extents.count, largest, self.top)

    # Helpers

    def _n_unwritten(self, own: HeldTokens) -> int:
        """Cells that are behind all that their blocks have held: of one block a part, of others all."""
        return int(np.count_nonzero(self._unwritten[own.empty])) if len(own.empty) else 0

    def _cells_of(self, blocks: IntArray) -> IntArray:
        cells: IntArray = (blocks[:, None] * self.size + np.arange(self.size)).reshape(-1)
        return cells

    def _count(self, cells: IntArray, each: int) -> None:
        """Count tokens that come or go, ``each`` in each of these cells."""
        self.stored += each * len(cells)
        if len(cells) == 1:
            self._tokens[cells[0] // self.size] += each
        elif len(cells):
            self._tokens += each * np.bincount(cells // self.size, minlength=len(self._tokens))

    def _free(self, own: HeldTokens, blocks: IntArray) -> None:
        gone = set(blocks.tolist())
        own.blocks = [block for block in own.blocks if block not in gone]
        own.empty = own.empty[~np.isin(own.empty // self.size, blocks)]
        self.pool.release(blocks.tolist())


def _runs(src: IntArray, dst: IntArray) -> Moves:
    """Single cells joined where both sides go on; both of shape (cells,)."""
    if not len(src):
        return NO_MOVES
    first = np.flatnonzero(np.concatenate(([True], (np.diff(src) != 1) | (np.diff(dst) != 1))))
    return Moves(src[first], dst[first], np.diff(first, append=len(src)))
