"""The blocks of sequences that give up single tokens: a block is free again only when all its tokens have gone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.compaction.triggers import fragmentation
from policies.compiled import i64
from policies.paging.block_table import blocks_for
from policies.paging.blocks import BlockPool
from policies.paging.free_lists.uncached import FreeStack
from policies.vocabulary import NO_MOVES, IntArray, Moves, Usage


class HeldTokens:
    """What one sequence holds in one group of layers."""

    def __init__(self, size: int) -> None:
        """``size``: cells in a block."""
        self._size: i64 = size
        self.blocks: list[int] = []
        """In the order in which they were taken, or packed."""
        self.positions: list[int] = []
        """Of the tokens, ascending."""
        self.cells: list[int] = []
        """The cell of each token."""
        self.unwritten: i64 = 0
        """Cells of its blocks that are behind all that their block has ever held: no kernel reads them."""
        self.open: list[int] = []
        """Blocks with such cells, in the order in which they are filled."""
        self.holes: dict[int, list[tuple[int, int]]] = {}
        """Where holes are refilled: for each block with any, the turn in which each came, and its cell."""
        self.reserved: i64 = 0
        """Tokens that room was set aside for, and that are not written yet."""

    def take_hole(self, block: int, at: int = 0) -> int:
        """The cell of one of a block's holes, which is no longer listed."""
        holes = self.holes[block]
        _, cell = holes.pop(at)
        if not holes:
            del self.holes[block]
        return cell

    def cells_read(self) -> i64:
        """Cells that a kernel reads which goes through its blocks: its tokens, and the holes among them."""
        return len(self.blocks) * self._size - self.unwritten

    def blocks_read(self) -> i64:
        """Blocks in which these cells lie."""
        return len(self.blocks) - self.unwritten // self._size


