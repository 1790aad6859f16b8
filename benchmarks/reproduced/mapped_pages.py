"""Pages that Linux maps, for real: a pass over ranges of virtual addresses beside one through a table, and a mapping.

It measures the machine that it runs on, and should have a core of it to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvsim.model.engine_shapes import SHAPES
from policies import Chunk, Group, MicroBatch, Place, Reads, View
from real_engine import Engine, Transformer
from real_engine.virtual_memory import MappedStore, VirtualEngine

SLOTS, CONTEXT, PAGE = 4, 4096, 128
"""Sequences, the most tokens of one, and tokens in a page."""
SHAPE = SHAPES["tiny"]
REPEATS = 8
"""Medians that an interval is of."""


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def batch_of(length: int, new: int) -> MicroBatch:
    """A pass of ``new`` tokens at the end of sequences of ``length``, whose pages lie in random order."""
    pages = np.random.default_rng(1).permutation(SLOTS * CONTEXT // PAGE).reshape(SLOTS, -1)
    at = np.arange(length)
    views = tuple(View(own[at // PAGE] * PAGE + at % PAGE, at) for own in pages)
    lengths = np.full(SLOTS, length)
    reads = Reads(np.full(SLOTS, new), lengths, lengths, np.ones_like(lengths), int(lengths.sum()))
    cells = np.concatenate([view.cells[-new:] for view in views])
    chunks = tuple(Chunk(slot, length - new, new) for slot in range(SLOTS))
    return MicroBatch(chunks, (Place(cells, reads, views=views),))


def passes(length: int, new: int, repeats: int = REPEATS, each: int = 5) -> tuple[list[float], list[float]]:
    """Seconds of a pass through a table and over ranges, in turns: medians of ``each``, ``repeats`` of them."""
    model, groups, batch = Transformer.random(SHAPE, seed=1), (Group(SLOTS * CONTEXT),), batch_of(length, new)
    table = Engine(model, groups, "gather", 1)
    ranges = VirtualEngine(model, groups, 1, page_tokens=PAGE, slots=SLOTS, max_tokens=CONTEXT)
    tokens = np.arange(SLOTS * new) % SHAPE.vocabulary
    for engine in (table, ranges):
        engine.fill()
        engine.run(tokens, batch)
    found: tuple[list[float], list[float]] = [], []
    for _ in range(repeats):
        times = [[_seconds(lambda: engine.run(tokens, batch)) for engine in (table, ranges)] for _ in range(each)]  # noqa: B023
        for medians, median in zip(found, np.median(times, axis=0).tolist(), strict=True):
            medians.append(median)
    return found


def mapping_us(page_tokens: int, repeats: int = REPEATS) -> list[float]:
    """Microseconds to map a page of one head, ``repeats`` times the mean over a whole cache in random order."""
    pages = SLOTS * CONTEXT // page_tokens
    store = MappedStore(1, SLOTS * CONTEXT, SHAPE.d_head, page_tokens=page_tokens, slots=1, slot_pages=pages)
    rng = np.random.default_rng(1)

    def map_all() -> None:
        for number, page in enumerate(rng.permutation(pages).tolist()):
            store.map_page(0, number, page)

    map_all()
    return [_seconds(map_all) / pages * 1e6 for _ in range(repeats)]
