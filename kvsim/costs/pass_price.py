"""The price of a forward pass: the one formula by which everything that is predicted is computed.

A pass of ``n`` tokens for ``k`` chunks costs, over the cache groups of a model,

    host + matrix(n) + head(k) + sum over groups of share * (base + attention + per_chunk * k + per_run * runs)

``matrix`` and ``head`` are piecewise linear and never fall (a batched matrix product is not linear in its batch).
``attention`` is the number of cells that are scanned, times what a cell costs for the tokens that scan it together,
again by a piecewise linear table that never falls. Moves, rotations and copies to the host tier come on top
(``CostModel``). Every coefficient is non-negative: no cost can be bought back.

The coefficients depend on the regime of the pass where a profile has two: decode-only, where every chunk is one token,
and mixed. On GPUs they differ, because engines run other kernels for a pass in which a chunk has more than one token.

It is asked of one pass at a time, so that it may have any shape: nothing relies on its being linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsim.costs.profile import PassCosts, Profile
from kvsim.costs.tables import seconds_of_each, shares
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
    """Seconds by number of tokens or chunks, linear between knots; as many are computed as were asked for so far."""

    def __init__(
        self,
        first_s: float,
        slopes_s: Sequence[float],
        knots: Sequence[int],
        behind: tuple[int, float, float] | None = None,
    ):
        """As in ``seconds_of_each``."""
        self._line = (first_s, slopes_s, knots, behind)
        self._values = vec[float]([])

    def at(self, n: i64) -> float:
        """The seconds for ``n`` tokens or chunks."""
        values = self._values
        if n >= len(values):
            self._values = values = vec[float](seconds_of_each(max(2 * int(n), 1024), *self._line).tolist())
        return values[n]


class RegimePrice:
    """The formula with the coefficients of one regime, one kernel and the groups of one policy; seconds."""

    def __init__(self, profile: Profile, costs: PassCosts, kernel: Kernel, groups: Sequence[Group]):
        rates = profile.kernel_costs(costs, kernel)
        self._matrix = _Seconds(0.0, [slope.value for slope in costs.matmul_slopes_s], costs.matmul_knots)
        self._head: _Seconds | None = None
        if costs.sequence_knots:
            slopes = [slope.value for slope in costs.sequence_slopes_s]
            self._head = _Seconds(0.0, slopes, costs.sequence_knots)
        further = [slope.value for slope in rates.further_token_s]
        tiled = (rates.tiles_from, rates.tiled_cell_s.value, rates.tiled_token_s.value) if rates.tiles_from else None
        self._cell = _Seconds(rates.per_cell_s.value, further, costs.attention_knots, tiled)
        self._cell_s = self._cell.at(1)
        self._chunk_knots = costs.chunk_knots
        self._by_number = len(costs.chunk_knots) > 0
        self._by_chunks = [[c.value for c in each] for each in (rates.cell_by_chunks_s, rates.long_cell_by_chunks_s)]
        self._long_context: i64 = costs.long_context
        self._cell_of_one: list[float] = []
        """By number of chunks: a cell that a chunk of one token scans."""
        self._long_cell_of_one: list[float] = []
        """By number of chunks: what such a cell costs more in a long context."""
        self._base: float = rates.base_s.value
        self._chunk: float = rates.per_chunk_s.value
        self._run: float = rates.per_run_s.value
        self._causal: bool = rates.causal
        self._host: float = profile.host_s
        self._shares: list[float] = [group.share for group in groups]
        self._share: float = sum(self._shares)
        self.skips: bool = rates.skips
        """Whether cells that a token cannot see cost nothing."""
        self.base_s: float = self._share * self._base + self._host
        """Each pass, whatever is in it, over all groups, with what the host adds."""
        self._last_tokens: i64 = 0
        self._last_chunks: i64 = 0
        self._fixed_s = 0.0
        """What a pass of so many tokens and chunks costs apart from what it reads; most are like the one before."""

    def matrix_s(self, tokens: int) -> float:
        """Matrix work of a pass of ``tokens`` tokens."""
        return self._matrix.at(tokens)

    def chunks_s(self, chunks: int) -> float:
        """What a pass costs for having ``chunks`` chunks, over all groups."""
        return self._share * self._chunk * chunks + self._head_s(chunks)

    def runs_s(self, runs: int) -> float:
        """Reading ``runs`` runs of cells in a group of share 1."""
        return self._run * runs

    def total(self, tokens: i64, chunks: i64, groups: list[GroupReads], together: list[bool]) -> float:
        """The formula; ``together``: for each group whether all tokens scan the same cells."""
        if tokens != self._last_tokens or chunks != self._last_chunks:
            self._last_tokens, self._last_chunks = tokens, chunks
            self._fixed_s = self._matrix.at(tokens) + self.base_s + self.chunks_s(int(chunks))
        seconds, only = self._fixed_s, groups[0]
        if len(groups) == 1 and not (only.longer or together[0] or self._by_number):
            # As most are; the same numbers as below.
            cells = float(only.single_useful if self.skips else only.single_scanned)
            return seconds + self._share * (self._cell_s * cells + self._run * float(only.runs))
        for i, group in enumerate(groups):
            attention = self.attention(tokens, chunks, group, together[i])
            seconds += self._shares[i] * (attention + self._run * float(group.runs))
        return seconds

    def attention(self, tokens: i64, chunks: i64, group: GroupReads, together: bool) -> float:
        """Seconds over all cells that are scanned in one pass, for one group of share 1."""
        if together:
            return self._cell.at(tokens) * float(group.span)
        single = group.single_useful if self.skips else group.single_scanned
        if not group.longer:
            return self._singles_s(chunks, single, chunks)
        seconds = 0.0
        for n, scanned, useful in group.longer:
            seconds += self._longer_s(n, useful if self.skips else scanned)
        return seconds + self._singles_s(chunks - len(group.longer), single, chunks)

    def visible(self, chunks: i64, group: GroupReads) -> float:
        """Seconds over the cells among those scanned that their token can see, where each chunk scans its own."""
        seconds = 0.0
        for n, scanned, useful in group.longer:
            # Behind a window, a chunk's tokens together can see more cells than are still held for them.
            seconds += self._longer_s(n, useful if self.skips or useful < scanned else scanned)
        single = group.single_useful
        if not self.skips and single > group.single_scanned:
            single = group.single_scanned
        return seconds + self._singles_s(chunks - len(group.longer), single, chunks)

    def _head_s(self, chunks: i64) -> float:
        return self._head.at(chunks) if self._head is not None and chunks else 0.0

    def _singles_s(self, count: i64, cells: i64, chunks: i64) -> float:
        """Attention of ``count`` chunks of one token over ``cells`` cells together, for a group of share 1.

        ``chunks``: all chunks of the pass.
        """
        if not self._by_number:
            return self._cell_s * float(cells)
        while len(self._cell_of_one) <= chunks:
            self._add_cell_costs(len(self._cell_of_one))
        beyond = cells - self._long_context * count
        more = self._long_cell_of_one[chunks] * float(beyond) if beyond > 0 else 0.0
        return self._cell_of_one[chunks] * float(cells) + more

    def _add_cell_costs(self, chunks: int) -> None:
        weights = shares(max(chunks, 1), self._chunk_knots)
        cell, more = [float(weights @ costs) if costs else 0.0 for costs in self._by_chunks]
        self._cell_of_one.append(cell)
        self._long_cell_of_one.append(more)

    def _longer_s(self, tokens: i64, cells: i64) -> float:
        """Attention of one chunk of two tokens or more over ``cells`` cells, for a group of share 1."""
        seen = float(cells)
        if self._causal:
            # Tokens do not read the cells of those behind them in the chunk: half of its square. Behind a window, a
            # chunk may read fewer cells than it has tokens.
            seen = max(seen - float(tokens - 1) / 2, seen / 2)
        return self._cell.at(tokens) * seen


class PassPrice:
    """Prices forward passes under one kernel over the cache groups of one policy; all results are in seconds."""

    def __init__(self, profile: Profile, kernel: Kernel, groups: Sequence[Group]):
        self._shares: list[float] = [group.share for group in groups]
        self._together: list[bool] = [
            scans_together(kernel, group) and profile.measured_kernel(kernel) for group in groups
        ]
        self._decode = RegimePrice(profile, profile.decode, kernel, groups)
        self._mixed = self._decode
        if profile.mixed is not None:
            self._mixed = RegimePrice(profile, profile.mixed, kernel, groups)
        self.most_tokens: i64 = 0
        """Tokens of the largest pass that was priced."""
        self.most_cells: i64 = 0
        """Cells that one token was scored against, at most, in the passes that were priced."""

    def regime(self, tokens: int, chunks: int) -> RegimePrice:
        """The coefficients for a pass: those of decode-only passes if each chunk is one token, or of mixed ones."""
        return self._decode if tokens == chunks else self._mixed

    def seconds(self, work: PassReads) -> float:
        """One pass, without what is done before it."""
        tokens, chunks, groups = work.tokens, work.chunks, work.groups
        price = self._decode if tokens == chunks else self._mixed
        if tokens > self.most_tokens:
            self.most_tokens = tokens
        skips = self._decode.skips
        for group in groups:
            most = group.single_most_useful if skips else group.single_most
            if most > self.most_cells:
                self.most_cells = most
            for _, scanned, useful in group.longer:
                cells: i64 = useful if skips else scanned
                if cells > self.most_cells:
                    self.most_cells = cells
        return price.total(tokens, chunks, groups, self._together)

    def attention_of(self, work: PassReads, *, runs_are_holes: bool) -> AttentionTerms:
        """Attention in one pass, split. ``runs_are_holes``: count runs beyond one for each chunk as holes."""
        useful_s = holes_s = 0.0
        tokens, chunks = work.tokens, work.chunks
        price = self._decode if tokens == chunks else self._mixed
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
