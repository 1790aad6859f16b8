"""Fits costs to measurements by non-negative least squares on relative errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvsim.costs.pass_price import scans_together
from kvsim.costs.profile import Attention, Coefficient, CopyCost, Fit, HeldOut, HostCopyCost, PassCosts, Record, Regime
from kvsim.costs.tables import (
    ATTENTION_KNOTS,
    CHUNK_KNOTS,
    DEVICE_KNOTS,
    KNOTS,
    LONG_CONTEXT,
    SEQUENCE_KNOTS,
    FloatArray,
    knots_within,
    segments,
    shares,
)
from policies import Group, Kernel, MicroBatch

_RESAMPLES = 200
_CLIP = 2.0
"""Bound on measured over predicted seconds in a fit: a pass that took longer was disturbed, and counts as if at it."""


class Work(Record):
    """The work of a forward pass, as counts."""

    tokens: int
    scans: tuple[tuple[int, int], ...]
    """Pairs: number of tokens that scan the same cells together, and number of these cells."""
    chunks: int
    runs: int


class Sample(Work):
    """A measured forward pass: its work and its seconds."""

    kernel: Kernel
    further: tuple[Work, ...] = ()
    """Passes that were timed together with it, where an engine takes a step as a whole."""
    seconds: float
    origin: int
    """Number of the server run or trial that the pass was measured in; passes of one origin are held out together."""
    mixed: bool = False
    """Whether it was measured once, in a running server; otherwise it is the median of several passes run alone."""


REGIMES: tuple[Regime, ...] = ("decode", "mixed")
"""The regimes of passes."""


def regime_of(work: Work) -> Regime:
    """The regime of a pass: decode-only if each of its chunks is one token."""
    return "decode" if work.tokens == work.chunks else "mixed"


class MoveSample(Record):
    """One measured compaction."""

    runs: int
    cells: int
    seconds: float


class ShiftSample(Record):
    """One measured rotation of keys."""

    cells: int
    seconds: float


class HostCopySample(Record):
    """One measured copy of a sequence to host memory, or back."""

    out: bool
    runs: int
    cells: int
    seconds: float


def work_of(kernel: Kernel, batch: MicroBatch, group: Group, skips: bool = False) -> Work:
    """The work of a pass over a single cache group; ``skips`` as in ``Attention``."""
    reads = batch.reads
    together = ((batch.n_tokens, reads.span),)
    each = reads.useful if skips else reads.scanned
    apart = tuple(zip(reads.tokens.tolist(), each.tolist(), strict=True))
    return Work(
        tokens=batch.n_tokens,
        scans=together if scans_together(kernel, group) else apart,
        chunks=len(batch.chunks),
        runs=int(reads.runs.sum()),
    )


def sample_of(
    kernel: Kernel,
    batches: Sequence[MicroBatch],
    group: Group,
    seconds: float,
    origin: int,
    mixed: bool,
    skips: bool = False,
) -> Sample:
    """A measurement of one pass, or of several that were timed together, over one cache group."""
    first, *further = (work_of(kernel, batch, group, skips) for batch in batches)
    return Sample(**dict(first), kernel=kernel, further=tuple(further), seconds=seconds, origin=origin, mixed=mixed)


@dataclass(frozen=True)
class Fitted:
    """Fitted costs, and how well they predict passes that were held out."""

    fit: Fit
    held_out: pd.DataFrame
    """One row for each held-out pass: kernel, tokens, chunks, mixed, measured_s, predicted_s."""


def fit(
    samples: Sequence[Sample],
    moves: Sequence[MoveSample],
    shifts: Sequence[ShiftSample],
    rng: np.random.Generator,
    skipping: Collection[Kernel] = (),
    unpaced_s: Sequence[float] | None = None,
    host_copies: Sequence[HostCopySample] = (),
) -> Fitted:
    """Fit all coefficients with non-negative least squares on relative errors.

    ``skipping``: the kernels of whose passes the samples count useful cells alone (see ``Attention.skips``).
    ``unpaced_s``: the samples' seconds before they were divided by the machine's pace, to say what that gained.

    A third of the origins is held out to report the error; the coefficients then come from all samples, and their
    intervals from 200 bootstrap resamples of the origins.
    """
    kernels = tuple(sorted({s.kernel for s in samples}))
    works = [work for sample in samples for work in (sample, *sample.further)]
    layout = _Layout(
        kernels=kernels,
        matmul_knots=knots_within(KNOTS, max(work.tokens for work in works)),
        attention_knots=knots_within(ATTENTION_KNOTS, max(together for work in works for together, _ in work.scans)),
        skipping=frozenset(skipping),
    )
    design = layout.design(samples)
    seconds = np.array([s.seconds for s in samples])
    origins, member = np.unique([s.origin for s in samples], return_inverse=True)
    held = np.isin(member, rng.permutation(len(origins))[: len(origins) // 3])
    held_out = _held_out(samples, seconds, _predict_held_out(design, seconds, held), held)
    error = (held_out["predicted_s"] / held_out["measured_s"] - 1).abs()
    without_pace = None
    if unpaced_s is not None:
        unpaced = np.array(unpaced_s)
        without_pace = float(np.median(np.abs(_predict_held_out(design, unpaced, held) / unpaced[held] - 1)))

    coefficients = _with_intervals(design, seconds, member, rng)
    copies = None
    if moves:
        each, per_run, per_cell = _simple([[1, m.runs, m.cells] for m in moves], [m.seconds for m in moves], rng)
        copies = CopyCost(per_pass_s=each, per_run_s=per_run, per_cell_s=per_cell)
    (per_key,) = _simple([[s.cells] for s in shifts], [s.seconds for s in shifts], rng)
    fitted = Fit(
        **dict(layout.costs(coefficients)),
        moves=copies,
        shift_per_cell_s=per_key,
        host_copies=_host_copies(host_copies, rng),
        held_out_samples=int(held.sum()),
        held_out_error_median=float(error.median()),
        held_out_error_p95=float(error.quantile(0.95)),
        held_out_error_median_without_pace=without_pace,
    )
    return Fitted(fitted, held_out)


def _host_copies(samples: Sequence[HostCopySample], rng: np.random.Generator) -> HostCopyCost | None:
    """The costs of copies to host memory and back; None unless both were measured."""
    ways = [sample for sample in samples if sample.out], [sample for sample in samples if not sample.out]
    if not all(ways):
        return None
    costs = []
    for way in ways:
        several = any(sample.runs > 1 for sample in way)
        design = [[1, sample.runs, sample.cells] if several else [1, 0, sample.cells] for sample in way]
        costs.append(_simple(design, [sample.seconds for sample in way], rng))
    (out, out_run, out_cell), (back, back_run, back_cell) = costs
    return HostCopyCost(
        out_per_copy_s=out,
        out_per_run_s=out_run,
        out_per_cell_s=out_cell,
        in_per_copy_s=back,
        in_per_run_s=back_run,
        in_per_cell_s=back_cell,
    )


@dataclass(frozen=True)
class FittedRegimes:
    """The costs of a device's passes by regime, and how well they predict passes that were held out."""

    costs: dict[Regime, PassCosts]
    errors: dict[Regime, HeldOut]
    held_out: pd.DataFrame
    """One row for each held-out pass: regime, kernel, tokens, chunks, cells, mixed, measured_s, predicted_s."""


