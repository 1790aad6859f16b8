"""The types that policies take and give: chunks in, micro-batches out.

A *cell* is room for one token's K and V in all layers. Counts are in cells or tokens, never bytes or seconds:
a policy knows neither the model nor the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from policies.content import NOTHING, Content

IntArray = NDArray[np.int64]
"""Cells, positions or counts; int64 throughout, so that no cache is too large."""
FloatArray = NDArray[np.float64]
Cells = range | IntArray
"""Cells in the order in which they are filled; a range if they are consecutive and ascend."""


class Chunk(NamedTuple):
    """Tokens to run for one sequence in one step: ``n`` from position ``start``."""

    seq: int
    start: int
    n: int
    also: tuple[int, ...] = ()
    """Further sequences that see the same tokens."""

    @property
    def seqs(self) -> tuple[int, ...]:
        """All sequences that see the tokens."""
        return (self.seq, *self.also)


class SequencePlan(NamedTuple):
    """What is known of a sequence when it starts, in tokens."""

    prompt_tokens: int
    """Length of the prompt."""
    max_tokens: int
    """The most positions that the sequence can ever hold: by the server's limit for one sequence, and the client's."""
    final_tokens: int
    """Positions that it will hold when it ends. Only clairvoyant policies may look at it."""
    content: Content = NOTHING
    """What it says and will say. Other sequences may find only what has been run."""
    request: int = -1
    """The number of its request in the workload. Only clairvoyant policies may look at it."""
    generated: int = 0
    """Output tokens that it had when it was preempted, which are computed again behind its prompt."""
    kind: int = 0
    """What kind of request it is: those of one kind are alike in how soon their text is asked for again; 0: unknown."""

    @property
    def start_tokens(self) -> int:
        """Tokens that must be computed, or found, before the next one is generated."""
        return self.prompt_tokens + self.generated


class View(NamedTuple):
    """The cells that attention may see for one chunk, in order of position (own tokens included)."""

    cells: IntArray
    """Shape (n,), cell indices."""
    positions: IntArray
    """Shape (n,), the rotary position of each cell's token, ascending."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Runs of cells to copy, in an order in which applying them is safe.

    Each run may overlap itself (as ``memmove`` allows); a later run never reads what an earlier one overwrote
    unless it means the new content.
    """

    src: IntArray
    """Shape (n_runs,), first cell read."""
    dst: IntArray
    """Shape (n_runs,), first cell written."""
    length: IntArray
    """Shape (n_runs,), cells in the run."""

    @property
    def n_runs(self) -> int:
        """Number of runs."""
        return len(self.length)

    @property
    def n_cells(self) -> int:
        """Number of cells copied."""
        return int(self.length.sum())

    def apply(self, array: NDArray[np.generic], axis: int = 0) -> None:
        """Carry out the moves on ``array``, in place; ``axis`` is the one indexed by cell."""
        rows = np.moveaxis(array, axis, 0)
        for src, dst, n in zip(self.src.tolist(), self.dst.tolist(), self.length.tolist(), strict=True):
            if src < dst + n and dst < src + n:
                rows[dst : dst + n] = rows[src : src + n].copy()
            else:
                rows[dst : dst + n] = rows[src : src + n]

    def carry(self, array: NDArray[np.generic], empty: int) -> None:
        """Apply the moves to a one-dimensional array, and set every cell that was left behind to ``empty``."""
        for src, dst, n in zip(self.src.tolist(), self.dst.tolist(), self.length.tolist(), strict=True):
            moved = array[src : src + n].copy()
            array[src : src + n] = empty
            array[dst : dst + n] = moved

    @staticmethod
    def join(parts: Sequence[Moves]) -> Moves:
        """All moves, in order."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return NO_MOVES
        return Moves(
            np.concatenate([m.src for m in parts]),
            np.concatenate([m.dst for m in parts]),
            np.concatenate([m.length for m in parts]),
        )

    @staticmethod
    def from_runs(runs: Iterable[tuple[int, int, int]]) -> Moves:
        """Moves from ``(src, dst, length)`` triples, in order."""
        table = np.array(list(runs), dtype=np.int64).reshape(-1, 3)
        return Moves(table[:, 0], table[:, 1], table[:, 2])