class TokenBlocks:
    """The pool of one group of layers, and which cells of which blocks each sequence's tokens lie in."""

    def __init__(self, n_blocks: int, size: int, *, refill: bool):
        """``refill``: new tokens go to the cells of evicted ones, in the fullest block first, before any new block."""
        self.size: i64 = size
        self.pool = BlockPool(n_blocks, lambda blocks, _: FreeStack(blocks), first=1)
        self.held: dict[int, HeldTokens] = {}
        self.stored: i64 = 0
        """Tokens of all sequences."""
        self._refill = refill
        self._tokens = [0] * n_blocks
        """Tokens in each block."""
        self._written = [0] * n_blocks
        """Cells of each block, from its first, that have held a token since it was taken or packed."""
        self._turn = [0] * n_blocks
        """The turn in which each block was taken or packed: of equally full ones, the earliest is filled first."""
        self._turns = 0
        """Turns so far: each block that is taken and each hole that comes has one of its own."""
        self._used = [False] * (n_blocks * size)
        """Whether each cell holds a token."""
        self._highest = 0
        """No block above this one holds a token."""

    def of(self, seq: int) -> HeldTokens:
        """What a sequence holds; nothing, if it is new."""
        found = self.held.get(seq)
        if found is None:
            found = self.held[seq] = HeldTokens(int(self.size))
        return found

    def missing(self, own: HeldTokens, tokens: i64) -> i64:
        """Blocks that a sequence must be given before ``tokens`` more tokens can be written."""
        beyond = tokens - self._room(own)
        return (beyond + self.size - 1) // self.size if beyond > 0 else 0

    def _room(self, own: HeldTokens) -> i64:
        """Cells of a sequence's blocks that its next tokens may go to."""
        return len(own.blocks) * self.size - len(own.cells) if self._refill else own.unwritten

    def reserve(self, own: HeldTokens, tokens: i64) -> None:
        """Give a sequence the blocks that are missing for its next tokens; enough must be free."""
        more = self.missing(own, tokens)
        own.reserved = tokens
        if more:
            blocks = self.pool.take(int(more))
            own.blocks += blocks
            own.open += blocks
            own.unwritten += more * self.size
            for block in blocks:
                self._turns += 1
                self._turn[block] = self._turns

    # Writing

    def write(self, own: HeldTokens, start: int, n: int) -> None:
        """Place tokens of positions ``[start, start + n)`` for which there is room; their cells are the last ones."""
        own.reserved = own.reserved - n if own.reserved > n else 0
        if n == 1:
            self._put(own, start, self._next_cell(own))
        elif self._refill and own.cells:
            empty = self._empty_cells(own)
            if n < len(empty):
                # The fullest blocks first, as they are now.
                tokens, size = self._tokens, int(self.size)
                empty.sort(key=lambda cell: -tokens[cell // size])
            for at in range(n):
                self._put(own, start + at, self._take_empty(own, empty[at]))
        else:
            while n > 0:
                written = self._write_to(own, own.open[0], start, n)
                start += written
                n -= written

    def _write_to(self, own: HeldTokens, block: int, start: int, n: int) -> int:
        """Place tokens in the unwritten cells of a block, as many as these are; their number."""
        first, size = self._written[block], int(self.size)
        n = min(n, size - first)
        cells = range(block * size + first, block * size + first + n)
        own.cells += cells
        own.positions += range(start, start + n)
        own.unwritten -= n
        self._used[cells.start : cells.stop] = [True] * n
        self._tokens[block] += n
        self._written[block] = first + n
        self.stored += n
        if first + n == size:
            own.open.remove(block)
        if block > self._highest:
            self._highest = block
        return n

    def _put(self, own: HeldTokens, position: int, cell: int) -> None:
        """Count a token in a cell."""
        block = cell // int(self.size)
        self._used[cell] = True
        self._tokens[block] += 1
        self.stored += 1
        if block > self._highest:
            self._highest = block
        own.positions.append(position)
        own.cells.append(cell)

    def _next_cell(self, own: HeldTokens) -> int:
        """Take the empty cell that a single token goes to."""
        size = int(self.size)
        block = self._fullest(own) if self._refill else own.open[0]
        if self._written[block] < size:
            return self._take_unwritten(own, block)
        return own.take_hole(block)

    def _take_unwritten(self, own: HeldTokens, block: int) -> int:
        at, size = self._written[block], int(self.size)
        self._written[block] = at + 1
        own.unwritten -= 1
        if at + 1 == size:
            own.open.remove(block)
        return block * size + at

    def _fullest(self, own: HeldTokens) -> int:
        """The fullest block with an empty cell; of equally full ones, that whose first empty cell came earliest."""
        found, most, earliest, size = -1, -1, 0, int(self.size)
        for block in own.blocks:
            tokens = self._tokens[block]
            if most <= tokens < size:
                turn = self._turn[block] if self._written[block] < size else own.holes[block][0][0]
                if tokens > most or turn < earliest:
                    found, most, earliest = block, tokens, turn
        return found

    def _empty_cells(self, own: HeldTokens) -> list[int]:
        """All cells of a sequence's blocks that hold no token, the one first that has been empty longest."""
        size = int(self.size)
        found = [hole for holes in own.holes.values() for hole in holes]
        for block in own.open:
            first = block * size
            found += [(self._turn[block], cell) for cell in range(first + self._written[block], first + size)]
        found.sort()
        return [cell for _, cell in found]

    def _take_empty(self, own: HeldTokens, cell: int) -> int:
        """Take one of the cells that ``_empty_cells`` names; those of a block in their order."""
        size = int(self.size)
        block = cell // size
        if self._written[block] < size:
            return self._take_unwritten(own, block)
        return own.take_hole(block)

    # Giving up

    def evict_one(self, own: HeldTokens, at: i64) -> None:
        """Empty the cell of the token with this index, and free its block if that holds none any more."""
        block = self._leave(own, own.cells.pop(at))
        own.positions.pop(at)
        if block:
            self._free(own, [block])

    def evict(self, own: HeldTokens, which: Sequence[int]) -> None:
        """Empty the cells of the tokens with these indices, ascending, and free the blocks that hold none any more."""
        left = [True] * len(own.cells)
        empty: list[int] = []
        for at in which:
            left[at] = False
            block = self._leave(own, own.cells[at])
            if block:
                empty.append(block)
        own.cells = [cell for at, cell in enumerate(own.cells) if left[at]]
        own.positions = [position for at, position in enumerate(own.positions) if left[at]]
        if empty:
            empty.sort()
            self._free(own, empty)

    def _leave(self, own: HeldTokens, cell: int) -> int:
        """Empty a cell; its block if that holds no token any more, else 0."""
        block = cell // int(self.size)
        tokens = self._tokens[block] - 1
        self._tokens[block] = tokens
        self._used[cell] = False
        self.stored -= 1
        if self._refill:
            self._turns += 1
            own.holes.setdefault(block, []).append((self._turns, cell))
        return 0 if tokens else block

    def _free(self, own: HeldTokens, blocks: list[int]) -> None:
        """Take a sequence's empty blocks from it."""
        for block in blocks:
            own.blocks.remove(block)
            if block in own.open:
                own.open.remove(block)
                own.unwritten -= self.size - self._written[block]
            own.holes.pop(block, None)
            self._written[block] = 0
        self.pool.release(blocks)

    def truncate(self, own: HeldTokens, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence that has lost none, and what its last block has room for."""
        size = int(self.size)
        for cell in own.cells[n:]:
            self._used[cell] = False
        self.stored -= len(own.cells) - n
        own.cells, own.positions, own.reserved = own.cells[:n], own.positions[:n], 0
        keep = blocks_for(n, size)
        self._pack(own, own.blocks[:keep], own.blocks[keep:])

    def release(self, seq: int) -> None:
        """Give up all that a sequence holds."""
        own = self.held.pop(seq, None)
        if own is not None:
            size = int(self.size)
            for block in own.blocks:
                self._used[block * size : (block + 1) * size] = [False] * size
            self.stored -= len(own.cells)
            own.cells = []
            self._pack(own, [], own.blocks)

    def _pack(self, own: HeldTokens, kept: list[int], gone: list[int]) -> None:
        """Count a sequence's tokens in the first cells of the blocks that it keeps, and free the others."""
        left, size = len(own.cells), int(self.size)
        own.blocks, own.open, own.unwritten = kept, [], len(kept) * size - left
        own.holes.clear()
        for block in kept:
            filled = min(left, size)
            left -= filled
            self._tokens[block] = self._written[block] = filled
            self._turns += 1
            self._turn[block] = self._turns
            if filled < size:
                own.open.append(block)
        for block in gone:
            self._tokens[block] = self._written[block] = 0
        self.pool.release(gone[::-1])

    # Compaction

    def fragmentation(self, own: HeldTokens) -> float:
        """Share of the cells which attention reads of a sequence that hold no token."""
        read = own.cells_read()
        return fragmentation(len(own.cells), int(read)) if read else 0.0

    def excess_blocks(self, own: HeldTokens, more: int = 0) -> int:
        """Blocks that compacting a sequence would free, if it has to have room for ``more`` tokens."""
        return len(own.blocks) - blocks_for(len(own.cells) + max(int(own.reserved), more), int(self.size))

    def compact(self, own: HeldTokens, more: int = 0) -> Moves:
        """Copy the tokens of a sequence's emptiest blocks into the holes of its fullest, if that frees a block.

        Fewest cells move that way. No run overlaps another, so that any order is safe. ``more``: leave room for so
        many further tokens.
        """
        excess, size = self.excess_blocks(own, more), int(self.size)
        if excess <= 0:
            return NO_MOVES
        tokens = self._tokens
        by_tokens = sorted(own.blocks, key=lambda block: -tokens[block])
        kept, left = by_tokens[:-excess], len(own.cells)
        filled: dict[int, int] = {}
        """Tokens that each block will hold."""
        for block in kept:
            filled[block] = min(left, size)
            left -= filled[block]
        moving = [at for at, cell in enumerate(own.cells) if cell % size >= filled.get(cell // size, 0)]
        moving.sort(key=own.cells.__getitem__)
        src = [own.cells[at] for at in moving]
        dst = [cell for b in sorted(kept) for cell in range(b * size, b * size + filled[b]) if not self._used[cell]]
        for at, cell, target in zip(moving, src, dst, strict=True):
            own.cells[at] = target
            self._used[cell] = False
            self._used[target] = True
            if target // size > self._highest:
                self._highest = target // size
        self._pack(own, kept, by_tokens[-excess:])
        return _runs(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64))

    # Looking in

    @property
    def top(self) -> int:
        """One past the highest cell that holds a token; 0 if there is none."""
        block, size = self._highest, int(self.size)
        while block > 0 and not self._tokens[block]:
            block -= 1
        self._highest = block
        cell = block * size + size - 1
        while cell >= block * size and not self._used[cell]:
            cell -= 1
        return cell + 1 if block else 0

    def usage(self, capacity: int) -> Usage:
        """How full the pool is; any free block serves any sequence."""
        extents, size = self.pool.keep_extents(), int(self.size)
        free, largest = extents.total * size, extents.largest * size
        return Usage(capacity, self.stored, capacity - free, free, extents.lengths.count, largest, self.top)


def _runs(src: IntArray, dst: IntArray) -> Moves:
    """Single cells joined where both sides go on; both of shape (cells,)."""
    if not len(src):
        return NO_MOVES
    first = np.flatnonzero(np.concatenate(([True], (np.diff(src) != 1) | (np.diff(dst) != 1))))
    return Moves(src[first], dst[first], np.diff(first, append=len(src)))