def fit_regimes(samples: Sequence[Sample], rng: np.random.Generator) -> FittedRegimes:
    """Fit the costs of decode-only and of mixed passes apart, on a device whose attention is causal.

    A third of the passes of each regime is held out to report the error; the coefficients then come from all. Raises
    ``ValueError`` if a regime has fewer passes than coefficients.
    """
    costs: dict[Regime, PassCosts] = {}
    errors: dict[Regime, HeldOut] = {}
    tables = []
    for regime in REGIMES:
        own = [sample for sample in samples if regime_of(sample) == regime]
        layout = _Layout(
            kernels=tuple(sorted({s.kernel for s in own})),
            matmul_knots=knots_within(DEVICE_KNOTS, max((s.tokens for s in own), default=0)),
            attention_knots=knots_within(ATTENTION_KNOTS, max((n for s in own for n, _ in s.scans), default=0)),
            sequence_knots=knots_within(SEQUENCE_KNOTS, max((s.chunks for s in own), default=0)),
            chunk_knots=knots_within(CHUNK_KNOTS, max((s.chunks for s in own), default=0)) if regime == "mixed" else (),
            causal=True,
        )
        if len(own) < 2 * layout.width:
            raise ValueError(f"{len(own)} {regime} passes; at least {2 * layout.width} are needed for a fit")
        design, seconds = layout.design(own), np.array([s.seconds for s in own])
        held = rng.permutation(len(own)) < len(own) // 3
        predicted = _predict_held_out(design, seconds, held)
        table = _held_out(own, seconds, predicted, held)
        table.insert(0, "regime", regime)
        tables.append(table)
        off = np.abs(predicted / seconds[held] - 1)
        errors[regime] = HeldOut(
            samples=int(held.sum()),
            error_median=float(np.median(off)),
            error_p95=float(np.quantile(off, 0.95)),
            error_most=float(off.max()),
        )
        costs[regime] = layout.costs(_with_intervals(design, seconds, np.arange(len(own)), rng))
    return FittedRegimes(costs, errors, pd.concat(tables, ignore_index=True))