_EMPTY = np.zeros(0, dtype=np.int64)
NO_MOVES = Moves(_EMPTY, _EMPTY, _EMPTY)


@dataclass(frozen=True, slots=True)
class Shift:
    """Cells whose token changed its position: a real engine must rotate their keys on (llama.cpp's K-shift)."""

    cells: IntArray
    """Shape (n,)."""
    deltas: IntArray
    """Shape (n,), how many positions to rotate each by."""


NO_SHIFT = Shift(_EMPTY, _EMPTY)


class Transfer(NamedTuple):
    """A run of cells to copy between the cache and the host tier behind it."""

    to_host: bool
    """True: out of the cache; False: back into it."""
    cell: int
    """First cell of the cache."""
    host: int
    """First cell of the host tier."""
    n: int
    """Cells."""


class Reads(NamedTuple):
    """What attention reads for one micro-batch in one cache group; arrays of shape (n_chunks,), int64."""

    tokens: IntArray
    """Query tokens of the chunk."""
    scanned: IntArray
    """Cells that the kernel computes scores for, for each of those tokens."""
    useful: IntArray
    """Scanned cells whose token the sequence can see at the end of the chunk."""
    runs: IntArray
    """Contiguous pieces that the scanned cells lie in (blocks, for a block table)."""
    span: int
    """Cells that the kernel reads at least once for the whole micro-batch."""


class Place(NamedTuple):
    """Where a micro-batch's tokens go in one cache group, and what an engine must do to that group first."""

    cells: IntArray
    """Shape (n_tokens,): the cell of each token, in chunk order."""
    reads: Reads
    moves: Moves = NO_MOVES
    """Cells to copy before the pass."""
    shift: Shift = NO_SHIFT
    """Keys to rotate after the copies, before the pass."""
    views: tuple[View, ...] = ()
    """One for each chunk, filled only where the caller asked: a real engine needs them, a clock does not."""
    transfers: tuple[Transfer, ...] = ()
    """Copies to and from the host tier, in order, before everything else."""
    mapped: int = 0
    """Pages of virtual memory, each of all layers of the group, to map before the pass while it waits."""


class HostRuns(Sequence[Transfer]):
    """Runs to copy between the cache and the host tier, all in one direction; each is made when it is looked at."""

    __slots__ = ("_cells", "_host", "_lengths", "cells", "to_host")

    def __init__(self, to_host: bool, cells: IntArray, host: IntArray, lengths: IntArray):
        """``cells``, ``host``: the first cell of each run on either side; all arrays of shape (runs,), int64."""
        self.to_host = to_host
        self.cells = int(lengths.sum())
        """Cells of all runs."""
        self._cells, self._host, self._lengths = cells, host, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, at: int) -> Transfer: ...
    @overload
    def __getitem__(self, at: slice) -> HostRuns: ...
    def __getitem__(self, at: int | slice) -> Transfer | HostRuns:
        if isinstance(at, slice):
            return HostRuns(self.to_host, self._cells[at], self._host[at], self._lengths[at])
        return Transfer(self.to_host, int(self._cells[at]), int(self._host[at]), int(self._lengths[at]))

    def __iter__(self) -> Iterator[Transfer]:
        for cell, host, n in zip(self._cells.tolist(), self._host.tolist(), self._lengths.tolist(), strict=True):
            yield Transfer(self.to_host, cell, host, n)

    def __repr__(self) -> str:
        return repr(tuple(self))


