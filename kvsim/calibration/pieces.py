"""Pieces of a calibration: what is recorded, and what it says at one and the same pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvsim import machine
from kvsim.calibration.journal import Line
from kvsim.calibration.pace import PaceCurve, Tick, Windows, choose_windows, median_seconds
from kvsim.calibration.reference_passes import PaceKeeper
from kvsim.calibration.trials import Measurable, Trial, half_width, medians, scatter
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import Pace

_LONG_S = 0.03
"""Seconds of a pass during which a busy system will take the processor away in any case."""
_SPREAD = 3
"""Measurements of a trial before their scatter says anything."""


class TrialMeasurement(NamedTuple):
    """One measurement of a trial."""

    trial: int
    """Its number, in the order in which the trials were drawn."""
    at_s: float
    """When, on the clock of the piece."""
    seconds: float


class ServedPass(NamedTuple):
    """A sampled pass of a server run."""

    at_s: float
    """When, on the clock of the piece."""
    sample: Sample


class MeasuredPiece(Line):
    """What was measured without interruption between two entries of the journal."""

    items: int
    """Trials and server runs that ended."""
    trials: tuple[TrialMeasurement, ...]
    mixed: tuple[ServedPass, ...]
    ticks: tuple[Tick, ...]
    """Measurements of the reference passes."""
    disturbed: int
    """Measurements that do not count, since other work had the processor."""
    wall_s: float
    """Seconds by the clock, times the threads at work."""
    cpu_s: float
    """Processor seconds in that time."""


class PieceRecorder:
    """Records measurements and reference passes until the piece is taken."""

    def __init__(self, keeper: PaceKeeper, threads: int = 1):
        self.keeper = keeper
        self._one_thread = threads == 1
        self.items = 0
        """Trials and server runs that ended."""
        self.disturbed = 0
        """Measurements that do not count, since other work had the processor."""
        self._trials: list[TrialMeasurement] = []
        self._mixed: list[ServedPass] = []

    def time(self, number: int, trial: Trial, *, keep_disturbed: bool = False) -> None:
        """Measure a trial; what other work disturbed is only counted, unless it is to be kept.

        On a busy machine, no long pass is left alone: of those, the time that others had is taken off.
        """
        self.keeper.keep()
        began = self.keeper.now()
        seconds, share = self.keeper.watch(trial.measure)
        if share < machine.BUSY_BELOW:
            if self._one_thread and sum(seconds) > _LONG_S:
                seconds = tuple(share * each for each in seconds)
            else:
                self.disturbed += len(seconds)
                if not keep_disturbed:
                    return
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
            disturbed=self.disturbed,
            wall_s=wall_s,
            cpu_s=cpu_s,
        )


@dataclass(frozen=True)
class AtOnePace:
    """All measurements, divided by the machine's pace at their moments."""

    alone: list[Measurable]
    """What the trials say, in their order."""
    mixed: list[Sample]
    """Passes of server runs."""
    unpaced_s: list[float]
    """Seconds of all passes as they were measured, those of trials first."""
    reference_s: tuple[float, float]
    """Seconds of the reference passes at pace 1: their medians."""
    pace: Pace
    half_width: float
    """Median over all trials of the 95 % interval's half-width relative to the trial's median; 1 if not known yet."""
    scatter: float | None
    """Median over the trials of the standard deviation of their measurements, relative; None if not known."""


def at_one_pace(trials: Sequence[Trial], pieces: Sequence[MeasuredPiece]) -> AtOnePace:
    """Divide what was measured by the pace at its moment. At least one piece is needed."""
    reference_s, windows, curves = _curves(pieces)
    paced = _trial_seconds(trials, pieces, curves)
    measured = medians(trials, _trial_seconds(trials, pieces, [None] * len(pieces)))
    mixed: list[Sample] = []
    for piece, curve in zip(pieces, curves, strict=True):
        sizes = [max(work.tokens for work in served.sample.works) for served in piece.mixed]
        pace = curve.at([served.at_s for served in piece.mixed], sizes).tolist()
        for (_, sample), each in zip(piece.mixed, pace, strict=True):
            mixed.append(sample.model_copy(update={"seconds": sample.seconds / each}))
    low, middle, high = np.quantile(np.concatenate([curve.levels() for curve in curves]), [0.05, 0.5, 0.95]).tolist()
    known = [each for each in paced if len(each) >= _SPREAD]
    return AtOnePace(
        alone=medians(trials, paced),
        mixed=mixed,
        unpaced_s=[each.seconds for each in measured if isinstance(each, Sample)]
        + [served.sample.seconds for piece in pieces for served in piece.mixed],
        reference_s=reference_s,
        pace=Pace(p5=low, p50=middle, p95=high, window_s=windows.level_s),
        half_width=_half_width(paced),
        scatter=float(np.median([scatter(each) for each in known])) if known else None,
    )


def half_width_of(trials: Sequence[Trial], pieces: Sequence[MeasuredPiece]) -> float:
    """``AtOnePace.half_width`` of what was measured so far."""
    _, _, curves = _curves(pieces)
    return _half_width(_trial_seconds(trials, pieces, curves))


def _half_width(paced: Sequence[Sequence[float]]) -> float:
    return float(np.median([half_width(each) if len(each) >= _SPREAD else 1.0 for each in paced]))


def _curves(pieces: Sequence[MeasuredPiece]) -> tuple[tuple[float, float], Windows, list[PaceCurve]]:
    """Seconds of the reference passes at pace 1, the windows, and the pace of each piece."""
    stretches = [piece.ticks for piece in pieces]
    reference_s = median_seconds(stretches)
    windows = choose_windows(stretches, reference_s)
    return reference_s, windows, [PaceCurve(ticks, reference_s, windows) for ticks in stretches]


def _trial_seconds(
    trials: Sequence[Trial], pieces: Sequence[MeasuredPiece], curves: Sequence[PaceCurve | None]
) -> list[list[float]]:
    """Seconds of each trial's measurements; divided by the pace where there are curves."""
    tokens = np.array([trial.tokens for trial in trials])
    found: list[list[float]] = [[] for _ in tokens]
    for piece, curve in zip(pieces, curves, strict=True):
        if not piece.trials:
            continue
        numbers, moments, seconds = (np.array(column) for column in zip(*piece.trials, strict=True))
        pace = 1.0 if curve is None else curve.at(moments, tokens[numbers])
        for number, took in zip(numbers.tolist(), (seconds / pace).tolist(), strict=True):
            found[number].append(took)
    return found