def _held_out(
    samples: Sequence[Sample], seconds: FloatArray, predicted: FloatArray, held: NDArray[np.bool_]
) -> pd.DataFrame:
    out = [s for s, is_held in zip(samples, held, strict=True) if is_held]
    return pd.DataFrame(
        {
            "kernel": [s.kernel for s in out],
            "tokens": [_sum_of(s, "tokens") for s in out],
            "chunks": [_sum_of(s, "chunks") for s in out],
            "cells": [sum(cells for work in (s, *s.further) for _, cells in work.scans) for s in out],
            "mixed": [s.mixed for s in out],
            "measured_s": seconds[held],
            "predicted_s": predicted,
        }
    )


@dataclass(frozen=True)
class _Layout:
    """Which coefficients a fit has, in which order: matrix work by segment, the head by segment, then each kernel's."""

    kernels: tuple[Kernel, ...]
    matmul_knots: tuple[int, ...]
    attention_knots: tuple[int, ...]
    sequence_knots: tuple[int, ...] = ()
    chunk_knots: tuple[int, ...] = ()
    skipping: frozenset[Kernel] = frozenset()
    causal: bool = False

    @property
    def width(self) -> int:
        """Number of coefficients."""
        return len(self.matmul_knots) - 1 + self._head + len(self.kernels) * self._of_kernel

    @property
    def _head(self) -> int:
        return max(len(self.sequence_knots) - 1, 0)

    @property
    def _of_kernel(self) -> int:
        """Coefficients of one kernel: base, cell, further tokens, cell and long cell by chunks, chunk, run."""
        return len(self.attention_knots) + 3 + 2 * len(self.chunk_knots)

    def design(self, samples: Sequence[Sample]) -> FloatArray:
        """How often each sample is charged each coefficient; shape (n_samples, n_coefficients)."""
        works = [(i, self.kernels.index(s.kernel), work) for i, s in enumerate(samples) for work in (s, *s.further)]
        row, kernel = np.array([(i, k) for i, k, _ in works]).T
        tokens, chunks, runs = np.array([(work.tokens, work.chunks, work.runs) for *_, work in works]).T
        matmul = np.zeros((len(samples), len(self.matmul_knots) - 1))
        np.add.at(matmul, row, segments(tokens, self.matmul_knots))
        head = np.zeros((len(samples), self._head))
        if self.sequence_knots:
            np.add.at(head, row, segments(chunks, self.sequence_knots))
        attention = np.zeros((len(samples), len(self.kernels), self._of_kernel))
        np.add.at(attention[..., 0], (row, kernel), 1)
        np.add.at(attention[..., -2], (row, kernel), chunks)
        np.add.at(attention[..., -1], (row, kernel), runs)
        self._charge_scans(attention, works)
        chunks, runs = attention[..., -2], attention[..., -1]
        # Where each chunk is one run, the two cannot be told apart.
        runs[:, (chunks == runs).all(axis=0)] = 0
        return np.hstack([matmul, head, attention.reshape(len(samples), -1)])

    def _charge_scans(self, attention: FloatArray, works: Sequence[tuple[int, int, Work]]) -> None:
        """Add the cells that are scanned to the columns of attention; shape (n_samples, n_kernels, coefficients)."""
        scans = np.array([(i, k, work.chunks, n, cells) for i, k, work in works for n, cells in work.scans])
        row, kernel, chunks, together = scans[:, :4].T
        cells = scans[:, 4].astype(float)
        if self.causal:
            cells -= (together - 1) / 2
        single = (together == 1) & bool(self.chunk_knots)
        further = len(self.attention_knots) + 1
        np.add.at(attention[..., 1], (row, kernel), np.where(single, 0.0, cells))
        np.add.at(attention[..., 2:further], (row, kernel), cells[:, None] * segments(together, self.attention_knots))
        if self.chunk_knots:
            charged = shares(chunks, self.chunk_knots) * np.where(single, cells, 0.0)[:, None]
            np.add.at(attention[..., further : further + len(self.chunk_knots)], (row, kernel), charged)
            for i, k, work in works:
                prompts = sum(n > 1 for n, _ in work.scans)
                beyond = sum(c for n, c in work.scans if n == 1) - LONG_CONTEXT * (work.chunks - prompts)
                if beyond > 0:
                    charged = shares([work.chunks], self.chunk_knots)[0] * beyond
                    attention[i, k, further + len(self.chunk_knots) : -2] += charged

    def costs(self, coefficients: Sequence[Coefficient]) -> PassCosts:
        """The coefficients by name."""
        slopes, width = len(self.matmul_knots) - 1, self._of_kernel
        head, by_chunks = slopes + self._head, len(self.attention_knots) - 1
        long = by_chunks + len(self.chunk_knots)
        kernels = {}
        for i, kernel in enumerate(self.kernels):
            base, per_cell, *tables, per_chunk, per_run = coefficients[head + i * width : head + (i + 1) * width]
            kernels[kernel] = Attention(
                base_s=base,
                per_cell_s=per_cell,
                further_token_s=tuple(tables[:by_chunks]),
                cell_by_chunks_s=tuple(tables[by_chunks:long]),
                long_cell_by_chunks_s=tuple(tables[long:]),
                per_chunk_s=per_chunk,
                per_run_s=per_run,
                skips=kernel in self.skipping,
                causal=self.causal,
            )
        return PassCosts(
            matmul_knots=self.matmul_knots,
            attention_knots=self.attention_knots,
            matmul_slopes_s=tuple(coefficients[:slopes]),
            sequence_knots=self.sequence_knots,
            sequence_slopes_s=tuple(coefficients[slopes:head]),
            chunk_knots=self.chunk_knots,
            long_context=LONG_CONTEXT if self.chunk_knots else 1,
            kernels=kernels,
        )


