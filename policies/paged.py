"""Paged memory: fixed blocks of cells, and for each sequence a table of the blocks it holds.

``paged``: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023);
the order in which blocks are handed out and returned is that of vLLM 0.33.0's ``BlockPool`` without prefix cache.
``chunked``: the same with larger pieces and the lowest free one first, as engines do that keep a list of chunks for
each sequence and share none (MLC-LLM, TGI).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from policies.free_runs import runs_of
from policies.policy import CacheConfig, Kernel, Policy, Unsupported
from policies.reads import padded_span, reads_of, table_reads
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    NoSlot,
    Place,
    Reads,
    Usage,
    View,
    split,
)


class Pool(Protocol):
    """Hands out blocks by number."""

    def __len__(self) -> int: ...

    def take(self, n: int) -> list[int]:
        """The next ``n`` blocks, which must be there."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back."""
        ...

    def free_blocks(self) -> IntArray:
        """The free blocks, ascending."""
        ...


class BlockQueue:
    """Blocks ``1 .. n - 1`` in vLLM's order; block 0 is the null block and never handed out."""

    def __init__(self, n_blocks: int):
        self._free = deque(range(1, n_blocks))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """From the front."""
        return [self._free.popleft() for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """To the front, so that ``blocks[0]`` is the next handed out."""
        self._free.extendleft(reversed(blocks))

    def free_blocks(self) -> IntArray:
        """The free blocks, ascending."""
        return np.sort(np.fromiter(self._free, dtype=np.int64, count=len(self._free)))


class LowestFirst:
    """Blocks ``0 .. n - 1``, always the lowest free one."""

    def __init__(self, n_blocks: int):
        self._free = list(range(n_blocks))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """The lowest."""
        return [heapq.heappop(self._free) for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """In any order."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def free_blocks(self) -> IntArray:
        """The free blocks, ascending."""
        return np.sort(np.array(self._free, dtype=np.int64))


class PagedPolicy(Policy):
    """A block table for each sequence; a token's cell follows from its position."""

    def __init__(self, name: str, config: CacheConfig, *, block_size: int, null_block: bool, kernel: Kernel = "gather"):
        n_blocks, reserved = config.cells // block_size, int(null_block)
        if n_blocks <= reserved:
            why = ", and block 0 is never handed out" if null_block else ""
            raise ValueError(f"{config.cells} cells make {n_blocks} blocks of {block_size}{why}")
        self.name = name
        self.block_size = block_size
        self.groups = (Group(n_blocks * block_size),)
        self.capacity = (n_blocks - reserved) * block_size
        self.kernel = config.kernel or kernel
        self.pool: Pool = BlockQueue(n_blocks) if null_block else LowestFirst(n_blocks)
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._stored = 0

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Append blocks to the tables where the new tokens need them: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        needs = [(c, self._blocks(c.start + c.n) - len(self._tables.get(c.seq, ()))) for c in step]
        need = sum(max(n, 0) for _, n in needs)
        if need > len(self.pool):
            raise NoSlot(f"the step needs {need} blocks of {self.block_size} cells, {len(self.pool)} are free")
        for chunk, n in needs:
            self._tables.setdefault(chunk.seq, []).extend(self.pool.take(max(n, 0)))
        return tuple(self._place(chunks, views) for chunks in split(step, self._n_ubatch))

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Return the blocks past ``start``, last first. Only a sequence's tail can go, or all of it."""
        length = self._lengths.get(seq, 0)
        if start >= length or (stop is not None and stop <= start):
            return
        if stop is not None and stop < length:
            raise Unsupported(f"{self.name}: a block table gives up its tail only, not [{start}, {stop}) of {length}")
        table, keep = self._tables[seq], self._blocks(start)
        self.pool.release(table[: keep - 1 : -1] if keep else table[::-1])
        self._stored -= length - start
        if start == 0:
            del self._tables[seq], self._lengths[seq]
        else:
            del table[keep:]
            self._lengths[seq] = start

    def usage(self) -> Usage:
        """Read off the tables; any free block serves any sequence."""
        free = len(self.pool) * self.block_size
        starts, ends = runs_of(self.pool.free_blocks())
        largest = int((ends - starts).max(initial=0)) * self.block_size
        return Usage(self.capacity, self._stored, self.capacity - free, free, len(starts), largest, self._top())

    def sequences(self) -> list[int]:
        """Those with a table."""
        return sorted(self._tables)

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from the tables."""
        position = np.full(self.groups[0].cells, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.groups[0].cells
        for seq, length in self._lengths.items():
            cells = self._cells(seq, 0, length)
            position[cells] = np.arange(length)
            for cell in cells.tolist():
                owners[cell] = owners[cell] | {seq}
        return CellMap(position, tuple(owners))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _cells(self, seq: int, start: int, stop: int) -> IntArray:
        positions = np.arange(start, stop)
        table = np.array(self._tables[seq], dtype=np.int64)
        return np.asarray(table[positions // self.block_size] * self.block_size + positions % self.block_size)

    def _top(self) -> int:
        """One past the highest cell that holds a token: in full blocks the last, else as far as it is filled."""
        size, top = self.block_size, 0
        for seq, table in self._tables.items():
            full, rest = divmod(self._lengths.get(seq, 0), size)
            if rest:
                top = max(top, table[full] * size + rest)
            if full:
                top = max(top, (max(table[:full]) + 1) * size)
        return top

    def _place(self, chunks: tuple[Chunk, ...], views: bool) -> MicroBatch:
        parts = []
        for seq, start, n, _ in chunks:
            parts.append(self._cells(seq, start, start + n))
            self._lengths[seq] = start + n
            self._stored += n
        seen = (
            tuple(View(self._cells(seq, 0, start + n), np.arange(start + n)) for seq, start, n, _ in chunks)
            if views
            else ()
        )
        return MicroBatch(chunks, (Place(np.concatenate(parts), self._reads(chunks), views=seen),))

    def _reads(self, chunks: Sequence[Chunk]) -> Reads:
        ends = [chunk.start + chunk.n for chunk in chunks]
        if self.kernel == "gather":
            blocks = np.array([self._blocks(end) for end in ends], dtype=np.int64)
            return table_reads(chunks, np.array(ends, dtype=np.int64), blocks)
        span = padded_span(self._top(), self._pad, self.groups[0].cells)
        lengths = {chunk.seq: end for chunk, end in zip(chunks, ends, strict=True)}
        return reads_of(self.kernel, chunks, lambda seq: self._cells(seq, 0, lengths[seq]), span)
