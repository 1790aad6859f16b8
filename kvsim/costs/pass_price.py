"""The price of a forward pass: the formulas by which everything that is predicted is computed.

On a machine that was measured (``FittedPrice``), a pass of ``n`` tokens for ``k`` chunks costs, over the cache groups
of a model,

    host + matrix(n) + sum over groups of share * (base + attention + per_chunk * k + per_run * runs)

``matrix`` is piecewise linear and never falls (a batched matrix product is not linear in its batch). ``attention`` is
the number of cells that are scanned, times what a cell costs for the tokens that scan it together, again by a piecewise
linear table that never falls. Every coefficient is non-negative: no cost can be bought back.

On a device (``TablePrice``) it costs ``host + work(n) + head(k) + sum over groups of share * attention``, each looked
up in tables (``PassTables``), but no less than the host takes to prepare the next one. Moves, rotations and copies to
the host tier come on top (``CostModel``).

Costs depend on the regime of the pass where a profile has two: decode-only, where every chunk is one token, and mixed.
On GPUs they differ, because engines run other kernels for a pass in which a chunk has more than one token. Where
drafts are checked, a chunk of a token and its drafts counts as decode: engines run the kernels of decode steps for it,
which read each cell once for all of its tokens, and the head runs for each of them.

It is asked of one pass at a time, so that it may have any shape: nothing relies on its being linear.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvsim.costs.pass_tables import Grid, Line, PassTables, Together
from kvsim.costs.profile import PassCosts, Profile, Regime
from kvsim.costs.tables import FloatArray, seconds_of_each
from policies import Group, Kernel
from policies.compiled import i64, vec
from policies.placement.rule import GroupReads, PassReads


def scans_together(kernel: Kernel, group: Group) -> bool:
    """Whether all tokens of a pass scan the same cells; otherwise each chunk scans its own."""
    return kernel == "masked" and group.streams == 1


class AttentionTerms(NamedTuple):
    """Seconds of attention in a pass by what is scanned."""

    useful_s: float
    """Over cells that the token's sequence can see."""
    holes_s: float
    """Over all other cells, and over further runs where cells do not come in blocks."""


class _Seconds:
    """Seconds by a whole number of tokens, chunks or sequences; as many are computed as were asked for so far."""

    def __init__(self, each: Callable[[int], FloatArray]):
        """``each``: the seconds of 0, 1, ... up to a number that is left out."""
        self._each = each
        self._values = vec[float]([])

    def at(self, n: i64) -> float:
        """The seconds of ``n``."""
        values = self._values
        if n >= len(values):
            self._values = values = vec[float](self._each(max(2 * int(n), 1024)).tolist())
        return values[n]


class RegimePrice(ABC):
    """What passes of one regime cost under one kernel over the groups of one policy; seconds."""

    def __init__(self, profile: Profile, work: Callable[[int], FloatArray], groups: Sequence[Group]):
        """``work``: seconds of the matrices by tokens, as for ``_Seconds``."""
        self._work = _Seconds(work)
        host = profile.host_share
        self._host_s: float = 0.0 if host is None else host.seconds
        self._host_sequence_s: float = 0.0 if host is None else host.sequence_s
        self._least_s: float = 0.0 if host is None else host.least_s
        self._shares: list[float] = [group.share for group in groups]
        self._share: float = sum(self._shares)
        self.skips: bool = False
        """Whether cells that a token cannot see cost nothing."""
        self.most_checked: i64 = 1
        """Tokens of the longest chunk that counts as decode."""
        self.base_s: float = self._host_s
        """Each pass, whatever is in it, over all groups, with what the host adds."""

    def matrix_s(self, tokens: int) -> float:
        """Matrix work of a pass of ``tokens`` tokens."""
        return self._work.at(tokens)

    @abstractmethod
    def chunks_s(self, chunks: int, drafts: int = 0) -> float:
        """What a pass costs for having ``chunks`` chunks, over all groups; ``drafts``: drafted tokens in them."""

    def drafts_in(self, work: PassReads) -> int:
        """The drafted tokens in a pass: all but one of each chunk that counts as decode."""
        found: i64 = 0
        if self.most_checked > 1:
            for n, _, _ in work.groups[0].longer:
                if n <= self.most_checked:
                    found += n - 1
        return int(found)

    def waits_s(self, seconds: float) -> float:
        """What a pass of so many seconds waits for the host, which prepares the next one at the same time."""
        return max(self._least_s - seconds, 0.0)

    def runs_s(self, runs: int) -> float:
        """Reading ``runs`` runs of cells in a group of share 1."""
        return 0.0

    @abstractmethod
    def total(self, work: PassReads, together: list[bool]) -> float:
        """The formula; ``together``: for each group whether all tokens scan the same cells."""

    @abstractmethod
    def attention(self, tokens: i64, chunks: i64, group: GroupReads, together: bool) -> float:
        """Seconds over all cells that are scanned in one pass, for one group of share 1."""

    @abstractmethod
    def visible(self, chunks: i64, group: GroupReads) -> float:
        """Seconds over the cells among those scanned that their token can see, where each chunk scans its own."""


