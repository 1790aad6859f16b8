"""The free cells that an arena's next searches find: decode steps go along them, cell after cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.reads import constants, padded_span, padded_spans
from policies.cells.search import Cells, cells_array, in_order, start_of_search
from policies.compaction.triggers import Facts, TriggerForecast
from policies.fast_forward.forecast import MAX_STEPS, DecodePass, FastForward, StepReads, Usages
from policies.fast_forward.tiles import TileMap
from policies.vocabulary import Chunk, IntArray


class FreeCellPath:
    """What at most ``n`` steps in a row would take, on the way up from the head, whatever it steps over. Changes
    nothing until ``take``.

    ``anywhere``: a step takes free cells wherever they lie, otherwise in a row.
    """

    _spans: IntArray | None = None

    def __init__(
        self,
        arena: Arena,
        step: Sequence[Chunk],
        n: int,
        pad: int,
        *,
        anywhere: bool,
    ):
        self.arena = arena
        self.step = step
        self._pad = pad
        self._anywhere = anywhere
        tokens, used, free = len(step), arena.used, arena.free
        head = start_of_search(arena.head, used, tokens)
        self._at = at = free.index_after(head)
        self.steps = 0
        """That find room, each with the cells behind those of the one before."""
        self.cells: Cells = range(0)
        """What they take, step after step; shape (steps * tokens,)."""
        n = min(n, MAX_STEPS)
        if n < 1 or at == len(free):
            return
        first = max(free.starts[at], head)
        room = (free.ends[at] - first) // tokens
        # From the second step on, a search begins anew from 0 where the head is too far beyond what is in use.
        if room >= n and (first <= used + 2 * tokens or self._is_lowest(first)):
            self.steps, self.cells = n, range(first, first + n * tokens)
        else:
            self._step_over(first, n)

    def _is_lowest(self, first: int) -> bool:
        """Whether no cells below the first could be taken, so that searches from 0 end there too. What the steps leave
        behind them on their way is too short as well."""
        free, at = self.arena.free, self._at
        if free.starts[at] < first:
            return False
        return at == 0 or (not self._anywhere and free.first_of(len(self.step), 0, at) is None)

    def _step_over(self, first: int, n: int) -> None:
        """Go on from run to run, but not round the end."""
        tokens = len(self.step)
        # No more runs than cells are needed where any will do.
        starts, ends = self.arena.free.arrays(self._at, self._at + n * tokens if self._anywhere else None)
        lengths = ends - starts
        lengths[0] = ends[0] - first
        if not self._anywhere:
            lengths -= lengths % tokens
        found = min(n, int(lengths.sum()) // tokens)
        if found == 0:
            return
        starts = starts.copy()
        starts[0] = first
        cells = in_order(starts, lengths, found * tokens)
        heads = cells[tokens - 1 :: tokens] + 1
        far = heads[:-1] > self.arena.used + tokens * np.arange(3, found + 2)
        if far.any() and not self._is_lowest(first):
            found = int(far.argmax()) + 1
        self.steps, self.cells = found, cells[: found * tokens]

    @property
    def heads(self) -> IntArray:
        """One past the last cell of each step; shape (steps,)."""
        tokens = len(self.step)
        if isinstance(self.cells, range):
            return np.arange(self.cells.start + tokens, self.cells.stop + 1, tokens)
        return self.cells[tokens - 1 :: tokens] + 1

    def tops(self) -> IntArray:
        """One past the highest used cell after each step; shape (steps,)."""
        return np.maximum(self.heads, self.arena.top)

    def spans(self) -> IntArray:
        """What attention over all cells reads in each step; shape (steps,)."""
        if self._spans is None:
            top, cells, pad, size = self.arena.top, self.cells, self._pad, self.arena.size
            if self.steps and max(int(cells[0]), int(cells[-1])) < top:
                self._spans = np.full(self.steps, padded_span(top, pad, size))
            elif isinstance(cells, range) and pad <= top <= cells.start and not pad & (pad - 1):
                tokens = len(self.step)
                self._spans = np.arange(cells.start + tokens + pad - 1, cells.stop + pad, tokens)
                self._spans &= -pad
                if cells.stop > size - pad:
                    np.minimum(self._spans, size, out=self._spans)
            else:
                self._spans = padded_spans(self.tops(), self._pad, self.arena.size)
        return self._spans

    def bounds(self) -> tuple[Facts, int]:
        """For triggers: of at least one step, the least that is used and above, and the largest top and span; and the
        most padded cells that packing would save."""
        arena, spans, used = self.arena, self.spans(), self.arena.used
        first, last = int(self.cells[0]), int(self.cells[-1])

        def above() -> int:
            # Holes below what is used at the end are filled by no more cells than are taken.
            untouched = min(first, last) >= used + len(self.cells)
            return arena.count_above() - (0 if untouched else len(self.cells))

        pad, span, top = self._pad, int(spans[-1]), max(arena.top, first + 1, last + 1)
        holes = span - min(span, -(-used // pad) * pad)
        if isinstance(self.cells, range) and used:
            # Where the top rises, so does what is used.
            holes = min(holes, -(-(max(arena.top, first) - used) // pad) * pad)
        return Facts(used, top, span, pad, len(self.step), above), holes

    def forecast(self) -> TriggerForecast:
        """For triggers: now, and after each step."""
        arena, tokens = self.arena, len(self.step)
        tops = np.concatenate(([arena.top], self.tops()))
        used = arena.used + tokens * np.arange(self.steps + 1)
        spans = padded_spans(tops, self._pad, arena.size)

        def above() -> IntArray:
            holes = arena.free.below(used)
            if isinstance(self.cells, range):
                filled = np.clip(used - self.cells.start, 0, tokens * np.arange(self.steps + 1))
            else:
                # Of the cells below, those that were taken by then: cells ascend as the steps do.
                filled = np.minimum(np.searchsorted(self.cells, used), tokens * np.arange(self.steps + 1))
            return holes - filled

        return TriggerForecast(used, tops, spans, self._pad, tokens, above)

    def take(self, k: int, *, look: bool) -> Usages | None:
        """Take ``k`` steps' cells; ``look``: say how full the cache is after each."""
        usages = self.usages(k) if look else None
        self.arena.take_steps(self.cells[: k * len(self.step)], self.step, k)
        return usages

    def head_after(self, k: int) -> int:
        """One past the last cell of the ``k``-th step."""
        return int(self.cells[k * len(self.step) - 1]) + 1

    def table(self, k: int) -> IntArray:
        """The cells of the first ``k`` steps; shape (k, len(step))."""
        return cells_array(self.cells)[: k * len(self.step)].reshape(k, len(self.step))

    def fast_forward(
        self, steps: int, take: Callable[[int, bool], Usages | None], tiles: TileMap | None = None
    ) -> FastForward | None:
        """The first ``steps`` of them, under the kernel ``masked``, or where there are ``tiles`` under ``tiled``; None
        where that is not worth it."""
        if steps < 2:
            return None
        if tiles is None:
            sums = masked_sums(self.step, self.spans()[:steps])
        else:
            sums = tiles.plan_steps(self.step, self.table(steps))
        return FastForward((DecodePass(len(self.step), (sums,)),), take)

    def usages(self, k: int) -> Usages:
        """How full the cache will be after each of the first ``k`` steps."""
        arena, tokens = self.arena, len(self.step)
        taken = tokens * np.arange(1, k + 1)
        used = arena.used + taken
        runs, largest = runs_after(*arena.free.arrays(), self.cells[: k * tokens], taken)
        return Usages(
            stored=used,
            allocated=used,
            placeable=arena.size - used if self._anywhere else largest,
            free_extents=runs,
            largest_free_extent=largest,
            span=self.tops()[:k],
            cached=np.zeros(k, dtype=np.int64),
        )


