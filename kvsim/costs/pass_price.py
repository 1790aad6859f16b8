"""The price of a forward pass: the one formula by which everything that is predicted is computed.

A pass of ``n`` tokens for ``k`` chunks costs, over the cache groups of a model,

    host + matrix(n) + head(k) + sum over groups of share * (base + attention + per_chunk * k + per_run * runs)

``matrix`` and ``head`` are piecewise linear and never fall (a batched matrix product is not linear in its batch).
``attention`` is the number of cells that are scanned, times what a cell costs for the tokens that scan it together,
again by a piecewise linear table that never falls. Moves, rotations and copies to the host tier come on top
(``CostModel``). Every coefficient is non-negative: no cost can be bought back.

The coefficients depend on the regime of the pass where a profile has two: decode-only, where every chunk is one token,
and mixed. On GPUs they differ, because engines run other kernels for a pass in which a chunk has more than one token.

The same formula is asked for single passes (counts of one micro-batch), for decode steps planned ahead (arrays over the
steps), and for steps in lockstep (sums over the steps, since the formula is linear in cells and runs).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvsim.costs.profile import PassCosts, Profile
from kvsim.costs.tables import FloatArray, SecondsTable, shares
from policies import FastForward, Group, Kernel, MicroBatch, Reads
from policies.fast_forward.forecast import StepReads
from policies.fast_forward.lockstep import NO_READS, Forecast, NextStepReads, PassReads, PassSummary, StepArrays
from policies.vocabulary import IntArray

_Charge = Literal["scanned", "useful", "span", "runs"]
"""What decode steps are charged for, of what they read."""


def scans_together(kernel: Kernel, group: Group) -> bool:
    """Whether all tokens of a pass scan the same cells; otherwise each chunk scans its own."""
    return kernel == "masked" and group.streams == 1


class AttentionTerms(NamedTuple):
    """Seconds of attention in a pass by what is scanned: numbers, or arrays of shape (steps,)."""

    useful_s: Any
    """Over cells that the token's sequence can see."""
    holes_s: Any
    """Over all other cells, and over further runs where cells do not come in blocks."""


