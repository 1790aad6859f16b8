"""Block tables that grow in lockstep behind a window: who gives up a block in a step follows from the steps taken."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from policies.fast_forward.lockstep import BlockSchedule, NextStepReads, ReadForecast
from policies.paging.block_table import Paged
from policies.paging.blocks import NULL
from policies.paging.lockstep import PagedLockstepBatch, Tables

_Due = tuple[int, dict[int, Paged]]
"""A step, and whose it is."""


class WindowLockstepBatch(PagedLockstepBatch):
    """A member also gives up a block at one step in every ``size``, from the step on in which its first block is left
    behind: members are kept by that remainder too.

    Within a step each member first gives up a block, then takes one: what is given up may be what the next one takes.
    """

    def __init__(self, about: Tables, window: int, release: Callable[[Sequence[int]], None]):
        """``window``: tokens that attention looks back; ``release``: one sequence fewer holds each of some blocks."""
        super().__init__(about)
        self._window = window
        self._release = release
        self._eventful = True
        self._gives: dict[int, dict[int, Paged]] = {}
        """By the remainder, where there is anybody, in order of joining; without the young."""
        self._young: list[tuple[int, int, int]] = []
        """A heap of, for each member at least that will not give up its first block in the next ``size`` steps: the
        step in which it does, turn, number."""

    def join(self, seq: int) -> bool:
        """Neither if more than one block is behind the window, as when a prompt has just been computed."""
        s, size, window = self._find(seq), self._size, self._window
        if s is None or s.skipped != max(s.length - window, 0) // size or not super().join(seq):
            return False
        length = s.length
        if length < window:
            heapq.heappush(self._young, (self.steps + window + size - 1 - length, s.join_index, seq))
        else:
            self._settle((self.steps + window - 1 - length) % size, seq, s)
        self._held -= s.skipped * size
        self._runs -= s.skipped
        return True

    def leave(self, seq: int) -> None:
        """It keeps the blocks that are left to it."""
        s, size = self._members[seq], self._size
        at = (self.steps + self._window - 1 - s.length) % size
        who = self._gives.get(at)
        if who is not None and who.pop(seq, None) is not None and not who:
            del self._gives[at]
        self._held += s.skipped * size
        self._runs += s.skipped
        super().leave(seq)

    def next_step_reads(self) -> NextStepReads:
        """One token more for each, and without the blocks that are given up for it."""
        scanned, runs, _ = super().next_step_reads()
        gone = 0 if self._reserved == self.steps else self._giving()
        return NextStepReads(scanned - gone * self._size, runs - gone, self.max_scanned_per_token(1))

    def forecast(self, n: int) -> ReadForecast:
        """Until the free blocks run out, if none came back."""
        forecast = super().forecast(n)
        self._mature(self.steps)
        gives, stop = self._when(self._gives), self.steps + forecast.steps
        if self._young and self._young[0][0] < stop:
            young = [
                (first, seq)
                for first, join_index, seq in self._young
                if first < stop and self._is_member(seq, join_index)
            ]
            gives += [(first - self.steps, {seq: self._members[seq]}) for first, seq in young]
        return forecast._replace(block_releases=gives)

    def max_scanned_per_token(self, n: int) -> int:
        """All of its tokens, or as many as are left the step before it gives up a block."""
        most, size = self._window + self._size - 1, self._size
        tokens = self._most_tokens() + n
        if tokens <= most:
            return tokens
        self._mature(self.steps)
        found = max(((self.steps - at) % size for at in self._gives), default=-size) + self._window + n - 1
        while self._young and not self._is_member(self._young[0][2], self._young[0][1]):
            heapq.heappop(self._young)
        if self._young:
            found = max(found, most - (self._young[0][0] - self.steps) + n)
        return min(found, most)

    def _set_aside(self, n: int, begins: BlockSchedule) -> None:
        """In the order of steps, and of joining in each; so many steps at a time that nobody's turn comes twice."""
        size = self._size
        first, stop = self.steps + (self._reserved == self.steps), self.steps + n
        for start in range(first, stop, size):
            self._mature(start)
            end = min(start + size, stop)
            gives, takes = self._due(self._gives, start, end), self._due(self._begins, start, end)
            given = sum([len(who) for _, who in gives])
            self._held -= given * size
            self._runs -= given
            for _, who in takes:
                self._runs += len(who)
            if self._in_order:
                fills = [(step - 1, who) for step, who in self._due(self._begins, start + 1, end + 1)]
                self._one_by_one(gives, takes, fills)
            elif not gives:
                self._take_all(takes)
            elif self._name is None or not self._exchange(gives, takes, start):
                self._one_by_one(gives, takes, [])

    def _due(self, kept: dict[int, dict[int, Paged]], start: int, stop: int) -> list[_Due]:
        """Those whose step is one of these, of which there are ``size`` at most, by their steps."""
        size = self._size
        if stop - start <= len(kept):
            return [(step, who) for step in range(start, stop) if (who := kept.get(step % size)) is not None]
        steps = sorted([(at - start) % size + start for at in kept])
        return [(step, kept[step % size]) for step in steps if step < stop]

    def _take_all(self, begins: Sequence[_Due]) -> None:
        """A block for each, in order."""
        order = [s for _, who in begins for s in who.values()]
        if order:
            for s, block in zip(order, self._pool.take(len(order)), strict=True):
                s.table.append(block)

    def _exchange(self, gives: Sequence[_Due], begins: Sequence[_Due], start: int) -> bool:
        """Take blocks and give up others all at once, from the step ``start`` on, if all that are given up go behind
        those that are free, as what can be found does: then it does not matter what is taken in between. Otherwise
        they are given their keys, no more."""
        keys, name, size = self._pool.keys, self._name, self._size
        assert name is not None
        givers = [s for _, who in gives for s in who.values()]
        for s in givers:
            at = s.skipped
            if s.named <= at:
                name(s, max(s.length + start - self.steps, (at + 1) * size))
        gone = [s.table[s.skipped] for s in givers]
        if any(keys[block] is None for block in gone):
            return False
        self._take_all(begins)
        for s in givers:
            s.table[s.skipped] = NULL
            s.skipped += 1
        self._release(gone)
        return True

    def _one_by_one(self, gives: Sequence[_Due], begins: Sequence[_Due], fills: Sequence[_Due]) -> None:
        """Each gives up a block, then takes one, then lets the one be found that will be full."""
        pool, release, name = self._pool, self._release, self._name
        kinds = enumerate((gives, begins, fills))
        events = [(step, s.join_index, kind, s) for kind, dues in kinds for step, who in dues for s in who.values()]
        events.sort()
        for step, _, kind, s in events:
            if kind == 1:
                s.table.append(pool.take(1)[0])
            elif kind == 0:
                table, at = s.table, s.skipped
                block = table[at]
                table[at] = NULL
                s.skipped = at + 1
                release((block,))
            else:
                assert name is not None
                name(s, s.length + step - self.steps + 1)

    def _giving(self) -> int:
        """How many give up a block in the next step."""
        self._mature(self.steps)
        return len(self._gives.get(self.steps % self._size, ()))

    def _mature(self, step: int) -> None:
        """From this step on those go by their remainder who give up their first block in the ``size`` steps then."""
        while self._young and self._young[0][0] < step + self._size:
            first, join_index, seq = heapq.heappop(self._young)
            if self._is_member(seq, join_index):
                self._settle(first % self._size, seq, self._members[seq])

    def _settle(self, at: int, seq: int, s: Paged) -> None:
        """This one goes by its remainder."""
        who = self._gives.setdefault(at, {})
        late = bool(who) and next(reversed(who.values())).join_index > s.join_index
        who[seq] = s
        if late:
            self._gives[at] = dict(sorted(who.items(), key=lambda item: item[1].join_index))

    def _is_member(self, seq: int, join_index: int) -> bool:
        s = self._members.get(seq)
        return s is not None and s.join_index == join_index