def masked_sums(step: Sequence[Chunk], spans: IntArray, most: int | None = None, streams: int = 1) -> StepReads:
    """What steps read under the kernel ``masked``, of each of which ``spans`` says up to where; ``most``: tokens that a
    sequence can see at most; ``streams``: how many are read that far."""
    steps, tokens = len(spans), len(step)
    useful: IntArray
    if most is not None and min([chunk.start for chunk in step]) + 1 >= most:
        useful = constants(tokens * most, steps)
    elif most is None or max([chunk.start for chunk in step]) + steps <= most:
        now = sum([chunk.start for chunk in step])
        useful = np.arange(now + tokens, now + tokens * (steps + 1), tokens)
    else:
        starts = np.array([chunk.start for chunk in step])
        useful = np.minimum(starts + np.arange(1, steps + 1)[:, None], most).sum(axis=1)
    whole = spans * streams if streams > 1 else spans
    return StepReads(tokens * spans if tokens > 1 else spans, useful, constants(tokens, steps), whole, spans)


def runs_after(starts: IntArray, ends: IntArray, cells: Cells, taken: IntArray) -> tuple[IntArray, IntArray]:
    """How many free runs there are, and how long the longest is, when so many of ``cells``, which rise, have been
    taken; both of shape (len(taken),), as ``taken``, which rises too."""
    lengths = ends - starts
    first = int(cells[0])
    at = int(np.searchsorted(ends, first, side="right"))
    before = first - int(starts[at])
    in_a_row = isinstance(cells, range)
    # From the first run that is taken from on: how much goes in all, up to and with each run.
    gone = np.array([len(cells)]) if in_a_row else np.searchsorted(cells, ends[at:])
    rest = lengths[at : at + len(gone)].copy()
    rest[0] -= before
    others = max(before, lengths[:at].max(initial=0), lengths[at + len(gone) :].max(initial=0))
    now = np.searchsorted(gone, taken)
    """The run that each step ends in."""
    done = np.diff(gone, prepend=0)
    left = rest[now] - (taken - (gone[now] - done[now]))
    behind = np.maximum.accumulate(np.concatenate(([0], rest - done)))[now]
    ahead = np.maximum.accumulate(np.concatenate((rest, [0]))[::-1])[::-1][now + 1]
    largest = np.maximum(np.maximum(left, others), np.maximum(behind, ahead))
    emptied = np.concatenate(([0], np.cumsum(rest == done)))[now]
    return len(lengths) + (before > 0) - emptied - (left == 0), largest
