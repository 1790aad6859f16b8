"""One contiguous region for each sequence, in one arena: reserved, growing, ring, and the oracle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.cells.free_extents import FreeExtents
from policies.cells.reads import padded_span, reads_of
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, StepReads, Usages, lengths_after
from policies.fast_forward.lockstep import LockstepBatch, PassSummary
from policies.fast_forward.region_lockstep import Region, RegionLockstepBatch
from policies.policy import CacheConfig, Kernel, Policy, Unsupported
from policies.vocabulary import (
    NO_SHIFT,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    SequencePlan,
    Shift,
    Usage,
    View,
    split_batch,
)


class SequenceRegionPolicy(Policy):
    """Positions follow cells: a sequence's token ``i`` lies in the ``i``-th cell of its region."""

    _most: int | None = None
    """Tokens that a sequence can see at most; None: all of its own."""
    best_fit = False
    """Take the smallest free run that is large enough, instead of the first."""

    def __init__(self, name: str, config: CacheConfig, kernel: Kernel = "sliced"):
        self.name = name
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or kernel
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._free = FreeExtents(config.cells)
        self._regions: dict[int, Region] = {}
        self._plans: dict[int, SequencePlan] = {}
        self._owed: list[Moves] = []
        self._default = SequencePlan(1, config.max_tokens, config.max_tokens)
        self._stored = 0
        self._crew = RegionLockstepBatch(self, config.n_ubatch)

    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """As long as attention reads each region alone."""
        return self._crew if self.kernel == "sliced" else None

    @abstractmethod
    def size_at_start(self, plan: SequencePlan) -> int:
        """Cells to take for a sequence when its first tokens come."""

    def grown(self, region: Region, need: int) -> int:
        """Cells that a region should have once it must hold ``need``; by default it never grows."""
        raise Unsupported(f"{self.name}: a region of {region.size} cells cannot hold {need} tokens")

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember what is known of the sequence, and take its first region if there is one."""
        self._plans[seq] = plan
        if seq not in self._regions:
            size = self.size_at_start(plan)
            at = self._find(size)
            if at is not None:
                self._regions[seq] = Region(self._take_at(at, size), size)

    def admits(self, plan: SequencePlan) -> bool:
        """Whether some free run is large enough for the sequence's first region."""
        return self._free.first_of(self.size_at_start(plan), 0) is not None

    def place(self, step: Sequence[Chunk], lockstep_tokens: int) -> Sequence[PassSummary]:
        """The same where so many tokens of a lockstep batch are in the first pass as well, and nobody asks for
        cells."""
        self._make_room(step)
        summaries = []
        for chunks in split_batch(step, self._n_ubatch, lockstep_tokens):
            rows = [(chunk.n, self._advance(chunk), 1) for chunk in chunks]
            moves, self._owed = Moves.join(self._owed), []
            summaries.append(PassSummary(sum([n for n, _, _ in rows]), rows, moves, self._shift(chunks)))
        return summaries

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Take or grow regions where needed: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        self._make_room(step)
        batches = []
        for chunks in split_batch(step, self._n_ubatch):
            cells = np.concatenate([self._write(chunk) for chunk in chunks])
            span = padded_span(self._top(), self._pad, self.capacity)
            reads = reads_of(self.kernel, chunks, lambda seq: self._cells(seq), span, self._most)
            moves, self._owed = Moves.join(self._owed), []
            seen = tuple(self._view(chunk.seq) for chunk in chunks) if views else ()
            batches.append(MicroBatch(chunks, (Place(cells, reads, moves, self._shift(chunks), seen),)))
        return tuple(batches)

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Until a region is full, or must be renumbered."""
        regions = [self._regions.get(chunk.seq) for chunk in step]
        if self.kernel != "sliced" or self._owed or len(step) > self._n_ubatch or None in regions:
            return None
        active = [region for region in regions if region is not None]
        steps = min(n, MAX_STEPS, *(self._room(c.seq, r) for c, r in zip(step, active, strict=True)))
        if steps < 2 or any(r.length != c.start for c, r in zip(step, active, strict=True)):
            return None
        held = lengths_after([r.length for r in active], steps, self._most)
        scanned = held.sum(axis=1)
        ends = (held + np.array([r.start for r in active])).max(axis=1)
        runs = np.full(steps, len(step))

        def take(k: int, look: bool) -> Usages | None:
            before, top = self.usage() if look else None, self._top()
            stored = self._stored + scanned[:k] - sum(self._held(r) for r in active)
            for region in active:
                region.length += k
            self._stored = int(stored[-1])
            return None if before is None else Usages.repeated(before, k, stored=stored, span=np.maximum(ends[:k], top))

        return FastForward(
            (DecodePass(len(step), (StepReads(scanned, scanned, runs, scanned, held.max(axis=1)),)),), take
        )

    def _room(self, seq: int, region: Region) -> int:
        """Tokens that the sequence can be given without any decision."""
        return region.size - region.length

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Drop the tail from ``start``; with everything gone the region is free."""
        region = self._regions.get(seq)
        if region is None or start >= max(region.length, 1) or (stop is not None and stop <= start):
            return
        if stop is not None and stop < region.length:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop})")
        if region.lockstep_batch is not None:
            region.lockstep_batch.leave(seq)
        self._stored -= self._held(region)
        region.length = start
        self._stored += self._held(region)
        if start == 0:
            self._release(region)
            del self._regions[seq]
            self._plans.pop(seq, None)

    def sequences(self) -> list[int]:
        """Those with a region."""
        return sorted(self._regions)

    def held(self, seq: int) -> int:
        """Cells in which the sequence has a token; it must have a region."""
        return self._held(self._regions[seq])

    def room(self, seq: int) -> int:
        """Tokens that the sequence can be given before anything must be decided; it must have a region."""
        return self._room(seq, self._regions[seq])

    def grow(self, cells: int) -> None:
        """So many cells more hold a token."""
        self._stored += cells

    @property
    def largest_free(self) -> int:
        """Cells of the largest free run."""
        return self._free.largest

    def next_size(self, size: int) -> int | None:
        """Cells of the region that a sequence moves to when one of that size is full; None where it gets no other."""
        try:
            return self.grown(Region(0, size, size), size + 1)
        except Unsupported:
            return None

    def move_on(self, region: Region, size: int) -> Moves:
        """A full region becomes one of that size, for which there must be a free run; what is to be copied."""
        old = Region(region.start, region.size)
        region.start, region.size = self._take(size), size
        self._release(old)
        return Moves.from_runs([(old.start, region.start, old.size)])

    def region(self, seq: int) -> Region | None:
        """Of a sequence, where it has one."""
        return self._regions.get(seq)

    @property
    def most(self) -> int | None:
        """Cells that a sequence can have a token in at most; None: as many as it has tokens."""
        return self._most

    def usage(self) -> Usage:
        """Read off the free runs: no new region can be larger than the largest."""
        largest, allocated = self._free.largest, self.capacity - self._free.total
        return Usage(self.capacity, self._stored, allocated, largest, len(self._free), largest, self._top())

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from the regions."""
        position = np.full(self.capacity, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.capacity
        for seq in self._regions:
            view = self._view(seq)
            position[view.cells] = view.positions
            for cell in view.cells.tolist():
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """Laid out from the regions."""
        owners = np.full(self.capacity, -1, dtype=np.int64)
        for seq in self._regions:
            owners[self._view(seq).cells] = seq
        return owners

    def _make_room(self, step: Sequence[Chunk]) -> None:
        """Take and grow regions for the whole step; undone if one finds no room."""
        taken: list[tuple[int, Region | None, Region]] = []
        try:
            for chunk in step:
                old, need = self._regions.get(chunk.seq), chunk.start + chunk.n
                if old is None:
                    size = max(self.size_at_start(self._plans.get(chunk.seq, self._default)), self._least(need))
                elif self._least(need) > old.size:
                    size = self.grown(old, need)
                else:
                    continue
                new = Region(self._take(size), size, old.length if old else 0)
                taken.append((chunk.seq, old, new))
                self._regions[chunk.seq] = new
        except (NoSlot, Unsupported) as reason:
            for seq, old, new in reversed(taken):
                self._release(new)
                if old is None:
                    del self._regions[seq]
                else:
                    self._regions[seq] = old
            raise NoSlot(str(reason)) from None
        for _, old, new in taken:
            if old is not None:
                # A step may grow a region twice; what is copied is what has been written by now.
                if old.length:
                    self._owed.append(Moves.from_runs([(old.start, new.start, old.length)]))
                self._release(old)

    def _take(self, size: int) -> int:
        at = self._find(size)
        if at is None:
            raise NoSlot(f"no free run of {size} cells: the largest has {self._free.largest} of {self._free.total}")
        return self._take_at(at, size)

    def _find(self, size: int) -> int | None:
        """The free run that so many cells are taken from, by its number."""
        return self._free.best_of(size) if self.best_fit else self._free.first_of(size, 0)

    def _take_at(self, at: int, size: int) -> int:
        start = self._free.starts[at]
        self._free.take(start, size)
        return start

    def _release(self, region: Region) -> None:
        self._free.give_back(region.start, region.size)

    def _least(self, need: int) -> int:
        """Cells that ``need`` tokens must have."""
        return need

    def _held(self, region: Region) -> int:
        """Cells that hold a token."""
        return region.length

    def _write(self, chunk: Chunk) -> IntArray:
        """Its tokens are there; their cells."""
        self._advance(chunk)
        return self._regions[chunk.seq].start + self._cell_of(np.arange(chunk.start, chunk.start + chunk.n))

    def _advance(self, chunk: Chunk) -> int:
        """A chunk's tokens are there from now on; the cells in which its sequence then has one."""
        region = self._regions[chunk.seq]
        before = self._held(region)
        region.length = chunk.start + chunk.n
        held = self._held(region)
        self._stored += held - before
        return held

    def _cell_of(self, numbers: IntArray) -> IntArray:
        """Where in a region tokens of these numbers lie."""
        return numbers

    def _cells(self, seq: int) -> IntArray:
        region = self._regions[seq]
        return np.arange(region.start, region.start + region.length)

    def _view(self, seq: int) -> View:
        return View(self._cells(seq), np.arange(self._regions[seq].length))

    def _shift(self, chunks: Sequence[Chunk]) -> Shift:
        return NO_SHIFT

    def _top(self) -> int:
        return max((r.start + self._held(r) for r in self._regions.values() if r.length), default=0)


