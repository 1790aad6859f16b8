"""The free cells that an arena's next searches will find, for decode steps in a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.cells.arena import Arena
from policies.cells.free_cells import Cells
from policies.cells.reads import padded_span, padded_spans, repeated
from policies.cells.search import cells_array, start_of_search
from policies.compaction.compactors import min_cells_to_move
from policies.compaction.triggers import TriggerForecast, TriggerInput, cells_saved
from policies.fast_forward.arena_lockstep import GroupReads
from policies.fast_forward.forecast import MAX_STEPS, StepReads, Usages
from policies.fast_forward.tiles import TileSteps
from policies.vocabulary import Chunk, IntArray


class FreeCellPath:
    """The cells that at most ``n`` decode steps in a row take, up from the head. Changes nothing.

    ``tokens``: those of a step. ``anywhere``: a step takes any free cells, otherwise consecutive ones.
    """

    def __init__(self, arena: Arena, tokens: int, n: int, pad: int, *, anywhere: bool):
        self.arena = arena
        self.tokens = tokens
        self._pad = pad
        self._anywhere = anywhere
        self._spans: IntArray | None = None
        self.cells: Cells = self._find(min(n, MAX_STEPS))
        """What the steps take, step after step; shape (steps * tokens,)."""
        self.steps = len(self.cells) // tokens
        """Steps that find room above the cells of the step before."""

    def _find(self, n: int) -> Cells:
        """``cells`` of at most ``n`` steps, but not round the end of the cache."""
        if n < 1:
            return range(0)
        head = start_of_search(self.arena.head, self.arena.used, self.tokens)
        return self._find_anywhere(head, n) if self._anywhere else self._find_in_rows(head, n)

    def _find_anywhere(self, head: int, n: int) -> Cells:
        """``cells`` where a step takes any that are free."""
        tokens, used, free = self.tokens, self.arena.used, self.arena.free
        cells = free.first_cells(n * tokens, head)
        found = len(cells) // tokens
        if found == 0:
            return range(0)
        cells = cells[: found * tokens]
        # From the second step on, a search begins anew from 0 where the head is too far above the number of used cells.
        if int(cells[-1]) >= used + 3 * tokens and free.first_cell(0) < int(cells[0]):
            heads = cells_array(cells)[tokens - 1 :: tokens] + 1
            far = heads[:-1] > used + tokens * np.arange(3, found + 2)
            if far.any():
                found = int(far.argmax()) + 1
        return cells[: found * tokens]

    def _find_in_rows(self, head: int, n: int) -> Cells:
        """``cells`` where those of a step must be consecutive."""
        tokens, used, free = self.tokens, self.arena.used, self.arena.free
        start, left, parts, lowest = free.first_run(tokens, head), n, list[range](), None
        first = start
        while start is not None and left:
            assert first is not None
            steps = min((free.end_of_run(start, start + left * tokens) - start) // tokens, left)
            if start > used + (n - left + 2) * tokens:
                # From the second step on, a search begins anew from 0, and ends here only if it finds nothing below.
                if lowest is None:
                    lowest = free.first_run(tokens, 0, first + tokens - 1) is None
                if not lowest:
                    parts.append(range(start, start + tokens))
                    break
            parts.append(range(start, start + steps * tokens))
            left -= steps
            start = free.first_run(tokens, start + steps * tokens) if left else None
        if len(parts) < 2:
            return parts[0] if parts else range(0)
        return np.concatenate([cells_array(part) for part in parts])

    @property
    def heads(self) -> IntArray:
        """One past the last cell of each step; shape (steps,)."""
        tokens = self.tokens
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
                tokens = self.tokens
                self._spans = np.arange(cells.start + tokens + pad - 1, cells.stop + pad, tokens)
                self._spans &= -pad
                if cells.stop > size - pad:
                    np.minimum(self._spans, size, out=self._spans)
            else:
                self._spans = padded_spans(self.tops(), self._pad, self.arena.size)
        return self._spans

    def span_after(self, k: int) -> int:
        """What attention over all cells reads in the ``k``-th step."""
        return int(self.spans()[k - 1])

    def bounds(self) -> tuple[TriggerInput, int]:
        """Bounds on what a trigger will see (``Trigger.rules_out``), if there is at least one step.

        The least number of used cells and of cells to move, the largest top and span; and the largest ``cells_saved``.
        """
        arena, spans, used = self.arena, self.spans(), self.arena.used
        first, last = int(self.cells[0]), int(self.cells[-1])

        def least_to_move() -> int:
            # The steps fill at most as many holes as they take cells.
            fills_none = min(first, last) >= used + len(self.cells)
            return min_cells_to_move(arena) - (0 if fills_none else len(self.cells))

        pad, span, top = self._pad, int(spans[-1]), max(arena.top, first + 1, last + 1)
        saved = cells_saved(used, span, pad)
        if isinstance(self.cells, range) and used:
            # The top rises no faster than the number of used cells.
            saved = min(saved, -(-(max(arena.top, first) - used) // pad) * pad)
        return TriggerInput(used, top, span, pad, self.tokens, least_to_move), saved

    def forecast(self) -> TriggerForecast:
        """What a trigger will see before the first step and after each."""
        arena, tokens = self.arena, self.tokens
        tops = np.concatenate(([arena.top], self.tops()))
        used = arena.used + tokens * np.arange(self.steps + 1)
        spans = padded_spans(tops, self._pad, arena.size)

        def least_to_move() -> IntArray:
            holes = arena.free.below(used)
            if isinstance(self.cells, range):
                filled = np.clip(used - self.cells.start, 0, tokens * np.arange(self.steps + 1))
            else:
                # Those of the cells below that have been taken by then: cells ascend from step to step.
                filled = np.minimum(np.searchsorted(self.cells, used), tokens * np.arange(self.steps + 1))
            return holes - filled

        return TriggerForecast(used, tops, spans, self._pad, tokens, least_to_move)

    def head_after(self, k: int) -> int:
        """One past the last cell of the ``k``-th step."""
        return int(self.cells[k * self.tokens - 1]) + 1

    def table(self, k: int) -> IntArray:
        """The cells of the first ``k`` steps; shape (k, len(step))."""
        return cells_array(self.cells)[: k * self.tokens].reshape(k, self.tokens)

    def reads(self, step: Sequence[Chunk], steps: int) -> StepReads:
        """What the first ``steps`` steps read under the kernel ``masked``."""
        return masked_step_reads(step, self.spans()[:steps])

    def group_reads(self, steps: int, tiles: TileSteps | None) -> GroupReads:
        """What a lockstep batch reads in the first ``steps`` steps, under the kernel ``tiled`` if there are tiles."""
        if tiles is not None:
            scanned = tiles.scanned
            return GroupReads(scanned, tiles.runs, scanned, tiles.most_after)
        spans, n = self.spans()[:steps], self.tokens
        return GroupReads(n * spans if n > 1 else spans, repeated(n, steps), spans, self.span_after)

    def usages(self, k: int) -> Usages:
        """How full the cache will be after each of the first ``k`` steps."""
        arena, free, tokens = self.arena, self.arena.free, self.tokens
        first, last = int(self.cells[0]), int(self.cells[k * tokens - 1])
        taken = np.arange(tokens, tokens * k + 1, tokens)
        used = arena.used + taken
        # What changes is between the ends of the extents in which the first and the last of the cells are.
        low, high = free.start_of_run(min(first, last)), free.end_of_run(max(first, last))
        if abs(last - first) == k * tokens - 1:
            behind = first - low if last >= first else high - 1 - first
            ahead = high - low - behind - taken
            largest, lost = np.maximum(ahead, behind), 1
            extents = np.full(k, int(behind > 0) + 1)
            extents[-1] -= ahead[-1] == 0
        else:
            starts, ends = free.arrays(low, high)
            lost, path = len(starts), cells_array(self.cells[: k * tokens])
            if last < first:
                # Mirrored, so that the path ascends.
                starts, ends, path = -ends[::-1], -starts[::-1], -1 - path
            extents, largest = extents_after(starts, ends, path, taken)
        extents += len(free) - lost
        least = int(largest.min())
        others = max(free.largest_between(0, low, least), free.largest_between(high, free.size, least))
        if others > least:
            np.maximum(largest, others, out=largest)
        room = arena.size - used if self._anywhere else largest
        return Usages(used, used, room, extents, largest, self.tops()[:k], np.zeros(k, dtype=np.int64))


def masked_step_reads(step: Sequence[Chunk], spans: IntArray, most: int | None = None, streams: int = 1) -> StepReads:
    """What decode steps read under the kernel ``masked``.

    ``spans``: cells read in each step, in each of ``streams`` streams. ``most``: tokens that a sequence can see at
    most.
    """
    steps, tokens = len(spans), len(step)
    useful: IntArray
    if most is not None and min([chunk.start for chunk in step]) + 1 >= most:
        useful = repeated(tokens * most, steps)
    elif most is None or max([chunk.start for chunk in step]) + steps <= most:
        now = sum([chunk.start for chunk in step])
        useful = np.arange(now + tokens, now + tokens * (steps + 1), tokens)
    else:
        starts = np.array([chunk.start for chunk in step])
        useful = np.minimum(starts + np.arange(1, steps + 1)[:, None], most).sum(axis=1)
    whole = spans * streams if streams > 1 else spans
    return StepReads(tokens * spans if tokens > 1 else spans, useful, repeated(tokens, steps), whole, spans)


def extents_after(starts: IntArray, ends: IntArray, cells: Cells, taken: IntArray) -> tuple[IntArray, IntArray]:
    """Number and largest length of the free extents after the first ``taken`` of ``cells`` have been taken.

    ``starts`` and ``ends`` are the extents now; ``cells`` and ``taken`` ascend. Both results have the shape of
    ``taken``.
    """
    lengths = ends - starts
    first = int(cells[0])
    at = int(np.searchsorted(ends, first, side="right"))
    before = first - int(starts[at])
    consecutive = isinstance(cells, range)
    # How many cells are taken in all up to the end of each extent, from the first that loses any.
    gone = np.array([len(cells)]) if consecutive else np.searchsorted(cells, ends[at:])
    rest = lengths[at : at + len(gone)].copy()
    rest[0] -= before
    others = max(before, lengths[:at].max(initial=0), lengths[at + len(gone) :].max(initial=0))
    # The extent that each step ends in.
    now = np.searchsorted(gone, taken)
    done = np.diff(gone, prepend=0)
    left = rest[now] - (taken - (gone[now] - done[now]))
    behind = np.maximum.accumulate(np.concatenate(([0], rest - done)))[now]
    ahead = np.maximum.accumulate(np.concatenate((rest, [0]))[::-1])[::-1][now + 1]
    largest = np.maximum(np.maximum(left, others), np.maximum(behind, ahead))
    emptied = np.concatenate(([0], np.cumsum(rest == done)))[now]
    return len(lengths) + (before > 0) - emptied - (left == 0), largest