class FittedPrice(RegimePrice):
    """The formula with fitted coefficients."""

    def __init__(self, profile: Profile, costs: PassCosts, kernel: Kernel, groups: Sequence[Group]):
        slopes = [slope.value for slope in costs.matmul_slopes_s]
        super().__init__(profile, partial(seconds_of_each, 0.0, slopes, costs.matmul_knots, None), groups)
        rates = profile.kernel_costs(costs, kernel)
        further = [slope.value for slope in rates.further_token_s]
        tiled = (rates.tiles_from, rates.tiled_cell_s.value, rates.tiled_token_s.value) if rates.tiles_from else None
        self._cell = _Seconds(partial(seconds_of_each, rates.per_cell_s.value, further, costs.attention_knots, tiled))
        self._cell_s = self._cell.at(1)
        self._chunk: float = rates.per_chunk_s.value
        self._run: float = rates.per_run_s.value
        self._causal: bool = rates.causal
        self.skips = rates.skips
        self.base_s = self._share * rates.base_s.value + self._host_s
        self._last_tokens: i64 = 0
        self._last_chunks: i64 = 0
        self._fixed_s = 0.0
        """What a pass of so many tokens and chunks costs apart from what it reads; most are like the one before."""

    def chunks_s(self, chunks: int, drafts: int = 0) -> float:
        """By the coefficient of a chunk and what the host adds for it; seconds."""
        return (self._share * self._chunk + self._host_sequence_s) * chunks

    def runs_s(self, runs: int) -> float:
        """By the coefficient of a run; seconds."""
        return self._run * runs

    def total(self, work: PassReads, together: list[bool]) -> float:
        """By the coefficients; seconds."""
        tokens, chunks, groups = work.tokens, work.chunks, work.groups
        if tokens != self._last_tokens or chunks != self._last_chunks:
            self._last_tokens, self._last_chunks = tokens, chunks
            self._fixed_s = self._work.at(tokens) + self.base_s + self.chunks_s(int(chunks))
        seconds, only = self._fixed_s, groups[0]
        if len(groups) == 1 and not (only.longer or together[0]):
            # As most are; the same numbers as below.
            cells = float(only.single_useful if self.skips else only.single_scanned)
            return seconds + self._share * (self._cell_s * cells + self._run * float(only.runs))
        for i, group in enumerate(groups):
            attention = self.attention(tokens, chunks, group, together[i])
            seconds += self._shares[i] * (attention + self._run * float(group.runs))
        return seconds

    def attention(self, tokens: i64, chunks: i64, group: GroupReads, together: bool) -> float:
        """By cells that are scanned; seconds."""
        if together:
            return self._cell.at(tokens) * float(group.span)
        single = group.single_useful if self.skips else group.single_scanned
        seconds = 0.0
        for n, scanned, useful in group.longer:
            seconds += self._longer_s(n, useful if self.skips else scanned)
        return seconds + self._cell_s * float(single)

    def visible(self, chunks: i64, group: GroupReads) -> float:
        """By cells that are scanned and can be seen; seconds."""
        seconds = 0.0
        for n, scanned, useful in group.longer:
            # Behind a window, a chunk's tokens together can see more cells than are still held for them.
            seconds += self._longer_s(n, useful if self.skips or useful < scanned else scanned)
        single = group.single_useful
        if not self.skips and single > group.single_scanned:
            single = group.single_scanned
        return seconds + self._cell_s * float(single)

    def _longer_s(self, tokens: i64, cells: i64) -> float:
        """Attention of one chunk of two tokens or more over ``cells`` cells, for a group of share 1."""
        seen = float(cells)
        if self._causal:
            # Tokens do not read the cells of those behind them in the chunk: half of its square. Behind a window, a
            # chunk may read fewer cells than it has tokens.
            seen = max(seen - float(tokens - 1) / 2, seen / 2)
        return self._cell.at(tokens) * seen


