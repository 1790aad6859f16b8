"""Paged memory for sequences that evict single tokens: H2O, SnapKV and StreamingLLM, and what becomes of their holes.

Each group of layers has blocks of its own and evicts by itself. A token keeps its position; its cell becomes a hole. A
block is free again only when it holds no token (vLLM issue 12254 asks how else to have eviction with paged memory).
Holes stay, or are compacted, or are filled with new tokens. Cells hold all heads of a layer, so that budgets for single
heads, as KV-Compress has them (arXiv 2410.00161), cannot be expressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from policies.cells.reads import padded_span, reads_of, table_reads
from policies.cells.token_ranks import AttentionReceived
from policies.cells.token_rules import TokenRule
from policies.paging.growth import blocks_for
from policies.paging.token_blocks import TokenBlocks
from policies.policy import CacheConfig, Policy, Unsupported
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    Group,
    IntArray,
    MicroBatch,
    Moves,
    NoSlot,
    Place,
    Reads,
    SequencePlan,
    Usage,
    split_batch,
)

_UNKNOWN = SequencePlan(0, 0, 0)


class TokenEvictionPolicy(Policy):
    """Evicts tokens by a rule once the pass that they were placed in has run: before the next step is given room.

    Until then they are seen, and their cells taken: a prompt is placed whole, or a pass of it, and then thinned out.
    """

    forgets = True
    can_reserve = True

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
        size, n_blocks = config.block_size, config.cells // config.block_size
        if n_blocks <= 1:
            raise ValueError(f"{config.cells} cells make {n_blocks} blocks of {size}, and block 0 is never handed out")
        layers = config.budget_groups
        self.name = name
        self.block_size = size
        self.groups = (Group(n_blocks * size, share=1 / layers),) * layers
        self.capacity = (n_blocks - 1) * size
        self.kernel = config.kernel or "gather"
        self.moves_cells = compact_above is not None
        self.rule = rule
        self.attention = attention
        """An engine that measures attention may put its own here."""
        self._blocks = tuple(TokenBlocks(n_blocks, size, refill=refill) for _ in self.groups)
        self._compact_above = compact_above
        self._n_ubatch = config.n_ubatch
        self._pad = config.pad
        self._plans: dict[int, SequencePlan] = {}
        self._ends: dict[int, int] = {}
        """The position behind the last token of each sequence that holds any."""
        self._due: dict[int, None] = {}
        """Sequences that have run since tokens were last evicted."""
        self._moves: list[list[Moves]] = [[] for _ in self.groups]
        """By group the copies that no micro-batch has reported yet."""

    # Admission

    def open(self, seq: int, plan: SequencePlan) -> None:
        """Note where the prompt ends."""
        self._plans[seq] = plan

    def refusal(self, plan: SequencePlan) -> str | None:
        """Why all blocks together are too few for what is held at once, or None."""
        most = self.rule.most_held(plan.prompt_tokens, plan.final_tokens, self._n_ubatch)
        if most <= self.capacity:
            return None
        sizes = f"{plan.prompt_tokens} prompt tokens, {plan.final_tokens} in all"
        return f"the request needs {most} cells at once ({sizes}), a sequence can have {self.capacity}"

    def reserve(self, chunk: Chunk, *, whole: int = 0, waits: bool = False) -> bool:
        """Take the blocks that a chunk needs in each group."""
        self._evict_due()
        if not self._make_room({chunk.seq: chunk.n}, whole):
            return False
        for blocks in self._blocks:
            blocks.reserve(chunk.seq, chunk.n)
        return True

    # Placement

    def allocate(self, step: Sequence[Chunk], *, views: bool = False) -> tuple[MicroBatch, ...]:
        """Evict what the last step left beyond the budgets; then place all tokens, or none."""
        if any(chunk.also for chunk in step):
            raise Unsupported(f"{self.name}: sequences cannot share cells in this layout")
        self._evict_due()
        tokens: dict[int, int] = {}
        for seq, start, n, _ in step:
            if start != self._ends.get(seq, 0) + tokens.get(seq, 0):
                raise ValueError(f"{self.name}: sequence {seq} does not end at position {start}")
            tokens[seq] = tokens.get(seq, 0) + n
        if not self._make_room(tokens):
            need = max(sum(blocks.missing(seq, n) for seq, n in tokens.items()) for blocks in self._blocks)
            free = min(len(blocks.pool.free) for blocks in self._blocks)
            raise NoSlot(f"the step needs {need} block{'s' * (need > 1)} of {self.block_size} cells, {free} are free")
        for seq, n in tokens.items():
            for blocks in self._blocks:
                blocks.reserve(seq, n)
        batches = [self._place(chunks, views) for chunks in split_batch(step, self._n_ubatch)]
        self._due.update(dict.fromkeys(tokens))
        return tuple(batches)

    def _make_room(self, tokens: dict[int, int], whole: int = 0) -> bool:
        """Whether there are blocks for so many tokens of each sequence in all groups, perhaps after compaction.

        ``whole``: the prompt of the only sequence must fit as well, as far as it is ever held at once.
        """
        most = blocks_for(self.rule.most_held(whole, whole, self._n_ubatch), self.block_size) if whole else 0
        short = []
        for group, blocks in enumerate(self._blocks):
            least = most - sum([len(blocks.of(seq).blocks) for seq in tokens]) if whole else 0
            free = len(blocks.pool.free)
            if max(sum([blocks.missing(seq, n) for seq, n in tokens.items()]), least) > free:
                if self._compact_above is None or not self._compacting_suffices(blocks, tokens, least):
                    return False
                short.append(group)
        for group in short:
            self._compact_all(group, tokens)
        return True

    def _compacting_suffices(self, blocks: TokenBlocks, tokens: dict[int, int], least: int) -> bool:
        """Whether there would be enough blocks in a group if all sequences were compacted; ``least`` are needed."""
        excess = {seq: blocks.excess_blocks(seq, tokens.get(seq, 0)) for seq in blocks.held}
        # What is compacted has room for its tokens then.
        missing = sum([blocks.missing(seq, n) for seq, n in tokens.items() if excess.get(seq, 0) <= 0])
        freed = sum([more for more in excess.values() if more > 0])
        return max(missing, least) <= len(blocks.pool.free) + freed

    def _place(self, chunks: tuple[Chunk, ...], views: bool) -> MicroBatch:
        """Write the chunks of one forward pass into blocks that they have."""
        places = []
        for blocks, moves in zip(self._blocks, self._moves, strict=True):
            cells = np.concatenate([blocks.write(seq, start, n) for seq, start, n, _ in chunks])
            seen = tuple(blocks.view(chunk.seq) for chunk in chunks) if views else ()
            places.append(Place(cells, self._reads(blocks, chunks), Moves.join(moves), views=seen))
            moves.clear()
        for seq, start, n, _ in chunks:
            self._ends[seq] = start + n
        return MicroBatch(chunks, tuple(places))

    def _reads(self, blocks: TokenBlocks, chunks: Sequence[Chunk]) -> Reads:
        """What attention reads of chunks that have just been written: through a block table, the holes as well."""
        useful = np.array([len(blocks.held[chunk.seq].cells) for chunk in chunks], dtype=np.int64)
        if self.kernel == "gather":
            scanned = np.array([blocks.cells_read(chunk.seq) for chunk in chunks], dtype=np.int64)
            runs = np.array([blocks.blocks_read(chunk.seq) for chunk in chunks], dtype=np.int64)
            return table_reads(chunks, scanned, runs)._replace(useful=useful)
        span = padded_span(blocks.top, self._pad, self.groups[0].cells)
        return reads_of(self.kernel, chunks, lambda seq: blocks.held[seq].cells, span)._replace(useful=useful)

    # Eviction and compaction

    def _evict_due(self) -> None:
        """Evict tokens of the sequences that have run, and compact those that have too many holes then."""
        due, self._due = self._due, {}
        for seq in due:
            prompt = self._plans.get(seq, _UNKNOWN).prompt_tokens
            for group, blocks in enumerate(self._blocks):
                positions = blocks.held[seq].positions
                evicted = self.rule.evicted(positions, prompt, partial(self.attention.scores, group, seq))
                if len(evicted):
                    blocks.evict(seq, evicted)
                    if self._compact_above is not None and blocks.fragmentation(seq) > self._compact_above:
                        self._add_moves(group, blocks.compact(seq))

    def compact(self) -> Moves:
        """Pack each sequence's tokens into as few blocks as hold them; no moves where holes are left to be."""
        if self._compact_above is None:
            return NO_MOVES
        every = [self._compact_all(group, {}) for group in range(len(self.groups))]
        return every[0]

    def _compact_all(self, group: int, tokens: dict[int, int]) -> Moves:
        """Compact a group's sequences, but leave them room for so many more tokens each."""
        blocks = self._blocks[group]
        moves = Moves.join([blocks.compact(seq, tokens.get(seq, 0)) for seq in sorted(blocks.held)])
        self._add_moves(group, moves)
        return moves

    def _add_moves(self, group: int, moves: Moves) -> None:
        if moves.n_runs:
            self._moves[group].append(moves)

    # Giving up cells

    def free(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """All of a sequence; its tail only while none of its tokens has been evicted."""
        end = self._ends.get(seq, 0)
        if (stop is not None and stop <= start) or (start > 0 and start >= end):
            return
        if stop is not None and stop < end:
            raise Unsupported(f"{self.name}: only a sequence's tail can go, not [{start}, {stop}) of {end}")
        if start == 0:
            for blocks in self._blocks:
                blocks.release(seq)
            for known in (self._plans, self._ends, self._due):
                known.pop(seq, None)
            self.attention.forget(seq)
            return
        if not self.can_truncate(seq, start):
            raise Unsupported(f"{self.name}: tokens have been evicted, so [{start}, end) cannot be given up")
        for blocks in self._blocks:
            blocks.truncate(seq, start)
        self._ends[seq] = start

    def can_truncate(self, seq: int, n: int) -> int:
        """``n`` tokens if that is all of the sequence, or as long as none of them has been evicted; otherwise 0."""
        end = self._ends.get(seq, 0)
        if n >= end:
            return end
        return n if all(len(blocks.held[seq].cells) == end for blocks in self._blocks) else 0

    # Looking in

    def sequences(self) -> list[int]:
        """The sequences that hold a block, ascending."""
        return sorted(seq for seq, held in self._blocks[0].held.items() if held.blocks)

    def usage(self) -> Usage:
        """How full the first group's pool is."""
        return self._blocks[0].usage(self.capacity)

    def occupancy(self, group: int = 0) -> CellMap:
        """Laid out from what each sequence holds."""
        position = np.full(self.groups[group].cells, -1, dtype=np.int64)
        owners: list[frozenset[int]] = [frozenset()] * self.groups[group].cells
        for seq, held in self._blocks[group].held.items():
            position[held.cells] = held.positions
            for cell in held.cells.tolist():
                owners[cell] = frozenset({seq})
        return CellMap(position, tuple(owners))

    def first_owners(self, group: int = 0) -> IntArray:
        """Laid out from what each sequence holds."""
        owners = np.full(self.groups[group].cells, -1, dtype=np.int64)
        for seq, held in self._blocks[group].held.items():
            owners[held.cells] = seq
        return owners
