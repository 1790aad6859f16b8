"""The cells of llama.cpp's caches, as it shows them: by its view interface, or in its log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from real_engine.arrays import IntArray

Era = Literal["A", "B"]
"""Of llama.cpp, as told apart in ``llama_library``."""
SHARED = -2
"""Owner of a cell that belongs to more than one sequence."""


@dataclass(frozen=True, slots=True)
class StreamCells:
    """Contents of one stream of one of llama.cpp's caches, as llama.cpp shows them."""

    cache: int
    """Number of the cache: 0, or 1 for the cache of the layers with a sliding window."""
    stream: int
    used: int
    """Used cells."""
    position: IntArray
    """Shape (n,), -1 where a cell is empty."""
    owner: IntArray
    """Shape (n,): the sequence that sees a cell, -1 where it is empty, ``SHARED`` where several do."""
    head: int | None = None
    """Cell where the next search begins; None in era A, which does not show it."""
    window: int | None = None
    """Tokens that the cache's layers look back; None for all."""
    largest: int | None = None
    """Cells in the longest free extent; None in era B, which does not show it."""
    shared: dict[int, tuple[int, ...]] | None = None
    """By cell that several sequences see: the sequences, ascending; None in era B, which does not show them."""


_SIZE = re.compile(r"llama_kv_cache: size = .*\(\s*(\d+) cells")
_HEAD = re.compile(
    r"find_slot: stream\[(\d+)\], n =\s*(\d+), used =\s*(\d+), head =\s*(\d+), size =\s*(\d+), n_swa =\s*(\d+)"
)


def parse_cache_sizes(lines: Sequence[str]) -> tuple[int, ...]:
    """Cells in each stream, by cache, from the log of a new context."""
    return tuple(int(found[1]) for line in lines if (found := _SIZE.search(line)))


def parse_cells(lines: Sequence[str], caches: int) -> Iterator[StreamCells]:
    """The first dump in the log of each stream of each cache: a heading, the cells' owners, then their positions."""
    seen: set[tuple[int, int]] = set()
    at = 0
    while at < len(lines):
        found = _HEAD.search(lines[at])
        at += 1
        if found is None:
            continue
        stream, _, used, head, size, window = map(int, found.groups())
        # The first cache is the full one; the second has the window.
        cache = int(window > 0 and caches > 1)
        if (cache, stream) in seen or at + 1 >= len(lines):
            continue
        seen.add((cache, stream))
        owner, position = _parse_owners(lines[at], size), _parse_positions(lines[at + 1], size)
        yield StreamCells(cache, stream, used, position, owner, head, window or None)
        at += 2


def _parse_positions(text: str, size: int) -> IntArray:
    """Positions from a dump in which each cell takes five characters, or more for longer numbers."""
    values = np.array([-1 if word == "." else int(word) for word in text.replace("*", " ").split()], dtype=np.int64)
    assert len(values) == size, f"{len(values)} positions were printed, not {size}"
    return values


def _parse_owners(text: str, size: int) -> IntArray:
    """Owners from a dump without spaces: '.' is an empty cell, 'M' one of several sequences, else a sequence number.

    All numbers must have equally many digits, which ``sequence_offset`` ensures.
    """
    packed = re.sub(r"[\s*]", "", text)
    numbers = len(packed) - packed.count(".") - packed.count("M")
    cells = size - packed.count(".") - packed.count("M")
    digits = numbers // cells if cells else 1
    assert digits * cells == numbers, "sequences of different numbers of digits were printed"
    wide = packed.replace(".", "." * digits).replace("M", "M" * digits)
    signs = np.frombuffer(wide.encode(), np.uint8).reshape(-1, digits).astype(np.int64)
    numbered: IntArray = (signs - ord("0")) @ 10 ** np.arange(digits)[::-1]
    first = signs[:, 0]
    return np.where(first == ord("."), -1, np.where(first == ord("M"), SHARED, numbered))


def sequence_offset(sequences: int, era: Era) -> int:
    """What to add to sequence numbers so that all have equally many digits, since llama.cpp prints them unseparated."""
    if era == "A" or sequences <= 10:
        return 0
    return 10 if sequences <= 90 else 100
