"""One contiguous region for each sequence, in one arena: reserved, growing, and the oracle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from policies.cells.reads import padded_span, reads_of
from policies.cells.region_search import region_search
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, StepReads, Usages, lengths_after
from policies.fast_forward.lockstep import LockstepBatch, PassSummary
from policies.fast_forward.region_lockstep import Region, RegionLockstepBatch
from policies.layouts.region_table import RegionTable, TokenOrder
from policies.policy import CacheConfig, Kernel, Policy, Unsupported
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    SequencePlan,
    Usage,
    split_batch,
)

if TYPE_CHECKING:
    from policies.cells.region_search import SearchName


class SequenceRegionPolicy(Policy):
    """Gives each sequence a region of its own, whose cells its tokens fill in order.

    A subclass says how large a region is when its sequence starts, and, where it may grow, how large it is then.
    """

    default_search: ClassVar[SearchName] = "first-fit"
    """How regions are searched for where the configuration does not say."""

    def __init__(self, name: str, config: CacheConfig, kernel: Kernel = "sliced", order: TokenOrder | None = None):
        """``order``: which cell of its region each token takes; by default, token ``i`` the ``i``-th."""
        self.name = name
        self.capacity = config.cells
        self.groups = (Group(config.cells),)
        self.kernel = config.kernel or kernel
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._order = order or TokenOrder()
        self._search = region_search(config.search or self.default_search, config.cells)
        self._table = RegionTable(self._order, self._search)
        self._regions = self._table.regions
        self._plans: dict[int, SequencePlan] = {}
        self._default_plan = SequencePlan(1, config.max_tokens, config.max_tokens)
        self._unreported: list[Moves] = []
        """Copies that no micro-batch has reported yet."""
        self._lockstep = RegionLockstepBatch(self._table, self._next_size, self._place_beside, config.n_ubatch)

    # Sizes

    @abstractmethod
    def size_at_start(self, plan: SequencePlan) -> int:
        """Cells to take for a sequence when its first tokens come."""

    def larger_size(self, size: int, tokens: int) -> int:
        """Cells of the region that replaces one of ``size`` cells to hold ``tokens``. Raises ``Unsupported``."""
        raise Unsupported(f"{self.name}: a region of {size} cells cannot hold {tokens} tokens")

    def _next_size(self, size: int) -> int | None:
        """Cells of the region that replaces a full one of ``size`` cells; None where none does."""
        try:
            return self._search.size_of(self.larger_size(size, size + 1))
        except Unsupported:
            return None

    @property
    def max_sequence_tokens(self) -> int:
        """The cells of the largest region that there can be."""
        return self._search.most

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember the plan, and take the sequence's first region if there is room for it."""
        self._plans[seq] = plan
        if seq not in self._regions:
            region = self._table.take_if_free(self.size_at_start(plan))
            if region is not None:
                self._regions[seq] = region

    def admits(self, plan: SequencePlan) -> bool:
        """Whether there is room for the sequence's first region, and could be for its last."""
        return self.refusal(plan) is None and self._search.find(self.size_at_start(plan)) is not None

    # Placement

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Take or grow regions where needed: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        self._make_room(step)
        table, order, batches = self._table, self._order, []
        for chunks in split_batch(step, self._n_ubatch):
            cells = np.concatenate([table.write(chunk) for chunk in chunks])
            span = padded_span(table.top(), self._pad, self.capacity)
            reads = reads_of(self.kernel, chunks, lambda seq: order.cells(self._regions[seq]), span, order.max_held)
            moves, self._unreported = Moves.join(self._unreported), []
            seen = tuple(table.view(chunk.seq) for chunk in chunks) if views else ()
            batches.append(MicroBatch(chunks, (Place(cells, reads, moves, order.settle_rotations(), seen),)))
        return tuple(batches)

    def _place_beside(self, step: Sequence[Chunk], lockstep_tokens: int) -> Sequence[PassSummary]:
        """Place a step whose first pass also has that many tokens of the lockstep batch; cells are not reported."""
        self._make_room(step)
        append, summaries = self._table.append, []
        for chunks in split_batch(step, self._n_ubatch, lockstep_tokens):
            reads = [(chunk.n, append(chunk), 1) for chunk in chunks]
            moves, self._unreported = Moves.join(self._unreported), []
            tokens = sum([n for n, _, _ in reads])
            summaries.append(PassSummary(tokens, reads, moves, self._order.settle_rotations()))
        return summaries

    def _make_room(self, step: Sequence[Chunk]) -> None:
        """Take and grow regions for the whole step; undone if one finds no room."""
        table, regions, cursor = self._table, self._regions, self._search.cursor
        taken: list[tuple[int, Region | None, Region]] = []
        try:
            for chunk in step:
                old, need = regions.get(chunk.seq), chunk.start + chunk.n
                if old is None:
                    plan = self._plans.get(chunk.seq, self._default_plan)
                    size = max(self.size_at_start(plan), self._order.least_size(need))
                elif self._order.least_size(need) > old.size:
                    size = self.larger_size(old.size, need)
                else:
                    continue
                new = table.take(size)
                new.length = old.length if old else 0
                taken.append((chunk.seq, old, new))
                regions[chunk.seq] = new
        except (NoSlot, Unsupported) as reason:
            for seq, old, new in reversed(taken):
                table.release(new)
                if old is None:
                    del regions[seq]
                else:
                    regions[seq] = old
            self._search.cursor = cursor
            raise NoSlot(str(reason)) from None
        for _, old, new in taken:
            if old is not None:
                # A step may grow a region twice; what is copied is what has been written by now.
                if old.length:
                    self._unreported.append(Moves.from_runs([(old.start, new.start, old.length)]))
                table.release(old)

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Drop the tail from ``start``; with everything gone the region is free."""
        region = self._regions.get(seq)
        if region is None or start >= max(region.length, 1) or (stop is not None and stop <= start):
            return
        if stop is not None and stop < region.length:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop})")
        if region.lockstep_batch is not None:
            region.lockstep_batch.leave(seq)
        self._table.truncate(region, start)
        if start == 0:
            self._table.release(region)
            del self._regions[seq]
            self._plans.pop(seq, None)
            self._order.forget(seq)

    # Looking in

    def sequences(self) -> list[int]:
        """The sequences with a region, which may still be empty."""
        return sorted(self._regions)

    def usage(self) -> Usage:
        """From the free extents, and the largest region that the search would find room for."""
        table, free = self._table, self._table.free
        (placeable, largest), allocated = table.largest(), self.capacity - free.total
        return Usage(self.capacity, table.stored, allocated, placeable, len(free), largest, table.top())

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from the regions."""
        position = np.full(self.capacity, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.capacity
        for seq in self._regions:
            view = self._table.view(seq)
            position[view.cells] = view.positions
            for cell in view.cells.tolist():
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """Laid out from the regions."""
        owners = np.full(self.capacity, -1, dtype=np.int64)
        for seq, region in self._regions.items():
            owners[self._order.cells(region)] = seq
        return owners

    # Fast-forwarding

    def plan_decode_steps(self, step: Sequence[Chunk], n: int) -> FastForward | None:
        """Until a region is full, or must be renumbered."""
        table, order = self._table, self._order
        found = [self._regions.get(chunk.seq) for chunk in step]
        if self.kernel != "sliced" or self._unreported or len(step) > self._n_ubatch or None in found:
            return None
        regions = [region for region in found if region is not None]
        steps = min(n, MAX_STEPS, *(order.room(c.seq, r) for c, r in zip(step, regions, strict=True)))
        if steps < 2 or any(r.length != c.start for c, r in zip(step, regions, strict=True)):
            return None
        held = lengths_after([r.length for r in regions], steps, order.max_held)
        scanned = held.sum(axis=1)
        ends = (held + np.array([r.start for r in regions])).max(axis=1)
        reads = StepReads(scanned, scanned, np.full(steps, len(step)), scanned, held.max(axis=1))

        def take_steps(k: int, look: bool) -> Usages | None:
            before, top = self.usage() if look else None, table.top()
            stored = table.stored + scanned[:k] - sum(order.held(r) for r in regions)
            for region in regions:
                region.length += k
            table.stored = int(stored[-1])
            return None if before is None else Usages.repeated(before, k, stored=stored, span=np.maximum(ends[:k], top))

        return FastForward((DecodePass(len(step), (reads,)),), take_steps)

    def lockstep_batch(self) -> LockstepBatch[Any] | None:
        """Sequences that fill their regions, where attention reads each region alone."""
        return self._lockstep if self.kernel == "sliced" else None


class ReservedPolicy(SequenceRegionPolicy):
    """Room for the longest possible sequence, up front (Hugging Face's static cache)."""

    can_fast_forward = True

    def size_at_start(self, plan: SequencePlan) -> int:
        """The most that the sequence may ever hold."""
        return min(plan.max_tokens, self.max_sequence_tokens)


class GrowingPolicy(SequenceRegionPolicy):
    """A buffer that is doubled, and copied, when it is full (a dynamic cache that concatenates)."""

    can_fast_forward = True
    moves_cells = True
    least = 16
    """Cells of the smallest buffer."""

    def size_at_start(self, plan: SequencePlan) -> int:
        """The power of two that holds the prompt."""
        return self._power(plan.prompt_tokens)

    def larger_size(self, size: int, tokens: int) -> int:
        """Twice the size, or more where that is not enough."""
        return max(min(2 * size, self.max_sequence_tokens), self._power(tokens))

    def _power(self, tokens: int) -> int:
        return max(min(max(self.least, 1 << (tokens - 1).bit_length()), self.max_sequence_tokens), tokens)


class OraclePolicy(SequenceRegionPolicy):
    """Knows every length ahead: a region of just the cells that the sequence will fill, by default best fit.

    Nothing ever moves, no cell is reserved that will not be used, attention reads the sequence alone, and an admitted
    sequence always completes. The bound that other policies are measured against; no real server knows lengths.
    """

    can_fast_forward = True
    clairvoyant = True
    default_search = "best-fit"

    def size_at_start(self, plan: SequencePlan) -> int:
        """What the sequence will hold at its end."""
        return plan.final_tokens
