"""The report of ``kvsim calibrate --from``: what benchmarks say of a profile, and the profile after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvsim.reports.formats import error, number, seconds
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.calibration.bench_calibration import BenchCalibration
    from kvsim.calibration.bench_correction import Checked

_SIZES = (1, 16, 512)
"""Tokens of the passes whose factors are shown, as far as rows tell of them."""


def bench_calibration_report(done: BenchCalibration) -> Report:
    """Each row, measured and predicted; the factors; what is not known, and what would tell."""
    before = np.array([abs(_error(row, row.estimate_s)) for row in done.correction.rows])
    conclusions = [
        f"Before, these rows were predicted within {np.median(before):.1%} (median) and {before.max():.1%} (most).",
        *(f"No row tells of {each.part}; this would: {each.command}" for each in done.unknown),
    ]
    rows = Table(
        "Rows",
        [
            Column("row", lambda row: row.point.title),
            Column("measured", lambda row: row.point.seconds / row.per_what, seconds),
            Column("before", lambda row: _error(row, row.estimate_s), error),
            Column("corrected", lambda row: _error(row, row.corrected_s), error),
            Column("if left out", lambda row: None if row.left_out_s is None else _error(row, row.left_out_s), error),
        ],
        list(done.correction.rows),
        note="measured: of tg, a step; of pp, all prompts together. Errors: predicted over measured, less 1.",
    )
    factors = Table("Factors", [Column("part", 0), Column("times as long", 1, number)], _factors(done))
    return Report(
        basis=[done.profile.basis],
        conclusions=conclusions,
        about=[*done.subject.notes, done.range],
        sections=[Section("Rows and factors", tables=[rows, factors])],
        warnings=[f"warning: {line}" for line in done.warnings],
    )


def _error(row: Checked, predicted_s: float) -> float:
    return predicted_s / row.point.seconds - 1


def _factors(done: BenchCalibration) -> list[tuple[str, float]]:
    """The factors that rows tell of."""
    f = done.correction.factors
    found = [(f"work of a pass of {n:,} token{'s' * (n > 1)}", float(f.work([n])[0])) for n in _SIZES if f.tells_of(n)]
    found += [("attention of decodes", f.decode)] if f.tells_of_decode else []
    return found + ([("attention of prompts", f.prompt)] if f.tells_of_prompt else [])