class RegimePrice:
    """The formula with the coefficients of one regime, one kernel and the groups of one policy; seconds."""

    def __init__(self, profile: Profile, costs: PassCosts, kernel: Kernel, groups: Sequence[Group]):
        rates = profile.kernel_costs(costs, kernel)
        self._matrix = SecondsTable(0.0, [slope.value for slope in costs.matmul_slopes_s], costs.matmul_knots)
        self._head: SecondsTable | None = None
        if costs.sequence_knots:
            slopes = [slope.value for slope in costs.sequence_slopes_s]
            self._head = SecondsTable(0.0, slopes, costs.sequence_knots)
        further = [slope.value for slope in rates.further_token_s]
        tiled = (rates.tiles_from, rates.tiled_cell_s.value, rates.tiled_token_s.value) if rates.tiles_from else None
        self._cell = SecondsTable(rates.per_cell_s.value, further, costs.attention_knots, tiled)
        self._chunk_knots = costs.chunk_knots
        self._by_chunks = [[c.value for c in each] for each in (rates.cell_by_chunks_s, rates.long_cell_by_chunks_s)]
        self._long_context = costs.long_context
        self._cells_of_one: dict[int, tuple[float, float]] = {}
        """By number of chunks: a cell that a chunk of one token scans, and what it costs more in a long context."""
        self._base, self._chunk, self._run = rates.base_s.value, rates.per_chunk_s.value, rates.per_run_s.value
        self._skips, self._causal = rates.skips, rates.causal
        self._host = profile.host_s
        self._share = sum(group.share for group in groups)
        self.base_s = self._share * self._base + self._host
        """Each pass, whatever is in it, over all groups, with what the host adds."""

    def matrix_s(self, tokens: int) -> float:
        """Matrix work of a pass of ``tokens`` tokens."""
        return self._matrix[tokens]

    def chunks_s(self, chunks: int) -> float:
        """What a pass costs for having ``chunks`` chunks, over all groups."""
        return self._share * self._chunk * chunks + self._head_s(chunks)

    def total(self, tokens: int, chunks: int, groups: Iterable[tuple[float, Any, Any]]) -> Any:
        """The formula. ``groups``: share, seconds of attention, and runs of each cache group.

        Attention and runs are numbers, or arrays of shape (steps,); so is the result.
        """
        seconds: Any = self._matrix[tokens] + (self._host + self._head_s(chunks))
        for share, attention, runs in groups:
            seconds = seconds + share * (self._base + attention + (self._chunk * chunks + self._run * runs))
        return seconds

    def _head_s(self, chunks: int) -> float:
        return self._head[chunks] if self._head is not None and chunks else 0.0

    def runs_s(self, runs: Any) -> Any:
        """Reading ``runs`` runs of cells in a group of share 1: a number or an array."""
        return self._run * runs

    def cell_s(self, chunks: int) -> float:
        """One cell that a chunk of one token scans in a pass of ``chunks`` chunks, for a group of share 1."""
        return self._cell_costs(chunks)[0] if self._chunk_knots else self._cell[1]

    def _cell_costs(self, chunks: int) -> tuple[float, float]:
        found = self._cells_of_one.get(chunks)
        if found is None:
            weights = shares(chunks, self._chunk_knots)
            cell, more = [float(weights @ costs) if costs else 0.0 for costs in self._by_chunks]
            found = self._cells_of_one[chunks] = cell, more
        return found

    def singles_s(self, count: int, cells: Any, chunks: int) -> Any:
        """Attention of ``count`` chunks of one token over ``cells`` cells together, for a group of share 1.

        ``chunks``: all chunks of the pass.
        """
        if not self._chunk_knots:
            return self._cell[1] * cells
        cell, more = self._cell_costs(chunks)
        return cell * cells + more * max(cells - self._long_context * count, 0)

    def longer_s(self, tokens: int, cells: Any) -> Any:
        """Attention of one chunk of two tokens or more over ``cells`` cells, for a group of share 1."""
        if self._causal:
            # Tokens do not read the cells of those behind them in the chunk: half of its square. Behind a window, a
            # chunk may read fewer cells than it has tokens.
            cells = max(cells - (tokens - 1) / 2, cells / 2)
        return self._cell[tokens] * cells

    def together_s(self, tokens: int, span: int) -> float:
        """Attention of ``tokens`` tokens that all scan the same ``span`` cells, for a group of share 1."""
        return float(self._cell[tokens] * span)

    def attention(self, tokens: int, reads: Reads, together: bool) -> float:
        """Seconds over all cells that are scanned in one pass, for one group of share 1."""
        if together:
            return self.together_s(tokens, reads.span)
        return self.attention_over(reads.tokens.tolist(), self.scanned(reads).tolist())

    def scanned(self, reads: Reads) -> NDArray[np.int64]:
        """Cells that each chunk is charged for; int64 of shape (chunks,)."""
        return reads.useful if self._skips else reads.scanned

    def attention_over(self, tokens: Sequence[int], cells: Sequence[int]) -> float:
        """Seconds over the cells that the chunks of a pass scan, each its own; tokens and cells by chunk."""
        if not (self._causal or self._chunk_knots):
            return float(sum(map(operator.mul, map(self._cell.__getitem__, tokens), cells)))
        seconds, count, single = 0.0, 0, 0
        for n, seen in zip(tokens, cells, strict=True):
            if n == 1:
                count += 1
                single += seen
            else:
                seconds += self.longer_s(n, seen)
        return float(seconds + self.singles_s(count, single, len(tokens)))

    def attention_of_steps(self, tokens: int, sums: StepReads, together: bool) -> NDArray[np.floating[Any]]:
        """``attention`` in each of some decode steps; shape (steps,)."""
        if together:
            return self._cell[tokens] * sums.span
        return self.cell_s(tokens) * (sums.useful if self._skips else sums.scanned)


