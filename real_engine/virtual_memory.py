"""Sequences that are contiguous in virtual memory: Linux maps the pages of K and V into a range for each slot.

K and V lie in files in memory. New tokens are written to their cells there; attention reads a range of addresses, in
which the same pages are mapped in the order of positions. A page that is mapped wrongly garbles the text.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np

from kvsim.errors import UserError
from policies import Group, MicroBatch, View
from real_engine.arrays import FloatArray, IntArray
from real_engine.engine import Engine
from real_engine.model import Transformer
from real_engine.storage import CellIndex, Store

_FIXED, _NO_RESERVE = 0x10, 0x4000
"""Linux's ``MAP_FIXED`` and ``MAP_NORESERVE``, which Python's ``mmap`` does not have."""
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_NUMBER = 4
"""Bytes of a number."""


class _Memory:
    """Linux's own ``mmap`` and ``munmap``. Raises ``UserError`` elsewhere."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise UserError("pages are mapped for real on Linux only")
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def map(self, address: int | None, size: int, flags: int, file: int, offset: int) -> int:
        """Map memory for reading; its address. Raises ``OSError``."""
        found = self._library.mmap(address, size, mmap.PROT_READ, flags, file, offset)
        if found is None or found == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {size:,} bytes: {os.strerror(code)}")
        return int(found)

    def unmap(self, address: int, size: int) -> None:
        """Give up a range of addresses."""
        self._library.munmap(address, size)


class MappedStore(Store):
    """K or V of one layer in float32, with a second view of its pages: a range of addresses for each slot.

    ``write`` takes cells of the cache, ``read`` cells of the ranges. A page that is not mapped there reads as zeros.
    """

    def __init__(self, heads: int, cells: int, d: int, *, page_tokens: int, slots: int, slot_pages: int):
        """``slot_pages``: pages in the range of a slot. Raises ``UserError`` if pages are not whole ones of Linux."""
        self._page_bytes, self._head_bytes = page_tokens * d * _NUMBER, cells * d * _NUMBER
        if self._page_bytes % mmap.PAGESIZE or self._head_bytes % mmap.PAGESIZE:
            least = mmap.PAGESIZE // (d * _NUMBER)
            raise UserError(f"cache.page_tokens: a page of Linux holds {least} tokens of a head; a multiple is needed")
        self._heads, self._slot_pages, self._range_pages = heads, slot_pages, slots * slot_pages
        self._memory, self._file = _Memory(), os.memfd_create("kv")
        os.ftruncate(self._file, heads * self._head_bytes)
        self._numbers = np.frombuffer(mmap.mmap(self._file, 0), dtype=np.float32).reshape(heads, cells, d)
        self.arrays = (self._numbers,)
        size = heads * self._range_pages * self._page_bytes
        self._start = self._memory.map(None, size, _EMPTY, -1, 0)
        addressed = (ctypes.c_float * (size // _NUMBER)).from_address(self._start)
        self._seen: FloatArray = np.ctypeslib.as_array(addressed).reshape(heads, -1, d)
        weakref.finalize(self, _give_up, self._memory, self._file, self._start, size)

    def map_page(self, slot: int, number: int, page: int) -> None:
        """Map a page of the cache as page ``number`` of a slot's range, for each head."""
        for head in range(self._heads):
            offset = head * self._head_bytes + page * self._page_bytes
            address = self._address(head, slot, number)
            self._memory.map(address, self._page_bytes, mmap.MAP_SHARED | _FIXED, self._file, offset)

    def unmap_page(self, slot: int, number: int) -> None:
        """Map nothing there any more."""
        for head in range(self._heads):
            self._memory.map(self._address(head, slot, number), self._page_bytes, _EMPTY | _FIXED, -1, 0)

    def _address(self, head: int, slot: int, number: int) -> int:
        at = head * self._range_pages + slot * self._slot_pages + number
        return self._start + at * self._page_bytes

    def write(self, cells: CellIndex, numbers: FloatArray) -> None:
        """Store the numbers in cells of the cache."""
        self._numbers[:, cells] = numbers

    def read(self, cells: CellIndex) -> FloatArray:
        """Cells of the ranges: a view for a slice, else a copy."""
        return self._seen[:, cells]


def _give_up(memory: _Memory, file: int, start: int, size: int) -> None:
    memory.unmap(start, size)
    os.close(file)


class VirtualEngine(Engine):
    """The engine for ``vattention``: attention reads each sequence as one run of virtual addresses.

    A page is mapped when a pass first sees it in its place. It stays until it is seen in another one.
    """

    def __init__(
        self, model: Transformer, groups: Sequence[Group], seed: int, *, page_tokens: int, slots: int, max_tokens: int
    ):
        """``slots``: most sequences at a time. ``max_tokens``: most tokens of one. Raises ``UserError``."""
        super().__init__(model, groups, "sliced", seed)
        slot_pages = -(-max_tokens // page_tokens)

        def mapped(kept: Store) -> MappedStore:
            s = model.shape
            return MappedStore(
                s.n_kv_heads, kept.cells, s.d_head, page_tokens=page_tokens, slots=slots, slot_pages=slot_pages
            )

        self._mapped = [mapped(kept) for kept in (*self.keys, *self.values)]
        layers = model.shape.n_layers
        self.keys[:], self.values[:] = self._mapped[:layers], self._mapped[layers:]
        self._page_tokens, self._slot_tokens = page_tokens, slot_pages * page_tokens
        self._place: dict[int, tuple[int, int]] = {}
        """Where each page is mapped: a slot, and a number in its range."""
        self._there: dict[tuple[int, int], int] = {}
        """The page in each place."""
        self.n_mapped = 0
        """Pages mapped so far, each in all layers."""

    def run(self, tokens: IntArray, batch: MicroBatch) -> FloatArray:
        """Map what is not there yet, and compute the pass over the ranges."""
        (place,) = batch.places
        seen = []
        for chunk, view in zip(batch.chunks, place.views, strict=True):
            self._map(chunk.seq, view)
            seen.append(View(chunk.seq * self._slot_tokens + view.positions, view.positions))
        return super().run(tokens, batch._replace(places=(place._replace(views=tuple(seen)),)))

    def _map(self, slot: int, view: View) -> None:
        pages = view.cells[:: self._page_tokens] // self._page_tokens
        for number, page in enumerate(pages.tolist()):
            if self._place.get(page) != (slot, number):
                self._map_page(slot, number, page)

    def _map_page(self, slot: int, number: int, page: int) -> None:
        before = self._place.get(page)
        left = before is not None and self._there[before] == page
        self._place[page] = slot, number
        self._there[slot, number] = page
        self.n_mapped += 1
        for kept in self._mapped:
            if before is not None and left:
                kept.unmap_page(*before)
            kept.map_page(slot, number, page)