class ReservedPolicy(SequenceRegionPolicy):
    """Room for the longest possible sequence, up front (Hugging Face's static cache)."""

    def size_at_start(self, plan: SequencePlan) -> int:
        """The most that the sequence may ever hold."""
        return plan.max_tokens


class GrowingPolicy(SequenceRegionPolicy):
    """A buffer that is doubled, and copied, when it is full (a dynamic cache that concatenates)."""

    moves_cells = True
    least = 16
    """Cells of the smallest buffer."""

    def size_at_start(self, plan: SequencePlan) -> int:
        """The power of two that holds the prompt."""
        return self._power(plan.prompt_tokens)

    def grown(self, region: Region, need: int) -> int:
        """Twice the size, or more where that is not enough."""
        return max(min(2 * region.size, self.capacity), self._power(need))

    def _power(self, tokens: int) -> int:
        return max(min(max(self.least, 1 << (tokens - 1).bit_length()), self.capacity), tokens)


class OraclePolicy(SequenceRegionPolicy):
    """Knows every length ahead: a region of just the cells that the sequence will fill, best fit.

    Nothing ever moves, no cell is reserved that will not be used, attention reads the sequence alone, and a sequence
    that is let in always ends well. The bound that other policies are measured against; no real server knows lengths.
    """

    best_fit = True

    def size_at_start(self, plan: SequencePlan) -> int:
        """What the sequence will hold at its end."""
        return plan.final_tokens


