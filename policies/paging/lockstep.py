"""Block tables that grow in lockstep: the count of steps says which sequences begin or fill a block in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import ClassVar

from policies.fast_forward.forecast import MAX_STEPS
from policies.fast_forward.lockstep import BlockSchedule, LockstepBatch, NextStepReads, PassSummary, ReadForecast
from policies.fast_forward.state_sums import StateSums
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable
from policies.paging.growth import next_block_step, steps_covered
from policies.paging.watched_steps import WatchedSteps
from policies.vocabulary import Chunk, Moves

PlaceChunks = Callable[[Sequence[Chunk], int], Sequence[PassSummary]]
"""Places reserved chunks; its second argument is the number of lockstep tokens that the first forward pass has too."""

ReserveChunks = Callable[[Sequence[Chunk], int, Callable[[], bool]], bool]
"""``Admission.reserve_beside``."""

_first_step = itemgetter(0)


class PagedLockstepBatch(LockstepBatch[BlockTable]):
    """Sequences that write into blocks that no other sequence holds.

    Each of them begins a block at one step in every ``block_size``, always at the same remainder of the step count, and
    fills it in the step before it begins the next: they are grouped by that remainder. Blocks are taken and cached in
    the order of single steps; the occupancy of blocks is kept up to date only where it is watched.
    """

    takes_from_pool: ClassVar[bool] = True

    def __init__(
        self,
        blocks: BlockManager,
        place: PlaceChunks,
        reserve_chunks: ReserveChunks,
        max_pass_tokens: int,
        *,
        one_run: bool = False,
    ):
        """``max_pass_tokens``: the most tokens in one forward pass. ``one_run``: each sequence is read as one run."""
        super().__init__(max_pass_tokens)
        self._one_run = one_run
        self._blocks = blocks
        self._reserve_chunks = reserve_chunks
        self._pool = blocks.pool
        self._size = blocks.block_size
        self._place = place
        self._cache_blocks = blocks.cache_full_blocks if blocks.prefix_cache else None
        self._eventful = self._cache_blocks is not None and self._pool.free.tracks_use
        """Whether there may be something to do in a step in which no sequence begins a block: blocks must be cached in
        the order in which they are filled, not just before a lookup."""
        self._in_order = self._eventful or blocks.pages is not None
        """Whether blocks must be taken one by one, in the order of steps."""
        self._begins: dict[int, dict[int, BlockTable]] = {}
        """For each remainder the sequences that begin a block then; remainders without one are left out."""
        self._held = 0
        """Tokens of all sequences in the batch."""
        self._runs = 0
        """Blocks that they lie in, and those set aside for the next step."""
        self._reserved = -1
        """The step for which blocks were set aside last."""

    def join(self, seq: int, place: int = 0) -> bool:
        """Join, unless the sequence has spare blocks or must first copy the shared block that it writes to."""
        table, size = self._blocks.tables.get(seq), self._size
        if table is None:
            return False
        length, n_blocks = table.length, len(table.blocks)
        step = next_block_step(length, n_blocks, size)
        if length == 0 or step >= size or (step and self._pool.holders(table.blocks[-1]) > 1):
            return False
        self._add(seq, table, place)
        self._reserved = -1  # Blocks set aside for a step that was not taken belong to the sequences that got them.
        if self._blocks.watched:
            self._blocks.grow_tail(table)
        if self._cache_blocks is None:
            self._pool.stop_counting()
        remainder = table.begins_at = (self.steps + step) % size
        add_to_group(self._begins, remainder, seq, table)
        self._held += length
        self._runs += n_blocks
        return True

    def leave(self, seq: int) -> None:
        """Leave, keeping all blocks."""
        table = self._drop(seq)
        length = table.length
        if self._blocks.watched:
            self._blocks.stop_tail(table)
        if self._cache_blocks is not None:
            self._cache_blocks(table, length - self._blocks.lag)
        group = self._begins[table.begins_at]
        del group[seq]
        if not group:
            del self._begins[table.begins_at]
        self._held -= length
        self._runs -= len(table.blocks)

    def cache_all_full_blocks(self) -> None:
        """Let all blocks that the sequences have filled be found."""
        if self._cache_blocks is not None:
            for table in self._members.values():
                self._cache_blocks(table, table.length)

    def blocked(self) -> list[int]:
        """Empty: any free block will do."""
        return []

    def reserve_step(self) -> bool:
        """Take a block for each sequence that begins one in the next step."""
        if self._reserved != self.steps:
            begins = self._begins.get(self.steps % self._size)
            if begins and len(begins) > len(self._pool.free):
                return False
            if begins or self._eventful:
                self._set_aside(1, [(0, begins)] if begins else [])
            self._reserved = self.steps
        return True

    def reserve_with(self, step: Sequence[Chunk]) -> bool:
        """Take the blocks of members and chunks in the order of single steps: all of them, or none."""
        if step:
            begins = () if self._reserved == self.steps else self._begins.get(self.steps % self._size, ())
            if not self._reserve_chunks(step, len(begins), self.reserve_step):
                return False
        return self.reserve_step()

    def place(self, step: Sequence[Chunk]) -> Sequence[PassSummary]:
        """Place chunks whose blocks have been reserved."""
        return self._place(step, len(self))

    def next_step_reads(self) -> NextStepReads:
        """One token more for each sequence, and a block more for those that begin one."""
        new = 0 if self._reserved == self.steps else len(self._begins.get(self.steps % self._size, ()))
        runs = len(self._members) if self._one_run else self._runs + new
        return NextStepReads(self._held + len(self._members), runs, self._most_tokens() + 1)

    def forecast(self, n: int) -> ReadForecast | None:
        """Forecast steps until the free blocks run out; with a host tier, up to the next step that takes some."""
        size, members, free = self._size, len(self._members), len(self._pool.free)
        begins, n = sorted(self._steps_until(self._begins), key=_first_step), min(n, MAX_STEPS)
        pages, transfers = self._blocks.pages, self._blocks.transfers
        if pages is not None and pages.due:
            return None
        if transfers is not None:
            # What a taken block held may be copied to the host first, which takes time in that step.
            n = min(n, begins[0][0]) if begins else n
            if len(transfers) or n == 0:
                return None
        if (n // size + 1) * members > free:
            n = min(n, steps_covered([(step, len(group)) for step, group in begins], free, size))
        if self._one_run:
            return ReadForecast(n, self._held, members, members)
        return ReadForecast(n, self._held, members, self._runs, block_size=size, block_starts=begins)

    def max_scanned_per_token(self, n: int) -> int:
        """All tokens of the longest sequence."""
        return self._most_tokens() + n

    def take_step(self) -> None:
        """Give each sequence a token."""
        if self._blocks.watched:
            self._begin_reserved()
            self._blocks.occupancy.take_steps(1, len(self._members))
        self.steps += 1
        self._held += len(self._members)

    def take_steps(self, forecast: ReadForecast, n: int, sums: StateSums | None = None) -> Sequence[Moves]:
        """Take the blocks of ``n`` steps and give each sequence its tokens; nothing is moved."""
        if sums is None:
            self._blocks.stop_watching()
            self._set_aside(n, forecast.block_starts)
        else:
            self._begin_reserved()
            members, runs = len(self._members), self._runs
            watch = WatchedSteps(self._blocks, sums, self.steps, members, self._held, runs, one_run=self._one_run)
            self._set_aside(n, forecast.block_starts, watch)
            watch.take_up_to(self.steps + n)
        self.steps += n
        self._held += n * len(self._members)
        return ()

    def _begin_reserved(self) -> None:
        """The next step is taken: its tokens come into the blocks that have been reserved for it."""
        if self._reserved == self.steps:
            begins = self._begins.get(self.steps % self._size)
            if begins:
                for table in begins.values():
                    self._blocks.occupancy.grow(table.blocks[-1])

    def _set_aside(self, n: int, begins: BlockSchedule, watch: WatchedSteps | None = None) -> None:
        """Take the blocks of the next ``n`` steps, except those of a step that was reserved.

        ``begins``: which sequences take a block, by the first step in which they do.
        """
        if not self._in_order:
            self._begin_all(n, begins, watch)
        else:
            for step in range(self.steps, self.steps + n):
                if self._reserved != step:
                    self._begin(step, watch)

    def _steps_until(self, groups: dict[int, dict[int, BlockTable]]) -> list[tuple[int, dict[int, BlockTable]]]:
        """For each group, kept by the remainder of its steps, the steps before its next one that is not reserved."""
        size, reserved = self._size, self._reserved == self.steps
        first = self.steps + reserved
        return [((remainder - first) % size + reserved, group) for remainder, group in groups.items()]

    def _begin_all(self, n: int, begins: BlockSchedule, watch: WatchedSteps | None) -> None:
        """Take all blocks that the next ``n`` steps begin, and hand them round the sequences in the order of steps."""
        size, in_turn, n_blocks = self._size, list[BlockTable](), 0
        for step, group in begins:
            if step >= n:
                break
            in_turn += group.values()
            n_blocks += len(group) * ((n - 1 - step) // size + 1)
        if not n_blocks:
            return
        self._runs += n_blocks
        if watch is not None:
            self._begin_watched(n, begins, self._pool.take_ahead(n_blocks), watch)
            return
        taken, stride = self._pool.take(n_blocks), len(in_turn)
        for at, table in enumerate(in_turn):
            table.blocks += taken[at::stride]

    def _begin_watched(self, n: int, begins: BlockSchedule, taken: Sequence[int], watch: WatchedSteps) -> None:
        """Hand round the blocks that the next ``n`` steps begin, step by step."""
        used, n_blocks = 0, len(taken)
        for first in range(self.steps, self.steps + n, self._size):
            for step, group in begins:
                if used == n_blocks:
                    return
                watch.take_up_to(first + step)
                for table in group.values():
                    block = taken[used]
                    used += 1
                    table.blocks.append(block)
                    watch.begin_free_block(block)

    def _begin(self, step: int, watch: WatchedSteps | None) -> None:
        """In the order of joining, take the blocks that are begun in this step and cache those that will be full."""
        size, lag = self._size, self._blocks.lag
        begins, fills = self._begins.get(step % size), self._begins.get((step + 1 - lag) % size)
        if begins is None and fills is None:
            return
        begins, fills = begins or {}, fills or {}
        self._runs += len(begins)
        if watch is not None:
            watch.take_up_to(step)
        for seq, table in sorted({**begins, **fills}.items(), key=lambda item: item[1].join_index):
            if seq in begins:
                self._blocks.extend(table, 1, ahead=True)
                if watch is not None:
                    watch.begin_block(table.blocks[-1])
            if seq in fills and self._cache_blocks is not None:
                self._cache_blocks(table, table.length + step - self.steps + 1 - lag)


def add_to_group(groups: dict[int, dict[int, BlockTable]], remainder: int, seq: int, table: BlockTable) -> None:
    """Add a member to the group of a remainder, which stays in the order in which members get their tokens."""
    group = groups.get(remainder)
    if group is None:
        groups[remainder] = {seq: table}
        return
    late = next(reversed(group.values())).join_index > table.join_index
    group[seq] = table
    if late:
        groups[remainder] = dict(sorted(group.items(), key=lambda item: item[1].join_index))