class PassPrice:
    """Prices forward passes under one kernel over the cache groups of one policy; all results are in seconds."""

    def __init__(self, profile: Profile, kernel: Kernel, groups: Sequence[Group]):
        self._groups = tuple(groups)
        self._together = tuple(scans_together(kernel, group) and profile.measured_kernel(kernel) for group in groups)
        self._decode = RegimePrice(profile, profile.decode, kernel, groups)
        self._mixed = self._decode
        if profile.mixed is not None:
            self._mixed = RegimePrice(profile, profile.mixed, kernel, groups)
        self._skips = profile.kernel_costs(profile.decode, kernel).skips
        self._fixed: dict[int, float] = {}
        """Seconds of a pass of a lockstep batch by its number of sequences, apart from what it reads."""
        self.most_tokens = 0
        """Tokens of the largest pass that was priced."""
        self.most_cells = 0
        """Cells that one token was scored against, at most, in the passes that were priced."""

    def regime(self, tokens: int, chunks: int) -> RegimePrice:
        """The coefficients for a pass: those of decode-only passes if each chunk is one token, or of mixed ones."""
        return self._decode if tokens == chunks else self._mixed

    def of_batch(self, batch: MicroBatch) -> float:
        """One micro-batch."""
        n, chunks, asked = batch.n_tokens, len(batch.chunks), []
        price = self.regime(n, chunks)
        if n > self.most_tokens:
            self.most_tokens = n
        for place, group, together in zip(batch.places, self._groups, self._together, strict=True):
            reads = place.reads
            longest = int((reads.useful if self._skips else reads.scanned).max())
            if longest > self.most_cells:
                self.most_cells = longest
            asked.append((group.share, price.attention(n, reads, together), int(reads.runs.sum())))
        return float(price.total(n, chunks, asked))

    def of_counts(self, tokens: int, chunks: int, runs: int, scans: Sequence[tuple[int, int]]) -> float:
        """One pass of which only counts are known (see ``pass_layout.Work``), over one cache group."""
        price, (group,) = self.regime(tokens, chunks), self._groups
        attention = price.attention_over([n for n, _ in scans], [cells for _, cells in scans])
        return float(price.total(tokens, chunks, ((group.share, attention, runs),)))

    def of_steps(self, steps: FastForward) -> list[FloatArray]:
        """Each pass of decode steps that are planned ahead; float64 arrays of shape (steps,)."""
        found, price = [], self._decode
        for each in steps.passes:
            asked = []
            for sums, group, together in zip(each.groups, self._groups, self._together, strict=True):
                asked.append((group.share, price.attention_of_steps(each.tokens, sums, together), sums.runs))
            found.append(np.asarray(price.total(each.tokens, each.tokens, asked)))
        return found

    def of_mixed_step(self, tokens: int, reads: NextStepReads, chunks: PassSummary) -> float:
        """A pass in which a lockstep batch of ``tokens`` sequences gets its tokens beside some chunks."""
        n, k = tokens + chunks.tokens, tokens + len(chunks.chunk_reads)
        price = self.regime(n, k)
        asked = [self._mixed_group(price, 0, tokens, reads, chunks)]
        for i, summary in enumerate(chunks.further):
            own = reads.further[i] if reads.further else NO_READS
            asked.append(self._mixed_group(price, i + 1, tokens, own, summary))
        if n > self.most_tokens:
            self.most_tokens = n
        seconds: float = price.total(n, k, asked)
        return seconds

    def _mixed_group(
        self, price: RegimePrice, group: int, tokens: int, reads: NextStepReads, chunks: PassSummary
    ) -> tuple[float, float, int]:
        """Share, seconds of attention and runs of one cache group in such a pass."""
        attention, runs, longest = 0.0, reads.runs, reads.max_scanned_per_token
        useful = chunks.useful if self._skips else None
        count, single = tokens, reads.scanned if useful is None or reads.useful is None else reads.useful
        for i, (each, scanned, pieces) in enumerate(chunks.chunk_reads):
            cells = scanned if useful is None else useful[i]
            if each == 1:
                count += 1
                single += cells
            else:
                attention += price.longer_s(each, cells)
            runs += pieces
            if cells > longest:
                longest = cells
        if self._together[group]:
            attention = price.together_s(tokens + chunks.tokens, chunks.span)
        else:
            attention += price.singles_s(count, single, tokens + len(chunks.chunk_reads))
        if longest > self.most_cells:
            self.most_cells = longest
        return self._groups[group].share, attention, runs

    def of_lockstep_step(self, members: int) -> tuple[float, float, float]:
        """What a step of a lockstep batch costs: whatever it reads, for each cell charged for, and for each run.

        Of one that makes a single pass over a single cache group.
        """
        share, price = self._groups[0].share, self._decode
        cell_s = price.together_s(members, 1) if self._together[0] else price.cell_s(members)
        return self._fixed_s(members), share * cell_s, share * price.runs_s(1)

    def of_lockstep_steps(self, members: int, forecast: Forecast) -> Callable[[int], float]:
        """The seconds of the first ``steps`` steps of a lockstep batch together, as a function of ``steps``.

        Copies that are made between the steps are not included.
        """
        fixed, found = self._lockstep_terms(members, forecast)
        terms = [(each, _total(what, reads)) for each, what, reads in found]
        if len(terms) == 1:
            ((scan, total),) = terms
            return lambda steps: steps * fixed + scan * total(steps)

        def seconds(steps: int) -> float:
            found = steps * fixed
            for each, sum_of in terms:
                found += each * sum_of(steps)
            return found

        return seconds

    def of_each_lockstep_step(self, members: int, forecast: Forecast, steps: int) -> FloatArray:
        """The seconds of each of the first ``steps`` steps, if each can be looked at; shape (steps,)."""
        fixed, terms = self._lockstep_terms(members, forecast)
        seconds = np.full(steps, fixed)
        for each, what, reads in terms:
            seconds += each * _each(what, reads, steps)
        return seconds

    def _lockstep_terms(self, members: int, forecast: Forecast) -> tuple[float, list[tuple[float, _Charge, PassReads]]]:
        """What steps of a lockstep batch cost: whatever they read, and each unit of what is charged for."""
        fixed, price = 0.0, self._decode
        terms: list[tuple[float, _Charge, PassReads]] = []
        for sizes, groups in forecast.passes(members, price.cell_s):
            tokens = sizes[0]
            for size in sizes:
                fixed += self._fixed_s(size)
            for reads, group, together in zip(groups, self._groups, self._together, strict=True):
                if together:
                    terms.append((group.share * price.together_s(tokens, 1), "span", reads))
                else:
                    terms.append((group.share * price.cell_s(tokens), "useful" if self._skips else "scanned", reads))
                run = group.share * price.runs_s(1)
                if run:
                    terms.append((run, "runs", reads))
        return fixed, terms

    def _fixed_s(self, tokens: int) -> float:
        """Seconds of a pass of a token each of ``tokens`` sequences, apart from what it reads."""
        fixed = self._fixed.get(tokens)
        if fixed is None:
            nothing = [(group.share, 0.0, 0) for group in self._groups]
            fixed = self._fixed[tokens] = self._decode.total(tokens, tokens, nothing)
        return fixed

    def attention_of_batch(self, batch: MicroBatch, *, runs_are_holes: bool) -> AttentionTerms:
        """Attention in one micro-batch, split. ``runs_are_holes``: count runs beyond one for each chunk as holes."""
        useful_s = holes_s = 0.0
        price = self.regime(batch.n_tokens, len(batch.chunks))
        for place, group, together in zip(batch.places, self._groups, self._together, strict=True):
            reads = place.reads
            whole = price.attention(batch.n_tokens, reads, together)
            if together:
                scores = int(reads.tokens @ reads.scanned)
                # Behind a window, a chunk's tokens together can see more cells than are still held for them.
                visible = int(reads.tokens @ np.minimum(reads.useful, reads.scanned))
                useful = whole * (visible / scores) if scores else whole
            else:
                seen = np.minimum(reads.useful, price.scanned(reads))
                useful = price.attention_over(reads.tokens.tolist(), seen.tolist())
            runs, chunks = int(reads.runs.sum()), len(reads.tokens)
            further = runs - chunks if runs_are_holes else 0
            share = group.share
            useful_s += share * (useful + price.runs_s(runs - further))
            holes_s += share * (whole - useful + price.runs_s(further))
        return AttentionTerms(useful_s, holes_s)

    def attention_of_steps(self, steps: FastForward, *, runs_are_holes: bool) -> list[AttentionTerms]:
        """Attention in each pass of planned decode steps, split; arrays of shape (steps,)."""
        found, price = [], self._decode
        for each in steps.passes:
            useful_s, holes_s = np.zeros(steps.steps), np.zeros(steps.steps)
            for sums, group, together in zip(each.groups, self._groups, self._together, strict=True):
                whole = price.attention_of_steps(each.tokens, sums, together)
                if together:
                    seen = np.ones(steps.steps)
                    np.divide(sums.useful, sums.scanned, out=seen, where=sums.scanned > 0)
                    useful: NDArray[np.floating[Any]] = whole * seen
                else:
                    useful = price.cell_s(each.tokens) * sums.useful
                further = sums.runs - each.tokens if runs_are_holes else 0
                share = group.share
                useful_s += share * (useful + price.runs_s(sums.runs - further))
                holes_s += share * (whole - useful + price.runs_s(further))
            found.append(AttentionTerms(useful_s, holes_s))
        return found

    def reached(self, tokens: int, cells: int) -> None:
        """Remember the size of a pass, and how many cells one of its tokens was scored against."""
        if tokens > self.most_tokens:
            self.most_tokens = tokens
        if cells > self.most_cells:
            self.most_cells = cells

    def reached_by(self, steps: FastForward) -> None:
        """Remember the sizes of decode steps that were taken."""
        for each in steps.passes:
            self.reached(each.tokens, max(int(sums.max_scanned_per_token.max()) for sums in each.groups))


def _total(what: _Charge, reads: PassReads) -> Callable[[int], int]:
    """How much some steps together are charged for."""
    if what == "scanned":
        return reads.total_scanned
    if what == "useful":
        return reads.total_useful
    return reads.total_span if what == "span" else reads.total_runs


def _each(what: _Charge, reads: PassReads, steps: int) -> IntArray:
    """How much each of some steps is charged for; shape (steps,)."""
    arrays = cast("StepArrays", reads)
    if what == "scanned":
        return arrays.each_scanned(steps)
    if what == "useful":
        return arrays.each_useful(steps)
    return arrays.each_span(steps) if what == "span" else arrays.each_runs(steps)
