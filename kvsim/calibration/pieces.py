"""Pieces of a calibration: what is recorded, and what it says at one and the same pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.calibration.journal import MeasuredPiece, ServedPass, TrialMeasurement
from kvsim.calibration.pace import PaceCurve, choose_windows, median_seconds
from kvsim.calibration.reference_passes import PaceKeeper
from kvsim.calibration.trials import Trial, Trials, half_width, scatter
from kvsim.costs.fitting import MoveSample, Sample, ShiftSample
from kvsim.costs.profile import Pace

_SPREAD = 3
"""Measurements of a trial before their scatter says anything."""


class PieceRecorder:
    """Records measurements and reference passes until the piece is taken."""

    def __init__(self, keeper: PaceKeeper):
        self.keeper = keeper
        self.items = 0
        """Trials and server runs that ended."""
        self._trials: list[TrialMeasurement] = []
        self._mixed: list[ServedPass] = []

    def time(self, number: int, trial: Trial) -> None:
        """Measure a trial."""
        self.keeper.keep()
        began = self.keeper.now()
        seconds = trial.measure()
        # Of a trial with a warm-up, only the end is timed.
        at = max(self.keeper.now() - sum(seconds) / 2, began)
        self._trials += [TrialMeasurement(number, at, each) for each in seconds]

    def add(self, at_s: float, sample: Sample) -> None:
        """Record a pass of a server run."""
        self._mixed.append(ServedPass(at_s, sample))

    def piece(self, wall_s: float, cpu_s: float) -> MeasuredPiece:
        """All that was recorded."""
        return MeasuredPiece(
            items=self.items,
            trials=tuple(self._trials),
            mixed=tuple(self._mixed),
            ticks=tuple(self.keeper.ticks),
            wall_s=wall_s,
            cpu_s=cpu_s,
        )


@dataclass(frozen=True)
class AtOnePace:
    """All measurements, divided by the machine's pace at their moments."""

    samples: list[Sample]
    unpaced_s: list[float]
    """Seconds of the samples as they were measured."""
    moves: list[MoveSample]
    shifts: list[ShiftSample]
    reference_s: tuple[float, float]
    """Seconds of the reference passes at pace 1: their medians."""
    pace: Pace
    half_width: float
    """Median over all trials of the 95 % interval's half-width relative to the trial's median; 1 if not known yet."""
    scatter: float | None
    """Median over the trials of the standard deviation of their measurements, relative; None if not known."""


def at_one_pace(trials: Trials, pieces: Sequence[MeasuredPiece]) -> AtOnePace:
    """Divide what was measured by the pace at its moment. At least one piece is needed."""
    stretches = [piece.ticks for piece in pieces]
    reference_s = median_seconds(stretches)
    windows = choose_windows(stretches, reference_s)
    curves = [PaceCurve(piece.ticks, reference_s, windows) for piece in pieces]
    tokens = np.array(trials.tokens())
    measured: list[list[float]] = [[] for _ in tokens]
    paced: list[list[float]] = [[] for _ in tokens]
    mixed: list[Sample] = []
    for piece, curve in zip(pieces, curves, strict=True):
        if piece.trials:
            numbers, moments, _ = zip(*piece.trials, strict=True)
            for each, pace in zip(piece.trials, curve.at(moments, tokens[list(numbers)]).tolist(), strict=True):
                measured[each.trial].append(each.seconds)
                paced[each.trial].append(each.seconds / pace)
        if piece.mixed:
            sizes = [max(work.tokens for work in (served.sample, *served.sample.further)) for served in piece.mixed]
            for served, pace in zip(
                piece.mixed, curve.at([served.at_s for served in piece.mixed], sizes).tolist(), strict=True
            ):
                mixed.append(served.sample.model_copy(update={"seconds": served.sample.seconds / pace}))
    samples, moves, shifts = trials.samples(paced)
    unpaced, _, _ = trials.samples(measured)
    low, middle, high = np.quantile(np.concatenate([curve.levels() for curve in curves]), [0.05, 0.5, 0.95]).tolist()
    known = [each for each in paced if len(each) >= _SPREAD]
    return AtOnePace(
        samples=samples + mixed,
        unpaced_s=[s.seconds for s in unpaced] + [served.sample.seconds for piece in pieces for served in piece.mixed],
        moves=moves,
        shifts=shifts,
        reference_s=reference_s,
        pace=Pace(p5=low, p50=middle, p95=high, window_s=windows.level_s),
        half_width=float(np.median([half_width(each) if len(each) >= _SPREAD else 1.0 for each in paced])),
        scatter=float(np.median([scatter(each) for each in known])) if known else None,
    )
