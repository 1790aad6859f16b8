"""Corrects the tables of a profile by what a benchmark has timed on the same device and model.

Few rows tell little, so little is fitted: how many times as long the work takes, as a curve over the tokens of a pass
(one corrected size tells of those near it), and attention of decodes and of prompts. Each factor is held to 1 as far as
no row says otherwise: a Gaussian prior on its logarithm, which for the curve fades with the distance between sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import least_squares

from kvsim.calibration.bench_files.points import BenchPoint
from kvsim.calibration.bench_passes import Limits, PartPrices, Parts, Pass, least_work, passes_of
from kvsim.costs.pass_tables import Grid, Line, PassTables
from kvsim.costs.physics import PassPhysics
from kvsim.costs.profile import HeldOut, Profile, Regime
from kvsim.costs.tables import FloatArray

_KNOTS = np.arange(15.0)
"""Binary logarithms of the tokens at which the curve has a value, 1 to 16,384; beyond, it is that of the last."""
_PRIOR = 0.5
"""Standard deviation of the logarithm of a factor before anything is known: two thirds of them within 1.65 times."""
_FADES = 3.0
"""Doublings of the tokens over which one size tells of another, before that falls to 1/e."""
_NOISE = 0.03
"""Relative error of a row beside its own spread: what the tables say of depths and sizes between their entries."""
_TOLD = 0.5
"""Attention is told of by the rows if they leave at most this share of its factor's prior deviation."""
_NEAR = 0.75
"""The work at a size is told of if they leave at most this share, which a row of twice or half the size does."""
_FASTER = 0.03
"""How much faster than physics a row may be for its rounding and its clock."""


@dataclass(frozen=True)
class Factors:
    """How many times as long each part takes as the starting profile says."""

    logs: FloatArray
    """Logarithms: of the work at each knot, then of the attention of decodes and that of prompts."""
    told: FloatArray
    """The share of its prior deviation that is left of each logarithm: near 1, no row tells of it."""

    def work(self, tokens: FloatArray | Sequence[int]) -> FloatArray:
        """The factors of passes of these tokens."""
        found: FloatArray = np.exp(_between_knots(tokens) @ self.logs[:-2])
        return found

    @property
    def decode(self) -> float:
        """Attention of sequences that decode."""
        return float(np.exp(self.logs[-2]))

    @property
    def prompt(self) -> float:
        """Attention of prompts."""
        return float(np.exp(self.logs[-1]))

    def seconds(self, parts: Parts) -> float:
        """What passes of these parts take."""
        work = parts.work * self.work(parts.tokens) + parts.head * self.work(parts.chunks)
        each = parts.fixed + work + self.decode * parts.decode + self.prompt * parts.prompt
        return float(np.sum(np.maximum(each, parts.floor)))

    def tells_of(self, tokens: int) -> bool:
        """Whether rows tell of the work on passes of about so many tokens."""
        return bool(self.told[round(np.log2(tokens))] <= _NEAR)

    @property
    def tells_of_decode(self) -> bool:
        """Whether rows tell of the attention of decodes."""
        return bool(self.told[-2] <= _TOLD)

    @property
    def tells_of_prompt(self) -> bool:
        """Whether rows tell of the attention of prompts."""
        return bool(self.told[-1] <= _TOLD)


def _between_knots(tokens: FloatArray | Sequence[int]) -> FloatArray:
    """How much of each knot is in the curve at these tokens; shape (len(tokens), knots)."""
    at = np.clip(np.log2(np.maximum(np.asarray(tokens, dtype=float), 1.0)), _KNOTS[0], _KNOTS[-1])
    found: FloatArray = np.maximum(1 - np.abs(at[:, None] - _KNOTS), 0.0)
    return found


def _prior() -> FloatArray:
    """The square root of the inverse covariance of the logarithms: residuals of the prior are it times them."""
    apart = np.abs(_KNOTS[:, None] - _KNOTS[None, :])
    covariance = np.zeros((len(_KNOTS) + 2,) * 2)
    covariance[:-2, :-2] = _PRIOR**2 * np.exp(-apart / _FADES)
    covariance[-2, -2] = covariance[-1, -1] = _PRIOR**2
    root: FloatArray = np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)))
    return root