def digest(*measurements: Iterable[Record]) -> str:
    """SHA-256 of the raw measurements of all kinds."""
    raw = json.dumps([each.model_dump() for kind in measurements for each in kind], sort_keys=True)
    return hashlib.sha256(raw.encode()).hexdigest()


def _predict_held_out(design: FloatArray, seconds: FloatArray, held: NDArray[np.bool_]) -> FloatArray:
    """Seconds of the samples that are held out, from a fit of the others."""
    predicted: FloatArray = design[held] @ _nnls(*_weighted(design[~held], seconds[~held]))
    return predicted


def _sum_of(sample: Sample, count: str) -> int:
    return sum(int(getattr(work, count)) for work in (sample, *sample.further))


def _weighted(design: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rows and right-hand side whose plain least squares are those of the relative errors.

    Relative to what is predicted by a first fit: relative to what was measured, passes that by chance were slow would
    count less than those that were fast, and the fit would come out below the mean.
    """
    first = np.maximum(design @ _nnls(design / seconds[:, None], np.ones(len(seconds))), seconds / 10)
    return design / first[:, None], np.minimum(seconds / first, _CLIP)


def _nnls(rows: FloatArray, aims: FloatArray) -> FloatArray:
    """Non-negative least squares, columns scaled to the same size."""
    scale = _sizes(rows)
    solution, _ = nnls(rows / scale, aims)
    return np.asarray(solution / scale)


def _sizes(rows: FloatArray) -> FloatArray:
    """Size of each column, 1 for columns of zeros; shape (n_columns,)."""
    sizes: FloatArray = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1.0
    return sizes


def _with_intervals(
    design: FloatArray,
    seconds: FloatArray,
    member: NDArray[np.intp],
    rng: np.random.Generator,
) -> list[Coefficient]:
    """The coefficients of all samples, with intervals from resampled origins."""
    rows, aims = _weighted(design, seconds)
    value = _nnls(rows, aims)
    # Least squares know the rows only by their products, which are added up by origin once.
    scale = _sizes(rows)
    both = np.hstack([rows / scale, aims[:, None]])
    n_origins, width = member.max() + 1, both.shape[1]
    products = np.zeros((n_origins, width, width))
    for origin in range(n_origins):
        own = both[member == origin]
        products[origin] = own.T @ own
    others = np.zeros((_RESAMPLES, width - 1))
    for other in others:
        times = np.bincount(rng.integers(0, n_origins, n_origins), minlength=n_origins)
        product = np.tensordot(times, products, axes=1)
        asked = np.flatnonzero(product.diagonal()[:-1] > 0)
        size, axes = np.linalg.eigh(product[np.ix_(asked, asked)])
        kept = size > size[-1] * 1e-13
        root, axes = np.sqrt(size[kept]), axes[:, kept]
        solution, _ = nnls((axes * root).T, axes.T @ product[asked, -1] / root)
        other[asked] = solution / scale[asked]
    low, high = np.quantile(others, [0.025, 0.975], axis=0)
    return _coefficients(value, low, high)


def _simple(design: list[list[int]], seconds: list[float], rng: np.random.Generator) -> list[Coefficient]:
    """Fit a few samples, each with an origin of its own."""
    rows = np.array(design, dtype=float)
    return _with_intervals(rows, np.array(seconds), np.arange(len(rows)), rng)


def _coefficients(value: FloatArray, low: FloatArray, high: FloatArray) -> list[Coefficient]:
    triples = zip(value.tolist(), np.minimum(low, value).tolist(), np.maximum(high, value).tolist(), strict=True)
    return [Coefficient(value=v, low=lo, high=hi) for v, lo, hi in triples]
