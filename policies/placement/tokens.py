"""The placement rule of token eviction: each row gives up what exceeds its budget, and then gets its next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.cells.token_ranks import AttentionReceived, DrawnAttention
from policies.cells.token_rules import HeavyHitters, SinksAndRecent, TokenRule
from policies.compiled import i64, vec
from policies.paging.token_blocks import HeldTokens, TokenBlocks
from policies.placement.rule import GroupReads, PassReads, PlacementRule, Row
from policies.vocabulary import NO_MOVES, Chunk, FloatArray, MicroBatch, Moves, split_batch


class Weights:
    """What drawn attention makes of the tokens of a sequence in one group."""

    def __init__(self, weights: FloatArray):
        """``weights``: shape (positions,)."""
        self.of_position = vec[float](weights.tolist())


class TokenRow(Row):
    """A sequence, and what it holds in each group of layers."""

    def __init__(self, seq: int, held: list[HeldTokens]):
        super().__init__(seq)
        self.held = held
        self.prompt: i64 = 0
        """Tokens of its prompt."""
        self.is_due = False
        """Whether it has run since tokens were last evicted."""
        self.due_at: list[int] = [0] * len(held)
        """By group the tokens held from which on some are to be evicted."""
        self.weights: list[Weights | None] = [None] * len(held)
        """By group, where attention is drawn and has been looked at."""


class TokenEvictionRule(PlacementRule):
    """Rows that evict, compact and place as ``allocate`` has it; where room is short, that decides."""

    def __init__(
        self,
        groups: Sequence[TokenBlocks],
        eviction: TokenRule,
        compact_above: float | None,
        capacity: int,
        allocate: Callable[[Sequence[Chunk]], tuple[MicroBatch, ...]],
        max_pass_tokens: int,
    ):
        """``compact_above``: as the policy has it. ``allocate``: the policy's."""
        super().__init__(max_pass_tokens, len(groups))
        self.sequences: dict[int, TokenRow] = {}
        """All that are known to the policy, rows or not."""
        self.attention: AttentionReceived
        self._groups = list(groups)
        self._eviction = eviction
        self._budget: i64 = eviction.budget
        self._oldest: i64 = eviction.sinks if isinstance(eviction, SinksAndRecent) else -1
        """Index of the token that a sequence evicts for one beyond its budget; -1: that depends on attention."""
        self._recent: i64 = eviction.budget // 2 if isinstance(eviction, HeavyHitters) else -1
        """The lightest token before so many is evicted for one beyond the budget; -1: that is not the rule."""
        self._compacts = compact_above is not None
        self._compact_above = 1.0 if compact_above is None else compact_above
        self._capacity = capacity
        self._allocate = allocate
        self._due: list[TokenRow] = []
        """Sequences that have run since tokens were last evicted, in order."""
        self._moves: list[list[Moves]] = [[] for _ in groups]
        """By group the copies that no pass has reported yet."""
        self._factors = vec[float]([])
        """Of drawn attention, by distance from the end."""

    def of(self, seq: int) -> TokenRow:
        """A sequence, which may be new."""
        row = self.sequences.get(seq)
        if row is None:
            row = self.sequences[seq] = TokenRow(seq, [blocks.of(seq) for blocks in self._groups])
        return row

    def _row_for(self, seq: int) -> Row | None:
        row = self.sequences.get(seq)
        return None if row is None or not row.length else row

    # Eviction

    def note_run(self, row: TokenRow) -> None:
        """Have a sequence evict what exceeds its budgets before the next step is given room."""
        if not row.is_due:
            row.is_due = True
            self._due.append(row)

    def evict_due(self) -> None:
        """Evict tokens of the sequences that have run, and compact those that have too many holes then."""
        due, self._due = self._due, []
        for row in due:
            if row.is_due:
                row.is_due = False
                for group, own in enumerate(row.held):
                    if len(own.cells) >= row.due_at[group]:
                        self._evict(row, group, own)

    def _evict(self, row: TokenRow, group: int, own: HeldTokens) -> None:
        """Evict what a sequence holds beyond its budget in a group, and compact it if that leaves too many holes."""
        blocks, at = self._groups[group], self._next_out(row, group, own)
        self.released = True
        if at >= 0:
            blocks.evict_one(own, at)
        else:
            positions, scores = np.array(own.positions), partial(self.attention.scores, group, row.seq)
            which: list[int] = self._eviction.evicted(positions, int(row.prompt), scores).tolist()
            row.due_at[group] = self._eviction.next_due(int(row.length), int(row.prompt))
            if not which:
                return
            blocks.evict(own, which)
        if self._compacts and blocks.fragmentation(own) > self._compact_above:
            self.add_moves(group, blocks.compact(own))

    def _next_out(self, row: TokenRow, group: int, own: HeldTokens) -> i64:
        """Index of the only token to evict; -1 where all that are held must be looked at to tell which go."""
        if len(own.cells) != self._budget + 1 or not row.due_at[group]:
            return -1
        if self._recent < 0:
            return self._oldest
        return self._lightest(row, group, own)

    def _lightest(self, row: TokenRow, group: int, own: HeldTokens) -> i64:
        """Index of the token with the least score before the recent ones, the first of equal ones; -1 where attention
        is not drawn."""
        attention = self.attention
        if not isinstance(attention, DrawnAttention):
            return -1
        positions = own.positions
        last: i64 = positions[-1]
        known = row.weights[group]
        if known is None or last >= len(known.of_position):
            known = row.weights[group] = Weights(attention.weights(group, row.seq, int(last)))
        if last >= len(self._factors):
            self._factors = vec[float](attention.by_distance(int(last)).tolist())
        weights, factors = known.of_position, self._factors
        found: i64 = -1
        least = math.inf
        for at in range(len(positions) - self._recent):
            position: i64 = positions[at]
            score = weights[position] * factors[last - position]
            if score < least:
                found, least = at, score
        return found

    def add_moves(self, group: int, moves: Moves) -> None:
        """Note copies that the next pass is to report."""
        if moves.n_runs:
            self._moves[group].append(moves)

    def settle_moves(self, group: int) -> Moves:
        """The copies in a group that no pass has reported yet; from now on they are reported."""
        moves = self._moves[group]
        if not moves:
            return NO_MOVES
        self._moves[group] = []
        return Moves.join(moves)

    # Steps

    def reserve(self) -> bool:
        """Evict what is due, and take the blocks of the next step."""
        self.evict_due()
        if not self._has_room(()):
            return False
        for row in self.rows:
            assert isinstance(row, TokenRow)
            self._reserve(row, row.n)
        return True

    def reserve_with(self, chunks: Sequence[Chunk]) -> bool:
        """Whether there is room without a compaction; what is reserved is taken as the step is placed."""
        self.evict_due()
        return self._has_room(chunks)

    def _has_room(self, chunks: Sequence[Chunk]) -> bool:
        """Whether there are blocks for the rows' next tokens and for chunks, which continue their sequences."""
        for group, blocks in enumerate(self._groups):
            need: i64 = 0
            for row in self.rows:
                assert isinstance(row, TokenRow)
                need += blocks.missing(row.held[group], row.n)
            for chunk in chunks:
                need += blocks.missing(self.of(chunk.seq).held[group], chunk.n)
            if need and need > len(blocks.pool.free):
                return False
        return True

    def _reserve(self, row: TokenRow, n: i64) -> None:
        for group, blocks in enumerate(self._groups):
            blocks.reserve(row.held[group], n)

    def take_step(self) -> bool:
        """Evict what is due, and give each row its tokens; False where there is no room without a compaction."""
        tokens: i64 = 0
        for row in self.rows:
            tokens += row.n
        if tokens > self.max_pass_tokens:
            return False
        self.evict_due()
        if not self._has_room(()):
            return False
        if len(self.passes) > 1:
            self.passes = self.passes[:1]
        self._begin(self.passes[0])
        self._write_rows(self.passes[0])
        return True

    def place(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        """Take a step with chunks; what makes room by a compaction, or not at all, is left to ``allocate``."""
        rows_tokens: i64 = 0
        tokens: i64 = 0
        continues = True
        for row in self.rows:
            rows_tokens += row.n
        for chunk in chunks:
            tokens += chunk.n
            continues = continues and not chunk.also and chunk.n > 0 and self.of(chunk.seq).length == chunk.start
        self.evict_due()
        if not tokens or not continues or rows_tokens >= self.max_pass_tokens or not self._has_room(chunks):
            return self._place_chunk_by_chunk(chunks)
        for row in self.rows:
            assert isinstance(row, TokenRow)
            self._reserve(row, row.n)
        for chunk in chunks:
            self._reserve(self.of(chunk.seq), chunk.n)
        fits = rows_tokens + tokens <= self.max_pass_tokens
        passes: list[PassReads] = []
        for part in [chunks] if fits else split_batch(chunks, self.max_pass_tokens, int(rows_tokens)):
            work = PassReads(len(self._groups))
            self._begin(work)
            if not passes:
                self._write_rows(work)
            for seq, start, n, _ in part:
                chunked = self.of(seq)
                self._write(work, chunked, start, n)
                chunked.length = start + n
                self.note_run(chunked)
            work.beside = part
            passes.append(work)
        return passes

    def _place_chunk_by_chunk(self, chunks: Sequence[Chunk]) -> Sequence[PassReads]:
        rows = [row for row in self.rows if isinstance(row, TokenRow)]
        lengths = [row.length for row in rows]
        batches = self._allocate([*[Chunk(row.seq, int(row.length), int(row.n)) for row in rows], *chunks])
        for row, length in zip(rows, lengths, strict=True):
            row.length = length
        self._give_tokens()
        return [PassReads.of(batch) for batch in batches]

    def _write_rows(self, work: PassReads) -> None:
        """Write the tokens of all rows in one pass."""
        for row in self.rows:
            assert isinstance(row, TokenRow)
            self._write(work, row, int(row.length), row.n)
            self.note_run(row)
        work.rows = self.rows
        self._give_tokens()

    def _begin(self, work: PassReads) -> None:
        """Make a pass empty but for the copies that are due."""
        work.tokens = work.chunks = 0
        work.rows, work.beside = (), ()
        for at, group in enumerate(work.groups):
            group.single_scanned = group.single_useful = group.single_most = group.single_most_useful = 0
            group.runs = group.span = 0
            if group.longer:
                group.longer = []
            group.moves = self.settle_moves(at)
            group.prepares = group.moves is not NO_MOVES

    def _write(self, work: PassReads, row: TokenRow, start: int, n: i64) -> None:
        """Write tokens of a sequence in a pass, in blocks that it is given where it has not got them."""
        for at, blocks in enumerate(self._groups):
            own, group = row.held[at], work.groups[at]
            if own.reserved < n:
                blocks.reserve(own, n)
            blocks.write(own, start, int(n))
            _count(group, n, own.cells_read(), len(own.cells), own.blocks_read())
        work.tokens += n
        work.chunks += 1

    def look(self) -> None:
        """From what the first group's pool counts."""
        self._note_usage(self._groups[0].usage(self._capacity))


def _count(group: GroupReads, n: i64, scanned: i64, useful: i64, runs: i64) -> None:
    """Count a chunk of ``n`` tokens in what a pass reads."""
    group.runs += runs
    group.span += scanned
    if n > 1:
        group.longer.append((int(n), int(scanned), int(useful)))
        return
    group.single_scanned += scanned
    group.single_useful += useful
    if scanned > group.single_most:
        group.single_most = scanned
    if useful > group.single_most_useful:
        group.single_most_useful = useful