@dataclass(frozen=True)
class Rows:
    """Rows that factors are fitted to."""

    parts: Sequence[Parts]
    seconds: FloatArray
    """What was measured."""
    spreads: FloatArray
    """Relative standard deviations of that."""

    def kept(self, which: Sequence[int]) -> Rows:
        """Only these rows."""
        index = np.array(which, dtype=int)
        return Rows([self.parts[i] for i in which], self.seconds[index], self.spreads[index])

    def fit(self) -> Factors:
        """The factors by which parts come to what was measured."""
        prior, measured, noise = _prior(), np.log(self.seconds), np.hypot(_NOISE, self.spreads)
        of_row = np.repeat(np.arange(len(self.parts)), [len(each.tokens) for each in self.parts])
        sums = (of_row == np.arange(len(self.parts))[:, None]).astype(float)
        names = ("tokens", "chunks", "work", "head", "decode", "prompt", "fixed", "floor")
        tokens, chunks, work, head, decode, prompt, fixed, floor = (self._column(name) for name in names)
        at_tokens, at_chunks = _between_knots(tokens), _between_knots(chunks)

        def terms(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
            """The seconds of each row, and what of them grows with each factor; shape (rows, factors)."""
            factors = Factors(logs, np.ones(len(logs)))
            each = (
                at_tokens * (work * factors.work(tokens))[:, None] + at_chunks * (head * factors.work(chunks))[:, None]
            )
            each = np.column_stack([each, decode * factors.decode, prompt * factors.prompt])
            whole = fixed + each.sum(axis=1)
            return sums @ np.maximum(whole, floor), sums @ np.where((whole < floor)[:, None], 0.0, each)

        def residuals(logs: FloatArray) -> FloatArray:
            return np.concatenate([(np.log(terms(logs)[0]) - measured) / noise, prior @ logs])

        def slopes(logs: FloatArray) -> FloatArray:
            whole, own = terms(logs)
            return np.concatenate([own / whole[:, None] / noise[:, None], prior])

        found = least_squares(residuals, np.zeros(len(prior)), jac=slopes)
        jacobian: FloatArray = np.asarray(found.jac)
        left = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
        return Factors(found.x, left / _PRIOR)

    def _column(self, name: str) -> FloatArray:
        """One array over the passes of all rows."""
        return np.concatenate([np.empty(0), *(getattr(each, name) for each in self.parts)])


@dataclass(frozen=True)
class Checked:
    """A row, and what was predicted of it."""

    point: BenchPoint
    estimate_s: float
    """By the profile as it was."""
    corrected_s: float
    """By the corrected tables."""
    left_out_s: float | None
    """By tables that were corrected by the other rows; None if all others tell the same or there are none."""
    least_s: float
    """What physics allows."""
    evenly_s: float
    """What it allows if tokens choose their experts evenly."""

    @property
    def per_what(self) -> float:
        """What a step or prompts are timed by: seconds of the row are divided by it."""
        return float(self.point.new if self.point.kind == "decode" else 1)

    @property
    def too_fast(self) -> bool:
        """Whether it was measured to be faster than the device can be."""
        return self.point.seconds < (1 - _FASTER) * self.least_s

    @property
    def shares_experts(self) -> bool:
        """Whether it was faster than if its tokens had chosen their experts evenly."""
        return self.point.seconds < (1 - _FASTER) * self.evenly_s


@dataclass(frozen=True)
class Correction:
    """A profile that was corrected by the rows of benchmarks."""

    profile: Profile
    factors: Factors
    rows: Sequence[Checked]
    passes: Sequence[Sequence[Pass]]
    """One for each row."""

    @cached_property
    def left_out_errors(self) -> FloatArray:
        """Relative errors, without their sign, of rows that were left out one by one."""
        return np.array(
            [abs(row.left_out_s / row.point.seconds - 1) for row in self.rows if row.left_out_s is not None]
        )

    @property
    def tokens(self) -> int:
        """Tokens of the largest pass."""
        return max(each.tokens for passes in self.passes for each in passes)

    @property
    def sequences(self) -> int:
        """Sequences that decoded at a time, at most."""
        return max(each.singles for passes in self.passes for each in passes)

    @property
    def cells(self) -> int:
        """Cells of a sequence, at most."""
        seen = [max([each.cells, *(cells for _, cells in each.prompts)]) for one in self.passes for each in one]
        return round(max(seen))


def correct(profile: Profile, physics: PassPhysics, limits: Limits, points: Sequence[BenchPoint]) -> Correction:
    """Correct the tables of a device's profile by what was timed on it."""
    prices, passes = PartPrices(profile, physics), [passes_of(point, limits) for point in points]
    parts = [prices.parts(each) for each in passes]
    measured = Rows(parts, np.array([p.seconds for p in points]), np.array([p.spread for p in points]))
    factors = measured.fit()
    assert profile.tables is not None
    corrected = profile.model_copy(update={"tables": corrected_tables(profile.tables, factors, physics)})
    after = PartPrices(corrected, physics)
    left_out: dict[tuple[object, ...], Factors | None] = {}
    for same in dict.fromkeys(point.same for point in points):
        kept = [i for i, point in enumerate(points) if point.same != same]
        left_out[same] = measured.kept(kept).fit() if kept else None
    rows = []
    for point, its_passes, its_parts in zip(points, passes, parts, strict=True):
        others = left_out[point.same]
        rows.append(
            Checked(
                point,
                prices.seconds(its_passes),
                after.seconds(its_passes),
                None if others is None else others.seconds(its_parts),
                its_parts.least_s,
                its_parts.evenly_s,
            )
        )
    done = Correction(corrected, factors, rows, passes)
    return replace(done, profile=corrected.model_copy(update=_errors(done)))


def corrected_tables(tables: PassTables, factors: Factors, physics: PassPhysics) -> PassTables:
    """The tables with all entries times their factors, but none below what physics allows."""

    def work(line: Line) -> Line:
        at = np.union1d(line.at, 2 ** _KNOTS.astype(int))
        seconds = np.maximum(line.each(int(at[-1]) + 1)[at] * factors.work(at), least_work(physics, at).least_s)
        return Line(at=tuple(at.tolist()), seconds=tuple(seconds.tolist()))

    def grid(old: Grid, factor: float, need: FloatArray) -> Grid:
        seconds = np.maximum(np.array(old.seconds) * factor, need)
        return Grid(rows=old.rows, columns=old.columns, seconds=tuple(tuple(row) for row in seconds.tolist()))

    head = np.array(tables.head.seconds) * factors.work(tables.head.at)
    rows, columns = (np.array(axis) for axis in (tables.decode.rows, tables.decode.columns))
    tokens, seen = (np.array(axis) for axis in (tables.prompt.rows, tables.prompt.columns))
    return tables.model_copy(
        update={
            "work": work(tables.work),
            "prompt_work": None if tables.prompt_work is None else work(tables.prompt_work),
            "head": Line(
                at=tables.head.at,
                seconds=tuple(np.maximum(head, physics.head(np.array(tables.head.at)).least_s).tolist()),
            ),
            "decode": grid(tables.decode, factors.decode, physics.decode(rows[:, None], columns[None, :]).least_s),
            "prompt": grid(tables.prompt, factors.prompt, physics.prompt(tokens[:, None], seen[None, :]).least_s),
        }
    )


def _errors(done: Correction) -> dict[str, object]:
    """The errors of a profile, on rows that were left out."""
    errors: dict[Regime, list[float]] = {"decode": [], "mixed": []}
    for row in done.rows:
        if row.left_out_s is not None:
            errors["decode" if row.point.kind == "decode" else "mixed"].append(
                abs(row.left_out_s / row.point.seconds - 1)
            )
    every = done.left_out_errors
    return {
        "held_out": {
            regime: HeldOut(
                samples=len(own),
                error_median=float(np.median(own)),
                error_p95=float(np.quantile(own, 0.95)),
                error_most=max(own),
            )
            for regime, own in errors.items()
            if own
        },
        "held_out_samples": len(every),
        "held_out_error_median": float(np.median(every)) if len(every) else 0.0,
        "held_out_error_p95": float(np.quantile(every, 0.95)) if len(every) else 0.0,
    }
