"""Fits costs to measurements by non-negative least squares on relative errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsim.costs.least_squares import predict_held_out, simple_fit, with_intervals
from kvsim.costs.pass_layout import PassLayout, Sample
from kvsim.costs.profile import CopyCost, Fit, HeldOut, HostCopyCost, PassCosts, Profile, Range, Regime
from kvsim.costs.records import Record
from kvsim.costs.tables import (
    ATTENTION_KNOTS,
    KNOTS,
    FloatArray,
    knots_within,
)
from policies import Kernel


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
    works = [work for sample in samples for work in sample.works]
    layout = PassLayout(
        kernels=kernels,
        matmul_knots=knots_within(KNOTS, max(work.tokens for work in works)),
        attention_knots=knots_within(ATTENTION_KNOTS, max(together for work in works for together, _ in work.scans)),
        skipping=frozenset(skipping),
    )
    design = layout.design(samples)
    seconds = np.array([s.seconds for s in samples])
    origins, member = np.unique([s.origin for s in samples], return_inverse=True)
    held = np.isin(member, rng.permutation(len(origins))[: len(origins) // 3])
    held_out = held_out_table(samples, seconds, predict_held_out(design, seconds, held), held)
    error = held_out_error(held_out)
    without_pace = None
    if unpaced_s is not None:
        unpaced = np.array(unpaced_s)
        without_pace = float(np.median(np.abs(predict_held_out(design, unpaced, held) / unpaced[held] - 1)))

    coefficients = with_intervals(design, seconds, member, rng)
    copies = None
    if moves:
        each, per_run, per_cell = simple_fit([[1, m.runs, m.cells] for m in moves], [m.seconds for m in moves], rng)
        copies = CopyCost(per_pass_s=each, per_run_s=per_run, per_cell_s=per_cell)
    (per_key,) = simple_fit([[s.cells] for s in shifts], [s.seconds for s in shifts], rng)
    fitted = Fit(
        **dict(layout.costs(coefficients)),
        moves=copies,
        shift_per_cell_s=per_key,
        host_copies=_host_copies(host_copies, rng),
        held_out_samples=error.samples,
        held_out_error_median=error.error_median,
        held_out_error_p95=error.error_p95,
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
        costs.append(simple_fit(design, [sample.seconds for sample in way], rng))
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

    def profile(self, samples: Sequence[Sample], **about: Any) -> Profile:
        """The profile of what was fitted to these samples; ``about``: its other fields."""
        error = held_out_error(self.held_out)
        return Profile(
            **dict(self.costs["decode"]),
            mixed=self.costs["mixed"],
            held_out_samples=error.samples,
            held_out_error_median=error.error_median,
            held_out_error_p95=error.error_p95,
            held_out=self.errors,
            samples=len(samples),
            digest=digest(samples),
            **about,
        )


def held_out_table(
    samples: Sequence[Sample], seconds: FloatArray, predicted: FloatArray, held: NDArray[np.bool_]
) -> pd.DataFrame:
    """One row for each pass that is held out: what it was, measured_s and predicted_s."""
    out = [s for s, is_held in zip(samples, held, strict=True) if is_held]
    return pd.DataFrame(
        {
            "kernel": [s.kernel for s in out],
            "tokens": [sum(work.tokens for work in s.works) for s in out],
            "chunks": [sum(work.chunks for work in s.works) for s in out],
            "cells": [sum(cells for work in s.works for _, cells in work.scans) for s in out],
            "mixed": [s.mixed for s in out],
            "measured_s": seconds[held],
            "predicted_s": predicted,
        }
    )


def held_out_error(held_out: pd.DataFrame) -> HeldOut:
    """The relative errors of the passes of a table, which are one at least."""
    off = (held_out["predicted_s"] / held_out["measured_s"] - 1).abs()
    return HeldOut(
        samples=len(off),
        error_median=float(off.median()),
        error_p95=float(off.quantile(0.95)),
        error_most=float(off.max()),
    )


def ranges_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Fewest and most ``tokens`` in a pass, and ``cells`` that a token is scored against."""
    works = [work for sample in samples for work in sample.works]
    cells = [each for work in works for _, each in work.scans]
    tokens = [work.tokens for work in works]
    return {"tokens": Range(low=min(tokens), high=max(tokens)), "cells": Range(low=min(cells), high=max(cells))}


def digest(*measurements: Iterable[Record]) -> str:
    """SHA-256 of the raw measurements of all kinds."""
    raw = json.dumps([each.model_dump() for kind in measurements for each in kind], sort_keys=True)
    return hashlib.sha256(raw.encode()).hexdigest()
