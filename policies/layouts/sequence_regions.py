"""One contiguous region for each sequence, in one arena: reserved, growing, and the oracle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from policies.cells.reads import padded_span, reads_of
from policies.cells.region_search import region_search
from policies.placement.regions import Region, RegionRule, RegionTable, TokenOrder
from policies.placement.rule import PlacementRule, leave_rule
from policies.policy import CacheConfig, Kernel, Policy
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    OutOfCells,
    Place,
    SequencePlan,
    Unsupported,
    Usage,
    split_batch,
)

if TYPE_CHECKING:
    from policies.cells.region_search import SearchName


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """Options of layouts with a region for each sequence."""

    search: SearchName | None = None
    """How free cells for a region are searched for; None leaves it to the policy."""


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
        self._search = region_search(config.read(RegionOptions).search or self.default_search, config.cells)
        self._table = RegionTable(self._order, self._search)
        self._regions = self._table.regions
        self._plans: dict[int, SequencePlan] = {}
        self._default_plan = SequencePlan(1, config.max_tokens, config.max_tokens)
        self._rule = RegionRule(self._table, self._make_room, config.n_ubatch)

    # Sizes

    @abstractmethod
    def size_at_start(self, plan: SequencePlan) -> int:
        """Cells to take for a sequence when its first tokens come."""

    def larger_size(self, size: int, tokens: int) -> int:
        """Cells of the region that replaces one of ``size`` cells to hold ``tokens``. Raises ``Unsupported``."""
        raise Unsupported(f"{self.name}: a region of {size} cells cannot hold {tokens} tokens")

    @property
    def max_sequence_tokens(self) -> int:
        """The cells of the largest region that there can be."""
        return self._search.most

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Remember the plan, and take the sequence's first region if there is room for it."""
        self._plans[seq] = plan
        size = self.size_at_start(plan)
        if seq not in self._regions and self._search.find(size) is not None:
            self._table.take(seq, size)

    def admits(self, plan: SequencePlan) -> bool:
        """Whether there is room for the sequence's first region, and could be for its last."""
        return self.refusal(plan) is None and self._search.find(self.size_at_start(plan)) is not None

    # Placement

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Take or grow regions where needed: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        moves = self._make_room(step)
        table, order, batches = self._table, self._order, []
        for chunks in split_batch(step, self._n_ubatch):
            cells = np.concatenate([table.write(chunk) for chunk in chunks])
            span = padded_span(table.top(), self._pad, self.capacity)
            reads = reads_of(self.kernel, chunks, table.cells, span, order.max_held)
            seen = tuple(table.view(chunk.seq) for chunk in chunks) if views else ()
            batches.append(MicroBatch(chunks, (Place(cells, reads, moves, order.settle_rotations(), seen),)))
            moves = NO_MOVES
        return tuple(batches)

    def _make_room(self, step: Sequence[Chunk]) -> Moves:
        """Take and grow regions for the whole step, and say what is copied; undone if one finds no room."""
        table, regions, cursor = self._table, self._regions, self._search.cursor
        begun: list[int] = []
        grown: list[tuple[Region, int, int, int]] = []
        """Regions with the cells where they were, and where they begin now: a step may grow one twice."""
        try:
            for seq, start, n, _ in step:
                region, need = regions.get(seq), min(start + n, self._order.max_held)
                if region is None:
                    table.take(seq, max(self.size_at_start(self._plans.get(seq, self._default_plan)), need))
                    begun.append(seq)
                elif need > region.size:
                    first, size = region.start, region.size
                    table.enlarge(region, self.larger_size(size, need))
                    grown.append((region, first, size, region.start))
        except (OutOfCells, Unsupported) as reason:
            for region, first, size, _ in reversed(grown):
                table.put_back(region, first, size)
            for seq in begun:
                table.release(seq)
            self._search.cursor = cursor
            raise OutOfCells(str(reason)) from None
        for _, first, size, _ in grown:
            table.give_back(first, size)
        runs = [(first, now, region.length) for region, first, _, now in grown if region.length]
        return Moves.from_runs(runs) if runs else NO_MOVES

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Drop the tail from ``start``; with everything gone the region is free."""
        region = self._regions.get(seq)
        if region is None or start >= max(region.length, 1) or (stop is not None and stop <= start):
            return
        if stop is not None and stop < region.length:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop})")
        leave_rule([region])
        if start:
            self._table.truncate(region, start)
        else:
            self._table.release(seq)
            self._plans.pop(seq, None)

    # Looking in

    def sequences(self) -> list[int]:
        """The sequences with a region, which may still be empty."""
        return sorted(self._regions)

    def usage(self) -> Usage:
        """From the free extents, and the largest region that the search would find room for."""
        table = self._table
        table.look()
        counts = table.stored, table.allocated, table.placeable, table.free_extents, table.largest_free_extent
        return Usage(self.capacity, *counts, table.top())

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
        for seq in self._regions:
            owners[self._table.cells(seq)] = seq
        return owners

    # The step loop

    def placement_rule(self) -> PlacementRule | None:
        """Rows fill their regions, where attention reads each region alone."""
        return self._rule if self.kernel == "sliced" else None


class ReservedPolicy(SequenceRegionPolicy):
    """Room for the longest possible sequence, up front (Hugging Face's static cache)."""

    has_placement_rule = True

    def size_at_start(self, plan: SequencePlan) -> int:
        """The most that the sequence may ever hold."""
        return min(plan.max_tokens, self.max_sequence_tokens)


class GrowingPolicy(SequenceRegionPolicy):
    """A buffer that is doubled, and copied, when it is full (a dynamic cache that concatenates)."""

    has_placement_rule = True
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

    has_placement_rule = True
    clairvoyant = True
    default_search = "best-fit"

    def size_at_start(self, plan: SequencePlan) -> int:
        """What the sequence will hold at its end."""
        return plan.final_tokens