class _Axis:
    """One axis of a table, and where a number lies on it."""

    def __init__(self, numbers: Sequence[int]):
        self._numbers = vec[float]([float(number) for number in numbers])
        self._last: i64 = len(numbers) - 2
        self.low: i64 = 0
        """The entry before the number."""
        self.part = 0.0
        """How far it is from there to the next, which is 1; more beyond the last one."""

    def find(self, number: float) -> None:
        """Set ``low`` and ``part``; before the first entry, a number counts as that one."""
        numbers, low, high = self._numbers, self.low, self._last
        if not (numbers[low] <= number and (low == high or number < numbers[low + 1])):
            low = 0
            while low < high:
                middle = (low + high + 1) // 2
                if numbers[middle] <= number:
                    low = middle
                else:
                    high = middle - 1
            self.low = low
        self.part = max((number - numbers[low]) / (numbers[low + 1] - numbers[low]), 0.0)


class _Table:
    """A grid between whose entries seconds are linear."""

    def __init__(self, grid: Grid):
        self._rows, self._columns = _Axis(grid.rows), _Axis(grid.columns)
        self._width: i64 = len(grid.columns)
        self._values = vec[float]([value for row in grid.seconds for value in row])

    def at(self, row: float, column: float) -> float:
        """The seconds of two numbers."""
        rows, columns, values = self._rows, self._columns, self._values
        rows.find(row)
        columns.find(column)
        first = rows.low * self._width + columns.low
        second = first + self._width
        here = values[first] + columns.part * (values[first + 1] - values[first])
        there = values[second] + columns.part * (values[second + 1] - values[second])
        return max(here + rows.part * (there - here), 0.0)


class _Ratios:
    """How many times as long attention takes where prompts and decodes are in one pass; outside the table, as at its
    edge."""

    def __init__(self, table: Together):
        self._axes = [_Axis(axis) for axis in (table.tokens, table.cached, table.sequences, table.cells)]
        sizes = [len(table.tokens), len(table.cached), len(table.sequences), len(table.cells)]
        self._strides: list[int] = [sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1]
        self._values = vec[float](list(table.ratios))

    def at(self, numbers: list[float]) -> float:
        """The ratio for tokens, cached tokens, sequences and cells of each."""
        for i, axis in enumerate(self._axes):
            axis.find(numbers[i])
        return self._between(0, 0)

    def _between(self, axis: i64, start: i64) -> float:
        if axis == 4:
            return self._values[start]
        own, stride = self._axes[axis], self._strides[axis]
        first = start + own.low * stride
        here = self._between(axis + 1, first)
        if own.part == 0.0:
            return here
        there = self._between(axis + 1, first + stride)
        return here + min(own.part, 1.0) * (there - here)


