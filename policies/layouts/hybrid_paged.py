"""Paged memory for models whose layers keep different things: vLLM 0.33.0's hybrid KV cache manager.

The layers are in groups, and each group has a block table for each sequence. All take their blocks from one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from policies.cells.reads import table_reads
from policies.content import Content
from policies.paging.block_table import blocks_for, blocks_for_each
from policies.paging.blocks import BlockPool
from policies.paging.cache_groups import GroupSpec, check_groups
from policies.paging.free_lists.lru import LruQueue
from policies.paging.group_manager import GroupManager
from policies.policy import CacheConfig, Policy
from policies.vocabulary import (
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Place,
    SequencePlan,
    Unsupported,
    Usage,
    View,
    split_batch,
)


@dataclass(frozen=True, slots=True)
class HybridOptions:
    """Options of paged memory for groups of layers."""

    groups: tuple[GroupSpec, ...] = ()
    """The groups of layers."""
    prefix_cache: bool = True
    """Full blocks are found again by their content, and states at the ends of blocks."""
    retention: int = 0
    """Tokens between the states and windows that stay cached, besides those at the ends of prompts and where texts
    were seen to part; 0: only these; -1: all."""
    draft_tokens: int = 0
    """Tokens that are drafted for a sequence in each step: one more state for each."""
    lookahead: int = 0
    """How many of them get cells before they are drafted."""
    key_lookahead: int = 0
    """Tokens behind a block that its key in the prefix cache covers: 1 where what drafts reads them (EAGLE, MTP)."""
    watermark: float = 0.0
    """Share of the blocks that a waiting sequence must leave free while others run."""


class HybridPagedPolicy(Policy):
    """Block tables for each group of layers over one pool of blocks; states are in blocks, too.

    A cell is room for a token in all layers that have cells. All blocks are as large as those of the group with most
    layers. States have no cells: their blocks are allocated, and store no token.
    """

    moves_cells = False
    can_reserve = True
    can_free_while_decoding = True
    shared_memory = True

    def __init__(self, name: str, config: CacheConfig):
        """Build an empty cache. Raises ``ValueError`` if no block can be used, or the groups do not fit together."""
        self.name = name
        options = config.read(HybridOptions)
        self.specs = specs = options.groups
        check_groups(specs, prefix_cache=options.prefix_cache, retention=options.retention)
        cells = [spec for spec in specs if spec.holds_cells]
        tokens = lcm(*[spec.block_size for spec in cells])
        weights = [spec.layers * (tokens // spec.block_size) for spec in cells]
        self._cell, self._block = sum(weights), max([spec.layers for spec in specs]) * tokens
        """How large a cell and a block are, in the same unit; and so are the weights of the groups in a cell."""
        n = config.cells * self._cell // self._block
        if n < 2:
            raise ValueError(f"{config.cells} cells make {n} blocks of a group, and block 0 is never handed out")
        self.pool = BlockPool(n, LruQueue)
        self.blocks = GroupManager(
            self.pool,
            specs,
            prefix_cache=options.prefix_cache,
            retention=options.retention,
            watermark=int(options.watermark * n),
            max_tokens=config.max_tokens,
            draft_tokens=options.draft_tokens,
            key_lookahead=options.key_lookahead,
        )
        self._lookahead = options.lookahead
        self.block_size = self.blocks.aligned
        self.capacity = self._cells_of(n - 1)
        self.cuts_chunks = self.blocks.state is not None
        self._parts = [part for part in self.blocks.parts if part.spec.holds_cells]
        """The groups that have cells."""
        self.tables_of_groups = [at for at, spec in enumerate(specs) if spec.holds_cells]
        """For each group that has cells the number of its table."""
        self.groups = tuple(
            Group(n * spec.block_size, spec.window, weight / self._cell, chunked=spec.kind == "chunked")
            for spec, weight in zip(cells, weights, strict=True)
        )
        self._weights = weights
        self.kernel = "gather"
        self._n_ubatch = config.n_ubatch
        self._step_is_placed = False
        """Whether what is asked next belongs to another step."""
        self.compose_ahead(1)

    def _cells_of(self, blocks: int) -> int:
        """The cells that so many blocks make."""
        return blocks * self._block // self._cell

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Note what the sequence will say."""
        self.blocks.open(seq, plan)

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why all blocks together are too few, or None."""
        need, have = 0, self.pool.n - 1
        for part in self.blocks.parts:
            blocks = blocks_for(plan.final_tokens, part.size) if part.spec.holds_cells else 1 + part.draft_tokens
            need += blocks if part.most_blocks is None else min(blocks, part.most_blocks)
        if need <= have:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {need} blocks of all groups ({sizes}), the cache has {have}"

    def match(self, seq: int, content: Content, tokens: int) -> int:
        """Tokens of the longest prefix that all groups have; always fewer than ``tokens``."""
        self._begin_step()
        return self.blocks.match(seq, content, tokens)

    def cached_tokens(self, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix, as ``match`` finds them."""
        return self.blocks.look_up(content, tokens).tokens

    def cut_chunk(self, seq: int, start: int, n: int, *, prompt: int, tokens: int, most: int) -> int:
        """Cut a chunk where states are kept."""
        return self.blocks.cut_chunk(seq, start, n, prompt, tokens, most)

    def _begin_step(self) -> None:
        if self._step_is_placed:
            self._step_is_placed = False
            self.blocks.begin_step()

    # Placement

    def reserve(
        self,
        chunk: Chunk,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
        lookahead: int = 0,
        rejected: int = 0,
    ) -> bool:
        """Take blocks of all groups up to the end of the chunk, and cache what it fills."""
        self._begin_step()
        return self.blocks.reserve(chunk, whole, waits, lookahead, in_flight, known, rejected)

    def reserve_with_drafts(
        self,
        chunk: Chunk,
        lookahead: int,
        *,
        whole: int = 0,
        waits: bool = False,
        in_flight: int = 0,
        known: int | None = None,
    ) -> bool:
        """``reserve``, with blocks of the groups that have cells for ``lookahead`` drafted tokens behind the chunk.

        Those beyond the option ``lookahead`` are drafts in flight that will be rejected: states are behind them.
        """
        return self.reserve(
            chunk,
            whole=whole,
            waits=waits,
            in_flight=in_flight,
            known=known,
            lookahead=min(lookahead, self._lookahead),
            rejected=max(lookahead - self._lookahead, 0),
        )

    def take_back(self, seq: int, start: int) -> None:
        """Forget rejected drafts; blocks stay, for the drafts of the next step."""
        self.blocks.take_back(seq, start)

    def compose_ahead(self, steps: int) -> None:
        """Keep what each of the steps in flight sees."""
        for part in self.blocks.parts:
            part.note_in_flight(steps * self._n_ubatch)

    def note_known(self, seq: int, tokens: int) -> None:
        """Cache what these tokens fill."""
        self.blocks.cache(self.blocks.sequences[seq], tokens)

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Append blocks of all groups where the new tokens need them: all of them, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: a chunk for several sequences at once")
        self._begin_step()
        self.blocks.reserve_step(step)
        self._step_is_placed = True
        return tuple(self._place(chunks, views) for chunks in split_batch(step, self._n_ubatch))

    def _place(self, chunks: tuple[Chunk, ...], views: bool) -> MicroBatch:
        """Write the chunks of one pass into blocks that their tables have."""
        for chunk in chunks:
            self.blocks.write(chunk)
        places = []
        for group, part in enumerate(self._parts):
            cells = [self._cells(group, chunk.seq, chunk.start, chunk.start + chunk.n) for chunk in chunks]
            seen = tuple(self._view(group, chunk.seq) for chunk in chunks) if views else ()
            lengths = np.array([c.start + c.n - part.behind(c.start) * part.size for c in chunks], dtype=np.int64)
            reads = table_reads(chunks, lengths, blocks_for_each(lengths, part.size))
            places.append(Place(np.concatenate(cells), reads, views=seen))
        return MicroBatch(chunks, tuple(places))

    def _cells(self, group: int, seq: int, start: int, stop: int) -> IntArray:
        """The cells of positions ``[start, stop)`` in a group; shape (stop - start,)."""
        size, positions = self._parts[group].size, np.arange(start, stop)
        first = start // size
        table = self.blocks.sequences[seq].tables[self.tables_of_groups[group]]
        blocks = np.array(table.blocks[first : blocks_for(stop, size)], dtype=np.int64)
        return np.asarray(blocks[positions // size - first] * size + positions % size)

    def _view(self, group: int, seq: int) -> View:
        """All cells of a group that hold a token of the sequence, and their positions."""
        held = self.blocks.sequences[seq]
        first = min(self._parts[group].first_held(held.tables[self.tables_of_groups[group]]), held.length)
        return View(self._cells(group, seq, first, held.length), np.arange(first, held.length))

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Give up all blocks of a sequence; a part of it cannot go."""
        held = self.blocks.sequences.get(seq)
        if held is None or (stop is not None and stop <= start) or 0 < held.length <= start:
            return
        if start > 0 or (stop is not None and stop < held.length):
            raise Unsupported(f"{self.name}: a sequence is given up as a whole")
        self.blocks.release(seq)

    # Looking in

    def usage(self) -> Usage:
        """How full the pool is, in cells of all layers; any free block serves any group."""
        extents = self.pool.keep_extents()
        free = self._cells_of(extents.total)
        stored = sum([weight * part.occupancy.stored for weight, part in zip(self._weights, self._parts, strict=True)])
        highest = max([blocks_for(part.occupancy.top, part.size) for part in self._parts])
        return Usage(
            self.capacity,
            int(stored) // self._cell,
            self.capacity - free,
            free,
            extents.lengths.count,
            self._cells_of(extents.largest),
            self._cells_of(highest),
            self._cells_of(self.pool.n_free_cached),
        )

    def sequences(self) -> list[int]:
        """The sequences that hold a block, ascending."""
        return sorted(seq for seq, held in self.blocks.sequences.items() if not held.is_empty)

    def occupancy(self, group: int = 0) -> CellMap:
        """The cell map of a group, laid out from its tables."""
        n = self.groups[group].cells
        position, owners = np.full(n, -1, dtype=np.int64), [frozenset[int]()] * n
        for seq in self.blocks.sequences:
            cells, positions = self._view(group, seq)
            position[cells] = positions
            for cell in cells.tolist():
                owners[cell] = owners[cell] | {seq}
        return CellMap(position, tuple(owners))