class RingPolicy(SequenceRegionPolicy):
    """A window of cells for each sequence, the oldest overwritten; the first tokens, the sinks, stay.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). Token ``i`` lies in
    cell ``i`` of the region, or once that is full in cell ``sinks + (i - sinks) mod (window - sinks)``. Rotary
    positions go on until they reach the most that the sequence may hold; then they wrap: the window's tokens are
    renumbered to follow the sinks directly, and their keys rotated back by as much. A micro-batch of several tokens
    is written before it is attended to: its tokens see the sinks and what the window then holds, up to themselves.
    """

    unbounded = True

    def __init__(self, name: str, config: CacheConfig):
        super().__init__(name, config)
        self.window = min(config.window, config.max_tokens, config.cells)
        self._most = self.window
        self.sinks = min(config.sinks, self.window - 1)
        self._n_ubatch = self._crew.max_pass_tokens = min(config.n_ubatch, self.window - self.sinks)
        self._limit = max(config.max_tokens, self.window)
        self._offsets: dict[int, int] = {}
        """Of each sequence: how far its window's rotary positions lie below its tokens' numbers."""
        self._rotations: list[tuple[IntArray, int]] = []
        """Cells and how far to rotate their keys, owed to the next micro-batch."""

    def size_at_start(self, plan: SequencePlan) -> int:
        """The window, or less for a sequence that cannot fill it."""
        return self.window

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """All of a sequence; its tail only while nothing has been overwritten."""
        region = self._regions.get(seq)
        if region is not None and 0 < start < region.length > self.window:
            raise Unsupported(f"{self.name}: the oldest tokens are overwritten, so [{start}, end) cannot be given up")
        super().free(seq, start, stop)
        if seq not in self._regions:
            self._offsets.pop(seq, None)

    def _room(self, seq: int, region: Region) -> int:
        if self._rotations or region.size < self.window:
            return 0
        return self._limit + self._offsets.get(seq, 0) - region.length

    def _least(self, need: int) -> int:
        return min(need, self.window)

    def _held(self, region: Region) -> int:
        return min(region.length, self.window)

    def _advance(self, chunk: Chunk) -> int:
        last = chunk.start + chunk.n - 1
        if last - self._offsets.get(chunk.seq, 0) >= self._limit:
            self._wrap(chunk.seq, self._regions[chunk.seq], chunk.start, last)
        return super()._advance(chunk)

    def _wrap(self, seq: int, region: Region, start: int, last: int) -> None:
        """Renumber so that token ``last`` gets position ``window - 1``; rotate what will be left from before."""
        offset = last - (self.window - 1)
        oldest = max(self.sinks, last + 1 - (self.window - self.sinks))
        stay = np.arange(oldest, start)
        if len(stay):
            self._rotations.append((region.start + self._cell_of(stay), self._offsets.get(seq, 0) - offset))
        self._offsets[seq] = offset

    def _shift(self, chunks: Sequence[Chunk]) -> Shift:
        owed, self._rotations = self._rotations, []
        if not owed:
            return NO_SHIFT
        deltas = [np.full(len(cells), delta, dtype=np.int64) for cells, delta in owed]
        return Shift(np.concatenate([cells for cells, _ in owed]), np.concatenate(deltas))

    def _cell_of(self, numbers: IntArray) -> IntArray:
        around = self.sinks + (numbers - self.sinks) % (self.window - self.sinks)
        return np.asarray(np.where(numbers < self.window, numbers, around))

    def _numbers(self, length: int) -> IntArray:
        """The numbers of the tokens still held, ascending."""
        if length <= self.window:
            return np.arange(length)
        return np.concatenate((np.arange(self.sinks), np.arange(length - (self.window - self.sinks), length)))

    def _cells(self, seq: int) -> IntArray:
        region = self._regions[seq]
        return region.start + self._cell_of(self._numbers(region.length))

    def _view(self, seq: int) -> View:
        numbers = self._numbers(self._regions[seq].length)
        positions = np.where(numbers < self.sinks, numbers, numbers - self._offsets.get(seq, 0))
        return View(self._cells(seq), positions)
