"""Paged memory for sequences that evict single tokens: H2O, SnapKV and StreamingLLM, and what becomes of their holes.

Each group of layers has blocks of its own and evicts by itself. A token keeps its position; its cell becomes a hole. A
block is free again only when it holds no token (vLLM issue 12254 asks how else to have eviction with paged memory).
Holes stay, or are compacted, or are filled with new tokens. Cells hold all heads of a layer, so that budgets for single
heads, as KV-Compress has them (arXiv 2410.00161), cannot be expressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.cells.reads import padded_span, reads_of, table_reads
from policies.cells.token_ranks import AttentionReceived
from policies.cells.token_rules import TokenRule
from policies.paging.block_table import blocks_for
from policies.paging.token_blocks import HeldTokens, TokenBlocks
from policies.placement.rule import PlacementRule, leave_rule
from policies.placement.tokens import TokenEvictionRule, TokenRow
from policies.policy import CacheConfig, Policy
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
    Reads,
    SequencePlan,
    Unsupported,
    Usage,
    View,
    split_batch,
)


@dataclass(frozen=True, slots=True)
class TokenEvictionOptions:
    """Options of this layout and its rules."""

    block_size: int = 16
    """Cells in a block."""
    budget: int = 256
    """Tokens that each sequence keeps in each group of layers."""
    budget_groups: int = 1
    """Equal groups of layers, each of which evicts by itself."""
    sinks: int = 4
    """First tokens of each sequence that StreamingLLM never evicts."""
    threshold: float = 0.1
    """Fragmentation of a sequence above which it is compacted, where holes are filled."""
    attention: AttentionReceived | None = None
    """What an engine measures of attention; None: it is drawn."""
    seed: int = 0
    """The attention that is drawn depends on it."""


class TokenEvictionPolicy(Policy):
    """Evicts tokens by a rule once the pass that they were placed in has run: before the next step is given room.

    Until then they are seen, and their cells taken: a prompt is placed whole, or a pass of it, and then thinned out.
    """

    forgets = True
    can_reserve = True
    can_free_while_decoding = True
    has_placement_rule = True

    def __init__(
        self,
        name: str,
        config: CacheConfig,
        rule: TokenRule,
        attention: AttentionReceived,
        *,
        compact_above: float | None = None,
        refill: bool = False,
    ):
        """Build an empty cache; raises ``ValueError`` if no block can be used.

        ``attention``: what tokens are ranked by. ``compact_above``: a sequence whose fragmentation exceeds that is
        compacted, and all are when a block is missing; None: holes stay. ``refill``: new tokens go to the holes.
        """
        options = config.read(TokenEvictionOptions)
        size, n_blocks = options.block_size, config.cells // options.block_size
        if n_blocks <= 1:
            raise ValueError(f"{config.cells} cells make {n_blocks} blocks of {size}, and block 0 is never handed out")
        layers = options.budget_groups
        self.name = name
        self.block_size = size
        self.groups = (Group(n_blocks * size, share=1 / layers),) * layers
        self.capacity = (n_blocks - 1) * size
        self.kernel = config.kernel or "gather"
        self.moves_cells = compact_above is not None
        self.rule = rule
        self._blocks = tuple(TokenBlocks(n_blocks, size, refill=refill) for _ in self.groups)
        self._compact_above = compact_above
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._placement_rule = TokenEvictionRule(
            self._blocks, rule, compact_above, self.capacity, self.allocate, config.n_ubatch
        )
        self._placement_rule.attention = attention
        self._sequences = self._placement_rule.sequences

    @property
    def attention(self) -> AttentionReceived:
        """What tokens are ranked by. An engine that measures attention may put its own here."""
        return self._placement_rule.attention

    @attention.setter
    def attention(self, attention: AttentionReceived) -> None:
        self._placement_rule.attention = attention

    def placement_rule(self) -> PlacementRule | None:
        """Rows evict tokens and take blocks as it comes, where attention reads through a block table."""
        return self._placement_rule if self.kernel == "gather" else None

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Note where the prompt ends."""
        row = self._placement_rule.of(seq)
        row.prompt = plan.prompt_tokens
        row.due_at = [0] * len(self.groups)

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why all blocks together are too few for what is held at once, or None."""
        most = self.rule.most_held(plan.prompt_tokens, plan.final_tokens, self._n_ubatch)
        if most <= self.capacity:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {most} cells at once ({sizes}), a sequence can have {self.capacity}"

    def reserve(
        self, chunk: Chunk, *, whole: int = 0, waits: bool = False, in_flight: int = 0, known: int | None = None
    ) -> bool:
        """Take the blocks that a chunk needs in each group."""
        self._placement_rule.evict_due()
        row = self._placement_rule.of(chunk.seq)
        if not self._make_room({row: chunk.n}, whole):
            return False
        self._reserve({row: chunk.n})
        return True

    def _reserve(self, tokens: dict[TokenRow, int]) -> None:
        """Take the blocks that are missing for so many tokens of each sequence."""
        for row, n in tokens.items():
            for blocks, own in zip(self._blocks, row.held, strict=True):
                blocks.reserve(own, n)

    # Placement

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Evict what the last step left beyond the budgets; then place all tokens, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        rule = self._placement_rule
        rule.evict_due()
        tokens: dict[TokenRow, int] = {}
        for seq, start, n, _ in step:
            row = rule.of(seq)
            if start != row.length + tokens.get(row, 0):
                raise ValueError(f"{self.name}: sequence {seq} does not end at position {start}")
            tokens[row] = tokens.get(row, 0) + n
        if not self._make_room(tokens):
            need = max(self._missing(group, tokens) for group in range(len(self._blocks)))
            free = min(len(blocks.pool.free) for blocks in self._blocks)
            raise OutOfCells(
                f"the step needs {need} block{'s' * (need > 1)} of {self.block_size} cells, {free} are free"
            )
        self._reserve(tokens)
        batches = [self._place(chunks, views) for chunks in split_batch(step, self._n_ubatch)]
        for row in tokens:
            rule.note_run(row)
        return tuple(batches)

    def _missing(self, group: int, tokens: dict[TokenRow, int]) -> int:
        """Blocks of a group that so many tokens of each sequence take."""
        blocks = self._blocks[group]
        return sum([blocks.missing(row.held[group], n) for row, n in tokens.items()])

    def _make_room(self, tokens: dict[TokenRow, int], whole: int = 0) -> bool:
        """Whether there are blocks for so many tokens of each sequence in all groups, perhaps after compaction.

        ``whole``: the prompt of the only sequence must fit as well, as far as it is ever held at once.
        """
        most = blocks_for(self.rule.most_held(whole, whole, self._n_ubatch), self.block_size) if whole else 0
        short = []
        for group, blocks in enumerate(self._blocks):
            least = most - sum([len(row.held[group].blocks) for row in tokens]) if whole else 0
            if max(self._missing(group, tokens), least) > len(blocks.pool.free):
                if self._compact_above is None or not self._compacting_suffices(group, tokens, least):
                    return False
                short.append(group)
        for group in short:
            self._compact_all(group, tokens)
        return True

    def _compacting_suffices(self, group: int, tokens: dict[TokenRow, int], least: int) -> bool:
        """Whether there would be enough blocks in a group if all sequences were compacted; ``least`` are needed."""
        blocks = self._blocks[group]
        excess = {row: blocks.excess_blocks(row.held[group], tokens.get(row, 0)) for row in self._sequences.values()}
        # What is compacted has room for its tokens then.
        missing = self._missing(group, {row: n for row, n in tokens.items() if excess[row] <= 0})
        freed = sum([more for more in excess.values() if more > 0])
        return max(missing, least) <= len(blocks.pool.free) + freed

    def _place(self, chunks: tuple[Chunk, ...], views: bool) -> MicroBatch:
        """Write the chunks of one forward pass into blocks that they have."""
        rule, places = self._placement_rule, []
        for group, blocks in enumerate(self._blocks):
            held = [self._sequences[chunk.seq].held[group] for chunk in chunks]
            cells = []
            for (_, start, n, _), own in zip(chunks, held, strict=True):
                blocks.write(own, start, n)
                cells += own.cells[-n:]
            seen = tuple(_view(own) for own in held) if views else ()
            reads = self._reads(blocks, chunks, held)
            places.append(Place(np.array(cells, dtype=np.int64), reads, rule.settle_moves(group), views=seen))
        for seq, start, n, _ in chunks:
            self._sequences[seq].length = start + n
        return MicroBatch(chunks, tuple(places))

    def _reads(self, blocks: TokenBlocks, chunks: Sequence[Chunk], held: Sequence[HeldTokens]) -> Reads:
        """What attention reads of chunks that have just been written: through a block table, the holes as well."""
        useful = np.array([len(own.cells) for own in held], dtype=np.int64)
        if self.kernel == "gather":
            scanned = np.array([own.cells_read() for own in held], dtype=np.int64)
            runs = np.array([own.blocks_read() for own in held], dtype=np.int64)
            return table_reads(chunks, scanned, runs)._replace(useful=useful)
        span = padded_span(blocks.top, self._pad, self.groups[0].cells)
        return reads_of(self.kernel, chunks, lambda seq: _view(blocks.held[seq]).cells, span)._replace(useful=useful)

    # Compaction

    def compact(self) -> Moves:
        """Pack each sequence's tokens into as few blocks as hold them; no moves where holes are left to be."""
        if self._compact_above is None:
            return NO_MOVES
        every = [self._compact_all(group, {}) for group in range(len(self.groups))]
        return every[0]

    def _compact_all(self, group: int, tokens: dict[TokenRow, int]) -> Moves:
        """Compact a group's sequences, but leave them room for so many more tokens each."""
        blocks, rows = self._blocks[group], self._sequences
        moves = Moves.join([blocks.compact(rows[seq].held[group], tokens.get(rows[seq], 0)) for seq in sorted(rows)])
        self._placement_rule.add_moves(group, moves)
        return moves

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """All of a sequence; its tail only while none of its tokens has been evicted."""
        row = self._sequences.get(seq)
        end = 0 if row is None else row.length
        if (stop is not None and stop <= start) or (start > 0 and start >= end):
            return
        if stop is not None and stop < end:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop}) of {end}")
        if start and not self.can_truncate(seq, start):
            raise Unsupported(f"{self.name}: tokens have been evicted, so [{start}, end) cannot be given up")
        if row is None:
            return
        leave_rule([row])
        if start == 0:
            for blocks in self._blocks:
                blocks.release(seq)
            row.is_due = False
            del self._sequences[seq]
            self.attention.forget(seq)
            return
        for blocks, own in zip(self._blocks, row.held, strict=True):
            blocks.truncate(own, start)
        row.weights = [None] * len(self.groups)
        row.length = start

    def can_truncate(self, seq: int, n: int) -> int:
        """``n`` tokens if that is all of the sequence, or as long as none of them has been evicted; otherwise 0."""
        row = self._sequences.get(seq)
        if row is None or n >= row.length:
            return 0 if row is None else row.length
        return n if all(len(own.cells) == row.length for own in row.held) else 0

    # Looking in

    def sequences(self) -> list[int]:
        """The sequences that hold a block, ascending."""
        return sorted(seq for seq, row in self._sequences.items() if row.held[0].blocks)

    def usage(self) -> Usage:
        """How full the first group's pool is."""
        return self._blocks[0].usage(self.capacity)

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from what each sequence holds."""
        position = np.full(self.groups[group].cells, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.groups[group].cells
        for seq, own in self._blocks[group].held.items():
            position[own.cells] = own.positions
            for cell in own.cells:
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """Laid out from what each sequence holds."""
        owners = np.full(self.groups[group].cells, -1, dtype=np.int64)
        for seq, own in self._blocks[group].held.items():
            owners[own.cells] = seq
        return owners


def _view(own: HeldTokens) -> View:
    """The cells that hold a token of a sequence, in order of position."""
    return View(np.array(own.cells, dtype=np.int64), np.array(own.positions, dtype=np.int64))