class TablePrice(RegimePrice):
    """The price by a device's tables."""

    def __init__(self, profile: Profile, tables: PassTables, regime: Regime, groups: Sequence[Group]):
        work = tables.work if regime == "decode" or tables.prompt_work is None else tables.prompt_work
        slower = profile.sustained if regime == "mixed" else None
        super().__init__(profile, partial(_under_load, work, 1.0 if slower is None else slower.ratio), groups)
        self._head = _Seconds(tables.head.each)
        self._decode, self._prompt = _Table(tables.decode), _Table(tables.prompt)
        grid = tables.decode
        self._read_s = grid.seconds[-1][-1] / grid.rows[-1] / grid.columns[-1]
        """A cell where the device is kept busy."""
        self._ratios = None if tables.together is None or regime == "decode" else _Ratios(tables.together)

    def chunks_s(self, chunks: int, drafts: int = 0) -> float:
        """By the table of the head and what the host adds for each sequence; seconds."""
        return (self._head.at(chunks + drafts) + self._host_sequence_s * chunks) if chunks else 0.0

    def total(self, work: PassReads, together: list[bool]) -> float:
        """The sum of what the tables say; seconds."""
        tokens, chunks = work.tokens, work.chunks
        seconds = self.base_s + self._work.at(tokens) + self.chunks_s(int(chunks), self.drafts_in(work))
        for i, group in enumerate(work.groups):
            seconds += self._shares[i] * self.attention(tokens, chunks, group, together[i])
        return seconds + self.waits_s(seconds)

    def attention(self, tokens: i64, chunks: i64, group: GroupReads, together: bool) -> float:
        """By cells that are scanned; each chunk scans its own, whatever the kernel; seconds."""
        return self._attention_s(chunks, group, False)

    def visible(self, chunks: i64, group: GroupReads) -> float:
        """By cells that are scanned and can be seen; seconds."""
        return self._attention_s(chunks, group, True)

    def _attention_s(self, chunks: i64, group: GroupReads, seen_only: bool) -> float:
        """Attention over what is scanned, or over what can be seen of it."""
        cells = group.single_scanned
        if seen_only and group.single_useful < cells:
            cells = group.single_useful
        singles: i64 = chunks - len(group.longer)
        longer = group.longer
        if longer and self.most_checked > 1:
            longer = []
            for n, all_cells, useful in group.longer:
                if n > self.most_checked:
                    longer.append((n, all_cells, useful))
                else:
                    singles += 1
                    cells += min(useful, all_cells) if seen_only else all_cells
        decode_s = self._decode.at(float(singles), float(cells) / float(singles)) if singles else 0.0
        if not longer:
            return decode_s
        tokens: i64 = 0
        scanned, seen = 0.0, 0.0
        for n, all_cells, useful in longer:
            own = float(min(useful, all_cells) if seen_only else all_cells)
            tokens += n
            scanned += own
            # Tokens do not read the cells of those behind them in the chunk: half of its square. Behind a window, a
            # chunk may read fewer cells than it has tokens.
            seen += float(n) * max(own - float(n - 1) / 2, own / 2)
        mean = seen / float(tokens)
        # All chunks are computed together. Their cells are read at least once, which counts where they have few tokens.
        prompt_s = max(self._prompt.at(float(tokens), mean), self._read_s * scanned)
        if self._ratios is None or not singles:
            return prompt_s + decode_s
        cached = max(mean - float(tokens + 1) / 2, 0.0)
        ratio = self._ratios.at([float(tokens), cached, float(singles), float(cells) / float(singles)])
        return ratio * (prompt_s + decode_s)


def _under_load(work: Line, ratio: float, stop: int) -> FloatArray:
    """The seconds of 0, 1, ... tokens as ``Line.each``, but for ``ratio`` times what goes beyond one token's, which is
    the reading of the weights."""
    alone = work.each(stop)
    longer: FloatArray = alone + (ratio - 1) * np.maximum(alone - work.seconds[0], 0.0)
    return longer


