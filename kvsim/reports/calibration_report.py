"""The reports of calibrations: fitted costs with their intervals, how well they predict, and what benchmarks say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvsim.reports.formats import error, number, seconds
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.calibration.bench_calibration import BenchCalibration
    from kvsim.calibration.bench_correction import Checked
    from kvsim.calibration.run import Calibration
    from kvsim.costs.profile import Coefficient, PassCosts, Profile
    from kvsim.engines.live.calibration import ServerCalibration

_Cost = tuple[str, "Coefficient"]

_COLUMNS = (
    Column("cost", 0),
    Column("value", lambda row: row[1].value, seconds),
    Column("95 % interval", lambda row: f"{seconds(row[1].low)} to {seconds(row[1].high)}"),
)


def calibration_report(c: Calibration) -> Report:
    """The costs of an engine on this machine."""
    p = c.profile
    lines = [
        f"held-out error over {p.held_out_samples:,} forward passes: median {p.held_out_error_median:.1%}, "
        f"P95 {p.held_out_error_p95:.1%}"
    ]
    if p.pace is not None and p.held_out_error_median_without_pace is not None:
        lines.append(
            f"the machine's pace was {p.pace.p5:.2f} to {p.pace.p95:.2f} of its median (P5 to P95); without dividing "
            f"by it the median error is {p.held_out_error_median_without_pace:.1%}"
        )
    known = f": half of the passes are known to ±{c.half_width:.1%} or better" if c.half_width < 1 else ""
    before = f", {c.resumed:,} measurements of an earlier call included" if c.resumed else ""
    lines.append(f"every pass was measured {c.rounds:.1f} times on average{before}, until {_ended(c.tight)}{known}")
    lines.append(_reach(p))
    if c.left_out >= 0.01:
        lines.append(f"left out: {c.left_out:.0%} of the measurements, during which other work had the processor")
    return _report(p, [*_passes(p), *_copies(p)], lines)


def server_calibration_report(c: ServerCalibration) -> Report:
    """The costs of a server's passes by regime."""
    p = c.profile
    costs = [*_passes(p.decode, "decode-only: ")]
    if p.mixed is not None:
        costs += _passes(p.mixed, "mixed: ")
    if p.front_end_s is not None:
        costs.append(("a request, before and behind its passes (front end)", p.front_end_s))
    lines = [
        f"held-out error over {error.samples:,} {regime} steps: median {error.error_median:.1%}, "
        f"P95 {error.error_p95:.1%}"
        for regime, error in p.held_out.items()
    ]
    known = f": half of the kinds of steps are known to ±{c.half_width:.1%} or better" if c.half_width < 1 else ""
    before = f", {c.resumed:,} staircases of an earlier call included" if c.resumed else ""
    lines.append(f"{p.samples:,} steps in {c.rounds:.1f} rounds of the load{before}, until {_ended(c.tight)}{known}")
    lines.append(_reach(p))
    if c.left_out >= 0.01:
        lines.append(f"left out: {c.left_out:.0%} of the steps, since it is not certain how long they took")
    return _report(p, costs, [*lines, *(f"assumed: {line}" for line in p.assumed)])


def _report(p: Profile, costs: list[_Cost], lines: list[str]) -> Report:
    return Report(
        sections=[
            Section("Costs", tables=[Table("Fitted costs", _COLUMNS, costs)]),
            Section("How well they predict", lines),
            Section(notes=[p.describe()]),
        ]
    )


def _ended(tight: bool) -> str:
    return "the intervals were tight" if tight else "the time was over"


def _reach(p: Profile) -> str:
    return f"measured up to {p.tokens.high:,} tokens in a pass, and {p.cells.high:,} cells for a token"


def _passes(costs: PassCosts, of: str = "") -> Iterator[_Cost]:
    """The costs of passes; ``of``: of which, at the beginning of each line."""
    for low, high, slope in zip(costs.matmul_knots, costs.matmul_knots[1:], costs.matmul_slopes_s, strict=False):
        yield f"{of}a token more, {low} to {high} tokens", slope
    for kernel, attention in costs.kernels.items():
        by = f"{of}{kernel} attention, "
        yield f"{by}a pass of one token", attention.base_s
        yield f"{by}a cell for one token", attention.per_cell_s
        knots = costs.attention_knots
        for low, high, slope in zip(knots, knots[1:], attention.further_token_s, strict=False):
            yield f"{by}that cell for a token more, {low} to {high} tokens", slope
        if attention.tiles_from:
            yield (
                f"{by}a cell of a chunk of {attention.tiles_from} tokens or more, for one token",
                attention.tiled_cell_s,
            )
            yield f"{by}that cell for a token more", attention.tiled_token_s
        yield f"{by}a chunk", attention.per_chunk_s
        yield f"{by}a run of cells", attention.per_run_s


def _copies(p: Profile) -> Iterator[_Cost]:
    """The costs of moves, and of copies to and from the host."""
    if (moves := p.moves) is not None:
        yield "moves, each compaction", moves.per_pass_s
        yield "moves, per run of cells", moves.per_run_s
        yield "moves, per cell", moves.per_cell_s
    if (copies := p.host_copies) is not None:
        yield "a sequence to the host", copies.out_per_copy_s
        yield "a sequence to the host, per run of cells", copies.out_per_run_s
        yield "a sequence to the host, per cell", copies.out_per_cell_s
        yield "a sequence back from the host", copies.in_per_copy_s
        yield "a sequence back from the host, per run of cells", copies.in_per_run_s
        yield "a sequence back from the host, per cell", copies.in_per_cell_s


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