class HostCopy(NamedTuple):
    """Copies between one cache group and the host tier, and what an engine still owes that group and must do first."""

    transfers: Sequence[Transfer]
    """All in one direction."""
    moves: Moves = NO_MOVES
    """Cells to copy before."""
    shift: Shift = NO_SHIFT
    """Keys to rotate after the moves, before the copies."""

    @property
    def cells(self) -> int:
        """Cells of all runs."""
        runs = self.transfers
        return runs.cells if isinstance(runs, HostRuns) else sum([run.n for run in runs])

    @property
    def to_host(self) -> bool:
        """Whether they go to the host tier; False if there are none."""
        runs = self.transfers
        return len(runs) > 0 and (runs.to_host if isinstance(runs, HostRuns) else runs[0].to_host)


class Exported(NamedTuple):
    """A sequence that was copied to host memory."""

    tokens: int
    """How many it has."""
    copies: tuple[HostCopy, ...] = ()
    """What must be copied for that, one for each group; empty where micro-batches, or ``settle_transfers``, say it."""
    state: Any = None
    """What the policy knows of it."""


class Checkpoint(NamedTuple):
    """What of a sequence cannot be rolled back, saved: the contents of its windows, and its state."""

    first: int
    """The first position that they hold, which for a state is its last one; -1 for none."""
    last: int
    """The last position that the sequence had."""
    window_tokens: int = 0
    """Tokens that were in its windows."""
    copies: tuple[HostCopy, ...] = ()
    """What must be copied to the host for that, one for each group."""
    state: Any = None
    """What the policy knows of it."""


@dataclass(frozen=True, slots=True)
class Group:
    """One of several caches side by side; each layer of the model uses one of them."""

    cells: int
    """Cells that an engine must make room for."""
    window: int | None = None
    """Tokens that attention looks back, itself included; None: all."""
    share: float = 1.0
    """Share of the model's layers."""
    streams: int = 1
    """Independent caches of equal size that its cells are divided into, in order."""
    host_cells: int = 0
    """Cells of the host tier behind it."""
    chunked: bool = False
    """Whether attention looks back to the last multiple of ``window`` only."""


class MicroBatch(NamedTuple):
    """One forward pass: at most ``n_ubatch`` tokens, with a cell for each in every cache group."""

    chunks: tuple[Chunk, ...]
    places: tuple[Place, ...]
    """One for each cache group."""

    @property
    def n_tokens(self) -> int:
        """Tokens in this forward pass."""
        return len(self.places[0].cells)

    @property
    def cells(self) -> IntArray:
        """Cells of the first group."""
        return self.places[0].cells

    @property
    def reads(self) -> Reads:
        """Reads of the first group."""
        return self.places[0].reads

    @property
    def views(self) -> tuple[View, ...]:
        """Views of the first group."""
        return self.places[0].views


class Unsupported(Exception):
    """The layout has no such operation; the message says why."""


class OutOfCells(Exception):
    """There is no room for the step. The policy's state is as it was, except for what ``done`` lists."""

    def __init__(self, message: str, done: Sequence[MicroBatch] = ()):
        super().__init__(message)
        self.done = tuple(done)
        """Micro-batches already placed and kept: empty unless the engine reproduced keeps them."""


@overload
def external_fragmentation(placeable: int, free: int) -> float: ...
@overload
def external_fragmentation(placeable: IntArray, free: IntArray) -> FloatArray: ...
def external_fragmentation(placeable: int | IntArray, free: int | IntArray) -> float | FloatArray:
    """Share of the free cells that one sequence could not be given in one micro-batch; 0.0 where no cell is free."""
    return _share_missing(placeable, free)


@overload
def internal_fragmentation(stored: int, allocated: int) -> float: ...
@overload
def internal_fragmentation(stored: IntArray, allocated: IntArray) -> FloatArray: ...
def internal_fragmentation(stored: int | IntArray, allocated: int | IntArray) -> float | FloatArray:
    """Share of the allocated cells that hold no token; 0.0 where no cell is allocated."""
    return _share_missing(stored, allocated)