def _regime_price(profile: Profile, regime: Regime, kernel: Kernel, groups: Sequence[Group]) -> RegimePrice:
    if profile.tables is not None:
        return TablePrice(profile, profile.tables, regime, groups)
    costs: PassCosts = profile if regime == "decode" or profile.mixed is None else profile.mixed
    return FittedPrice(profile, costs, kernel, groups)


class PassPrice:
    """Prices forward passes under one kernel over the cache groups of one policy; all results are in seconds."""

    def __init__(self, profile: Profile, kernel: Kernel, groups: Sequence[Group], drafts: int = 0):
        """``drafts``: the most drafted tokens of a sequence that a pass checks."""
        self._shares: list[float] = [group.share for group in groups]
        self._together: list[bool] = [scans_together(kernel, group) and profile.tables is None for group in groups]
        self._decode = self._mixed = _regime_price(profile, "decode", kernel, groups)
        if profile.mixed is not None or profile.tables is not None:
            self._mixed = _regime_price(profile, "mixed", kernel, groups)
        self._most_checked: i64 = 1 + drafts
        self._decode.most_checked = self._mixed.most_checked = 1 + drafts
        self.most_tokens: i64 = 0
        """Tokens of the largest pass that was priced."""
        self.most_cells: i64 = 0
        """Cells that one token was scored against, at most, in the passes that were priced."""
        self.most_chunks: i64 = 0
        """Chunks of the pass with the most, of those that were priced."""

    def regime(self, tokens: int, chunks: int) -> RegimePrice:
        """The coefficients for a pass: those of decode-only passes if each chunk is one token, or of mixed ones."""
        return self._decode if tokens == chunks else self._mixed

    def regime_of(self, work: PassReads) -> RegimePrice:
        """The coefficients for a pass, in which a token and its drafts count as decode."""
        if work.tokens == work.chunks:
            return self._decode
        if self._most_checked > 1:
            for n, _, _ in work.groups[0].longer:
                if n > self._most_checked:
                    return self._mixed
            return self._decode
        return self._mixed

    def seconds(self, work: PassReads) -> float:
        """One pass, without what is done before it."""
        tokens, chunks, groups = work.tokens, work.chunks, work.groups
        price = self.regime_of(work)
        if tokens > self.most_tokens:
            self.most_tokens = tokens
        if chunks > self.most_chunks:
            self.most_chunks = chunks
        skips = self._decode.skips
        for group in groups:
            most = group.single_most_useful if skips else group.single_most
            if most > self.most_cells:
                self.most_cells = most
            for _, scanned, useful in group.longer:
                cells: i64 = useful if skips else scanned
                if cells > self.most_cells:
                    self.most_cells = cells
        return price.total(work, self._together)

    def attention_of(self, work: PassReads, *, runs_are_holes: bool) -> AttentionTerms:
        """Attention in one pass, split. ``runs_are_holes``: count runs beyond one for each chunk as holes."""
        useful_s = holes_s = 0.0
        tokens, chunks = work.tokens, work.chunks
        price = self.regime_of(work)
        for i in range(len(work.groups)):
            group = work.groups[i]
            whole = price.attention(tokens, chunks, group, self._together[i])
            if self._together[i]:
                scores = group.scores
                visible: i64 = min(group.single_useful, group.single_scanned)
                for n, scanned, useful in group.longer:
                    visible += n * min(useful, scanned)
                seen_s = whole * (float(visible) / float(scores)) if scores else whole
            else:
                seen_s = price.visible(chunks, group)
            further = max(group.runs - chunks, 0) if runs_are_holes else 0
            share = self._shares[i]
            useful_s += share * (seen_s + price.runs_s(group.runs - further))
            holes_s += share * (whole - seen_s + price.runs_s(further))
        return AttentionTerms(useful_s, holes_s)
