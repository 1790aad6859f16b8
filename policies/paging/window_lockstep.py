"""Block tables that grow in lockstep behind a sliding window: the count of steps also says which give up a block."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from policies.fast_forward.lockstep import BlockSchedule, NextStepReads, ReadForecast
from policies.paging.block_manager import BlockManager
from policies.paging.block_table import BlockTable
from policies.paging.blocks import NULL
from policies.paging.growth import blocks_behind, first_block_behind_step
from policies.paging.lockstep import PagedLockstepBatch, PlaceChunks, ReserveChunks, add_to_group
from policies.paging.watched_steps import WatchedSteps
from policies.vocabulary import Chunk

_Group = dict[int, BlockTable]
"""Sequences that do something in the same step, by their numbers, in the order of joining."""


class WindowLockstepBatch(PagedLockstepBatch):
    """Sequences that also give up a block at one step in every ``block_size``, once the window has left their first.

    They are grouped by the remainder of that step too. Within a step each sequence first gives up a block, then takes
    one, so that what one gives up may be what the next one takes.
    """

    def __init__(self, blocks: BlockManager, place: PlaceChunks, reserve_chunks: ReserveChunks, max_pass_tokens: int):
        """As for ``PagedLockstepBatch``; the block manager has a window."""
        super().__init__(blocks, place, reserve_chunks, max_pass_tokens)
        assert blocks.window is not None
        self._window = blocks.window
        self._eventful = True
        self._gives: dict[int, _Group] = {}
        """For each remainder the sequences that give up a block then, without those in ``_first_gives``; remainders
        without one are left out."""
        self._first_gives: list[tuple[int, int, int]] = []
        """A heap: for each sequence that will not give up its first block in the next ``block_size`` steps the step in
        which it does, its ``join_index``, and its number. Entries of sequences that have left may be in it."""
        self._overdue: _Group = {}
        """Sequences that still hold blocks behind the window, as after a prefill: they give up all in their first
        step, and are then grouped as the others."""
        self._given = -1
        """The step for which blocks were given up before any were taken."""

    def join(self, seq: int, place: int = 0) -> bool:
        """Join as in any paged batch, unless the blocks have been given up that the next token does not see."""
        table, size, window = self._blocks.tables.get(seq), self._size, self._window
        if table is None:
            return False
        seen = table.length - self._blocks.lag
        behind = blocks_behind(seen - 1, window, size)
        if table.skipped > behind or not super().join(seq, place):
            return False
        step = self.steps + first_block_behind_step(seen, window, size)
        if table.skipped < behind:
            self._overdue[seq] = table
        elif seen < window:
            heapq.heappush(self._first_gives, (step, table.join_index, seq))
        else:
            self._add_giver(step % size, seq, table)
        self._given = -1
        self._held -= table.skipped * size
        self._runs -= table.skipped
        return True

    def leave(self, seq: int) -> None:
        """Leave, keeping the blocks that the window still sees."""
        table, size = self._members[seq], self._size
        self._overdue.pop(seq, None)
        remainder = (self.steps + first_block_behind_step(table.length - self._blocks.lag, self._window, size)) % size
        group = self._gives.get(remainder)
        if group is not None and group.pop(seq, None) is not None and not group:
            del self._gives[remainder]
        self._held += table.skipped * size
        self._runs += table.skipped
        super().leave(seq)

    def reserve_with(self, step: Sequence[Chunk]) -> bool:
        """As for other batches. Members give up blocks before the chunks do, also if there is no room then."""
        if self.steps not in (self._reserved, self._given) and any(chunk.start for chunk in step):
            self._give_up(self.steps, [], [], None)
            self._given = self.steps
        return super().reserve_with(step)

    def next_step_reads(self) -> NextStepReads:
        """One token more for each sequence, without the blocks that are given up for it."""
        reads = super().next_step_reads()
        gone = 0 if self.steps in (self._reserved, self._given) else self._given_up_next()
        return NextStepReads(reads.scanned - gone * self._size, reads.runs - gone, self.max_scanned_per_token(1))

    def forecast(self, n: int) -> ReadForecast | None:
        """Forecast steps until the free blocks run out, not counting those that are given up on the way."""
        forecast = super().forecast(n)
        if forecast is None:
            return None
        self._add_due_givers(self.steps)
        gives, stop = self._steps_until(self._gives), self.steps + forecast.steps
        if self._first_gives and self._first_gives[0][0] < stop:
            late = [
                (step, seq)
                for step, join_index, seq in self._first_gives
                if step < stop and self._is_member(seq, join_index)
            ]
            gives += [(step - self.steps, {seq: self._members[seq]}) for step, seq in late]
        return forecast._replace(block_releases=gives)

    def max_scanned_per_token(self, n: int) -> int:
        """All tokens of the longest sequence, or what is left just before it gives up a block."""
        size, held = self._size, self._window + self._blocks.lag
        most = held + size - 1
        tokens = self._most_tokens() + n
        if tokens <= most:
            return tokens
        self._add_due_givers(self.steps)
        found = max(((self.steps - at) % size for at in self._gives), default=-size) + held + n - 1
        while self._first_gives and not self._is_member(self._first_gives[0][2], self._first_gives[0][1]):
            heapq.heappop(self._first_gives)
        if self._first_gives:
            found = max(found, most - (self._first_gives[0][0] - self.steps) + n)
        return min(found, most)

    def _set_aside(self, n: int, begins: BlockSchedule, watch: WatchedSteps | None = None) -> None:
        """Give up and take the blocks of the next ``n`` steps, except those of a step that was reserved.

        This goes by at most ``block_size`` steps at a time, in which no sequence gives up or takes two blocks.
        """
        size = self._size
        first, stop = self.steps + (self._reserved == self.steps), self.steps + n
        if first < stop and (self._overdue or self._given == first):
            takes = self._due(self._begins, first, first + 1)
            for _, group in takes:
                self._runs += len(group)
            self._give_up(first, takes, self._fills(first, first + 1), watch)
            first += 1
        for start in range(first, stop, size):
            self._add_due_givers(start)
            end = min(start + size, stop)
            gives, takes = self._due(self._gives, start, end), self._due(self._begins, start, end)
            n_given = sum([len(group) for _, group in gives])
            self._held -= n_given * size
            self._runs -= n_given
            for _, group in takes:
                self._runs += len(group)
            if self._in_order:
                self._one_by_one(gives, takes, self._fills(start, end), watch)
                continue
            givers = [table for _, group in gives for table in group.values()]
            self._cache_first_blocks(givers, start)
            if watch is not None or not self._exchange(givers, takes):
                self._one_by_one(gives, takes, [], watch)

    def _give_up(
        self,
        step: int,
        takes: Sequence[tuple[int, _Group]],
        fills: Sequence[tuple[int, _Group]],
        watch: WatchedSteps | None,
    ) -> None:
        """In a single step give up what is due, if that was not done before, and what is overdue; take, and cache."""
        if self._given == step:
            self._one_by_one([], takes, fills, watch)
            return
        self._add_due_givers(step)
        gives, overdue = self._due(self._gives, step, step + 1), self._overdue
        n_given = self._given_up_next()
        self._held -= n_given * self._size
        self._runs -= n_given
        if not self._in_order:
            self._cache_first_blocks([table for _, group in gives for table in group.values()], step)
        self._one_by_one([*gives, (step, overdue)], takes, fills, watch)
        for seq, table in overdue.items():
            seen = table.length - self._blocks.lag
            remainder = (self.steps + first_block_behind_step(seen, self._window, self._size)) % self._size
            self._add_giver(remainder, seq, table)
        self._overdue = {}

    def _fills(self, start: int, stop: int) -> list[tuple[int, _Group]]:
        """Where blocks are cached in the order in which they are filled, the groups that fill one, with the step."""
        if not self._in_order:
            return []
        ahead = 1 - self._blocks.lag
        return [(step - ahead, group) for step, group in self._due(self._begins, start + ahead, stop + ahead)]

    def _due(self, groups: dict[int, _Group], start: int, stop: int) -> list[tuple[int, _Group]]:
        """The groups whose step is in ``[start, stop)``, at most ``block_size`` steps; ascending, with that step."""
        size = self._size
        if stop - start <= len(groups):
            return [(step, group) for step in range(start, stop) if (group := groups.get(step % size)) is not None]
        steps = sorted([(remainder - start) % size + start for remainder in groups])
        return [(step, groups[step % size]) for step in steps if step < stop]

    def _take_all(self, begins: Sequence[tuple[int, _Group]]) -> None:
        """Take a block for each of these sequences, in order."""
        in_turn = [table for _, group in begins for table in group.values()]
        if in_turn:
            for table, block in zip(in_turn, self._pool.take(len(in_turn)), strict=True):
                table.blocks.append(block)

    def _cache_first_blocks(self, givers: Sequence[BlockTable], start: int) -> None:
        """Cache the first blocks of these sequences, which they give up from step ``start`` on."""
        cache_blocks, size = self._cache_blocks, self._size
        if cache_blocks is None:
            return
        for table in givers:
            at = table.skipped
            if table.n_keyed <= at:
                cache_blocks(table, max(table.length + start - self.steps - self._blocks.lag, (at + 1) * size))

    def _exchange(self, givers: Sequence[BlockTable], begins: Sequence[tuple[int, _Group]]) -> bool:
        """Take all blocks that are begun, then give up the givers' first ones, if that comes to the same; else False.

        It does if all that are given up are cached: these go behind those that are free.
        """
        keys = self._pool.keys
        gone = [table.blocks[table.skipped] for table in givers]
        if any(keys[block] is None for block in gone):
            return False
        self._take_all(begins)
        for table in givers:
            table.blocks[table.skipped] = NULL
            table.skipped += 1
        self._blocks.give_up(gone)
        return True

    def _one_by_one(
        self,
        gives: Sequence[tuple[int, _Group]],
        begins: Sequence[tuple[int, _Group]],
        fills: Sequence[tuple[int, _Group]],
        watch: WatchedSteps | None,
    ) -> None:
        """In each step each in turn gives up a block, takes one, and caches the one that will be full.

        Where a step is placed as a whole, all give up theirs before any takes one.
        """
        pool, cache_blocks = self._pool, self._cache_blocks
        kinds = enumerate((gives, begins, fills))
        first = self.places_whole_steps
        events = [
            (step, first and kind > 0, s.join_index, kind, s)
            for kind, due in kinds
            for step, group in due
            for s in group.values()
        ]
        events.sort()
        for step, _, _, kind, table in events:
            if watch is not None and kind < 2:
                watch.take_up_to(step)
            if kind == 1:
                (block,) = pool.take(1)
                table.blocks.append(block)
                if watch is not None:
                    watch.begin_block(block)
            elif kind == 0:
                before = table.skipped
                self._blocks.skip_behind_window(table, table.length + step - self.steps - self._blocks.lag)
                if watch is not None:
                    watch.give_up_blocks(table.skipped - before)
            else:
                assert cache_blocks is not None
                cache_blocks(table, table.length + step - self.steps + 1 - self._blocks.lag)

    def _given_up_next(self) -> int:
        """Number of blocks given up in the next step."""
        self._add_due_givers(self.steps)
        found = len(self._gives.get(self.steps % self._size, ()))
        for table in self._overdue.values():
            found += blocks_behind(table.length - self._blocks.lag, self._window, self._size) - table.skipped
        return found

    def _add_due_givers(self, step: int) -> None:
        """Group those that give up their first block in the ``block_size`` steps from this one on by remainder."""
        while self._first_gives and self._first_gives[0][0] < step + self._size:
            first, join_index, seq = heapq.heappop(self._first_gives)
            if self._is_member(seq, join_index):
                self._add_giver(first % self._size, seq, self._members[seq])

    def _add_giver(self, remainder: int, seq: int, table: BlockTable) -> None:
        """Add a sequence to those that give up a block at a remainder."""
        add_to_group(self._gives, remainder, seq, table)

    def _is_member(self, seq: int, join_index: int) -> bool:
        table = self._members.get(seq)
        return table is not None and table.join_index == join_index