def _share_missing(part: int | IntArray, whole: int | IntArray) -> float | FloatArray:
    if isinstance(whole, np.ndarray):
        return 1.0 - np.divide(part, whole, out=np.ones(whole.shape), where=whole > 0)
    return float(1.0 - part / whole) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """How full and how broken up the cache is, in cells."""

    capacity: int
    stored: int
    """Cells that hold a token."""
    allocated: int
    """Cells that no other sequence can take: stored, or reserved and still empty."""
    placeable: int
    """The most tokens that one sequence could be given in one micro-batch now."""
    free_extents: int
    largest_free_extent: int
    span: int
    """One past the highest stored cell: what attention over all cells must read."""
    cached: int = 0
    """Free cells that still hold a prefix which may be asked for again."""

    @property
    def free(self) -> int:
        """Cells that are not allocated."""
        return self.capacity - self.allocated

    @property
    def utilization(self) -> float:
        """Share of the cells that hold a token."""
        return self.stored / self.capacity

    @property
    def external_fragmentation(self) -> float:
        """Share of the free cells that one sequence could not be given in one micro-batch."""
        return external_fragmentation(self.placeable, self.free)

    @property
    def internal_fragmentation(self) -> float:
        """Share of the allocated cells that hold no token."""
        return internal_fragmentation(self.stored, self.allocated)


@dataclass(frozen=True, slots=True)
class CellMap:
    """The whole cache, cell by cell: for pictures, tests and comparisons with real engines."""

    position: IntArray
    """Shape (n_cells,): the token's position, -1 where the cell holds none."""
    owners: tuple[frozenset[int], ...] = field(repr=False)
    """The sequences that see each cell; empty where the cell holds no token."""

    def first_owner(self) -> IntArray:
        """Shape (n_cells,): the smallest sequence id of each cell, -1 where it holds no token."""
        return np.array([min(o, default=-1) for o in self.owners], dtype=np.int64)


def usage_of(cells: CellMap, capacity: int, streams: int = 1, *, contiguous: bool = False) -> Usage:
    """Count the usage of a cache in which nothing is reserved.

    ``capacity``: cells that can hold tokens. ``streams``: caches of equal size that the cells are divided into.
    ``contiguous``: a micro-batch needs one free extent; otherwise any free cells of a stream will do.
    """
    used = cells.position >= 0
    by_stream = used.reshape(streams, -1)
    stored = int(used.sum())
    # A used cell at either end of each stream, so that every free extent has a first cell and a cell behind it.
    edges = np.diff(np.pad(by_stream, ((0, 0), (1, 1)), constant_values=True).astype(np.int8), axis=1).ravel()
    lengths = np.flatnonzero(edges > 0) - np.flatnonzero(edges < 0)
    largest = int(lengths.max(initial=0))
    placeable = largest if contiguous else int((~by_stream).sum(axis=1).max())
    return Usage(
        capacity,
        stored,
        allocated=stored,
        placeable=min(placeable, capacity - stored),
        free_extents=len(lengths),
        largest_free_extent=largest,
        span=int(np.flatnonzero(used).max(initial=-1)) + 1,
    )


@dataclass(frozen=True, slots=True)
class RelativeCosts:
    """What attention and moves cost, all in the same unit: only their ratios matter."""

    score: float
    """One query token scored against one cell."""
    run: float
    """One run moved."""
    cell: float
    """One cell moved."""


def split_batch(step: Sequence[Chunk], n_ubatch: int, tokens_before: int = 0) -> list[tuple[Chunk, ...]]:
    """Cut a step into micro-batches of at most ``n_ubatch`` tokens, in order, as llama.cpp does.

    ``tokens_before``: tokens that the first has already, fewer than ``n_ubatch``.
    """
    batches: list[tuple[Chunk, ...]] = []
    current: list[Chunk] = []
    room = n_ubatch - tokens_before
    for seq, start, n, also in step:
        while n > 0:
            take = min(n, room)
            current.append(Chunk(seq, start, take, also))
            start, n, room = start + take, n - take, room - take
            if room == 0:
                batches.append(tuple(current))
                current, room = [], n_ubatch
    if current:
        batches.append(tuple(current))
    return batches
