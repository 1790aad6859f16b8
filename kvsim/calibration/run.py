"""Calibrations, from the first measurement to the profile."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from kvsim import machine
from kvsim.calibration.journal import Journal, Line
from kvsim.calibration.outcome import HELD_OUT_BOUND, TIGHT, Outcome, machine_info
from kvsim.calibration.pieces import MeasuredPiece, PieceRecorder, at_one_pace, half_width_of
from kvsim.calibration.reference_passes import Clock, PaceKeeper, TimeOver
from kvsim.calibration.subject import Subject
from kvsim.calibration.trials import Trial, enough
from kvsim.costs.fitting import HostCopySample, MoveSample, ShiftSample, digest, fit, ranges_of
from kvsim.costs.pass_layout import Sample
from kvsim.costs.profile import NUMPY, USUAL_MODEL, Profile, is_llamacpp
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage
from workloads import named_rng

Report = Callable[[float], None]
"""Called with the share of the work done."""

_ROUNDS = 4
"""Rounds through all trials and server runs for which a time budget is meant to suffice."""
_PIECES = 12
"""Entries of the journal in a time budget."""
_SHORTEST_PIECE_S = 1.0
_FIT_SHARE = 0.05
"""Share of a time budget that is kept for the fit."""
_MOST_LEFT_OUT = 0.5
"""Share of the measurements that other work may disturb."""


class JournalHeader(Line):
    """Conditions under which measurements belong to the same calibration."""

    format: Literal[2] = 2
    model: str
    type_k: Storage
    type_v: Storage
    each: Annotated[int, Field(ge=1, le=10_000)]
    """Forward passes for each kernel."""
    runs: Annotated[int, Field(ge=1, le=100)]
    """Server runs in a round, for each kernel."""
    trials: int
    """Trials that were drawn."""
    processor: str
    blas: str
    numpy: str
    engine: str = NUMPY
    threads: int = 1


@dataclass(frozen=True)
class Calibration(Outcome):
    """A profile of an engine, and how well it fits the measurements."""

    LEAST_ROUNDS = 3

    @property
    def busy(self) -> bool:
        """Whether other work disturbed so many of the measurements that the rest cannot be trusted."""
        return self.left_out > _MOST_LEFT_OUT

    def refusal(self, bound: float = HELD_OUT_BOUND) -> str | None:
        """Why the profile is not worth keeping, with the likeliest cause; None if it is."""
        if self.busy:
            return (
                f"the machine is busy: other work disturbed {self.left_out:.0%} of the measurements, and had "
                f"{1 - self.profile.measured_on.cpu_share:.0%} of the time"
            )
        return super().refusal(bound)

    def plot(self) -> Figure:
        """Predicted against measured seconds of the held-out passes."""
        from kvsim.reports.profile_plots import calibration_figure

        return calibration_figure(self)


def calibrate(
    model: str | None = None,
    *,
    engine: str = NUMPY,
    seconds: float = 60.0,
    name: str = "calibrated",
    type_k: Storage | None = None,
    type_v: Storage | None = None,
    threads: int = 1,
    library: Path | str | None = None,
    report: Report | None = None,
    journal: Path | None = None,
) -> Calibration:
    """Measure our own engine, or with ``engine="llamacpp"`` the real llama.cpp, and fit a profile; see ``measure``.

    By default ours with the model tiny and K and V in f32, llama.cpp with smollm2 and f16. ``threads`` and ``library``
    (a folder with another llama-cpp-python than the installed one) are llama.cpp's. Raises ``UserError``.
    """
    began = time.perf_counter()
    subject = build_subject(model, engine, type_k, type_v, threads, library)
    try:
        return measure(subject, seconds=seconds, name=name, report=report, journal=journal, began=began)
    finally:
        subject.close()


def build_subject(
    model: str | None,
    engine: str,
    type_k: Storage | None,
    type_v: Storage | None,
    threads: int,
    library: Path | str | None,
) -> Subject:
    """The engine and model to measure. Raises ``UserError``."""
    if is_llamacpp(engine):
        from kvsim.calibration.llamacpp import LlamaSubject

        return LlamaSubject(
            model or USUAL_MODEL[engine], type_k or "f16", type_v or "f16", threads=threads, library=library
        )
    if threads != 1:
        raise UserError("threads: our own engine is measured on one; llama.cpp can have more")
    from kvsim.calibration.numpy_engine import NumpySubject

    return NumpySubject(model or USUAL_MODEL[engine], type_k or "f32", type_v or "f32")


def measure(
    subject: Subject,
    *,
    seconds: float,
    name: str = "calibrated",
    report: Report | None = None,
    journal: Path | None = None,
    clock: Clock = time.perf_counter,
    began: float | None = None,
) -> Calibration:
    """Measure an engine and fit a profile.

    Each cost is measured alone (forward passes of random sizes under each kernel, copies of random runs) and mixed
    (passes of running servers under random traffic), in random order round after round, so that slow moments of the
    machine affect all alike. Among them, reference passes tell the machine's pace, by which all is divided. Measuring
    ends when the intervals are narrow, or when ``seconds`` have passed since ``began`` (by default: now) on the
    ``clock``, but not before there is enough for a fit. With a ``journal``, what an interrupted calibration measured
    counts too, and an exception leaves in it all that was measured. Raises ``UserError``.
    """
    began = clock() if began is None else began
    log: Log = Journal(journal, JournalHeader, MeasuredPiece)
    header = _header(subject, *subject.sizes(seconds / _ROUNDS))
    earlier = log.header()
    if earlier is not None and earlier == header.model_copy(
        update={"each": earlier.each, "runs": earlier.runs, "trials": earlier.trials}
    ):
        # The earlier calibration may have had another time budget.
        header = earlier
    trials = subject.draw(header.each, named_rng(0, "calibration"))
    # Another version of the program may have drawn other trials.
    header = header.model_copy(update={"trials": len(trials)})
    done = log.go_on(header)
    until = began + (1 - _FIT_SHARE) * seconds
    measurement = _Measurement(subject, trials, header, log, done, clock, until, seconds, report)
    resumed = measurement.items
    load_before = machine.system_load()
    with machine.measuring():
        while not measurement.ended():
            measurement.add_piece()
        return _build_calibration(name, measurement, resumed, load_before)


Log = Journal[JournalHeader, MeasuredPiece]


@dataclass(slots=True)
class _Measurement:
    """Measures piece after piece of an endless row of trials and server runs."""

    subject: Subject
    trials: list[Trial]
    header: JournalHeader
    log: Log
    done: list[MeasuredPiece]
    clock: Clock
    until: float
    """When, on the clock, the time to measure is over."""
    seconds: float
    """The time budget."""
    report: Report | None

    @property
    def items(self) -> int:
        """Trials and server runs that ended."""
        return sum(piece.items for piece in self.done)

    @property
    def rounds(self) -> float:
        """Rounds through all trials and server runs."""
        return self.items / len(self._round(0))

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.clock() >= self.until

    def ended(self) -> bool:
        """Whether the time is over, or all is known well enough."""
        if not self._enough():
            return False
        return self.over or (self.rounds >= Calibration.LEAST_ROUNDS and half_width_of(self.trials, self.done) <= TIGHT)

    def add_piece(self) -> None:
        """Measure for a while, and write it into the journal; after an exception too."""
        until = self.clock() + max(self.seconds / _PIECES, _SHORTEST_PIECE_S)
        subject = self.subject
        keeper = PaceKeeper(subject.reference_passes, clock=self.clock, until=self.until, spent=subject.spent)
        recorder = PieceRecorder(keeper, subject.threads)
        wall, cpu = subject.spent()
        first = self.items
        try:
            keeper.tick()
            while self.clock() < until and not (self.over and self._enough(recorder)):
                self._measure(first + recorder.items, recorder)
                recorder.items += 1
                if self.report is not None:
                    left_s = self.until - self.clock()
                    self.report(min(max(1 - left_s / self.seconds / (1 - _FIT_SHARE), 0.0), 1.0))
            keeper.tick()
        finally:
            if keeper.ticks:
                wall_after, cpu_after = subject.spent()
                self.done.append(recorder.piece(wall_after - wall, cpu_after - cpu))
                self.log.add(self.done[-1])

    def _enough(self, recorder: PieceRecorder | None = None) -> bool:
        """Whether there are measurements enough for a fit, with those of a recorder."""
        pieces = self.done if recorder is None else [*self.done, recorder.piece(0.0, 0.0)]
        return enough(self.trials, {each.trial for piece in pieces for each in piece.trials})

    def _measure(self, item: int, recorder: PieceRecorder) -> None:
        """Measure the ``item``-th trial or server run of all rounds."""
        trials, kinds = self.trials, self.subject.kinds
        number, place = divmod(item, len(self._round(0)))
        index = self._round(number)[place]
        if index < len(trials):
            # When the time is over and there is not enough yet, anything is better than to go on for ever.
            recorder.time(index, trials[index], keep_disturbed=self.over)
            return
        kind, i = divmod(index - len(trials), self.header.runs)
        turn = number * self.header.runs + i
        # Each run has an origin of its own, numbered after those of the passes.
        origin = sum(isinstance(trial.sample, Sample) for trial in trials) + turn * kinds + kind
        with suppress(TimeOver):
            self.subject.serve(kind, turn, origin, named_rng(0, f"calibration run {origin}"), recorder)

    def _round(self, number: int) -> list[int]:
        """The random order of a round: numbers of trials, and behind them of server runs."""
        n = len(self.trials) + self.subject.kinds * self.header.runs
        order: list[int] = named_rng(0, f"calibration round {number}").permutation(n).tolist()
        return order


def _header(subject: Subject, each: int, runs: int) -> JournalHeader:
    return JournalHeader(
        model=subject.model,
        type_k=subject.type_k,
        type_v=subject.type_v,
        each=each,
        runs=runs,
        trials=0,
        processor=machine.processor(),
        blas=machine.blas(),
        numpy=np.__version__,
        engine=subject.engine,
        threads=subject.threads,
    )


def _build_calibration(name: str, measurement: _Measurement, resumed: int, load_before: float) -> Calibration:
    header, subject, trials, done = measurement.header, measurement.subject, measurement.trials, measurement.done
    paced = at_one_pace(trials, done)
    passes = [each for each in paced.alone if isinstance(each, Sample)] + paced.mixed
    moves = [each for each in paced.alone if isinstance(each, MoveSample)]
    shifts = [each for each in paced.alone if isinstance(each, ShiftSample)]
    copies = [each for each in paced.alone if isinstance(each, HostCopySample)]
    rng = named_rng(0, "calibration fit")
    fitted = fit(passes, moves, shifts, rng, subject.skipping, paced.unpaced_s, copies)
    wall_s, cpu_s, disturbed = (sum(getattr(piece, n) for piece in done) for n in ("wall_s", "cpu_s", "disturbed"))
    kept = sum(len(piece.trials) + len(piece.mixed) for piece in done)
    share = min(cpu_s / wall_s, 1.0) if wall_s > 0 else 1.0
    profile = Profile(
        name=name,
        engine=header.engine,
        shifts_all=subject.shifts_all,
        model=header.model,
        type_k=header.type_k,
        type_v=header.type_v,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=machine_info(header.threads, load_before, share),
        reference_passes_s=paced.reference_s,
        pace=paced.pace,
        **ranges_of(passes),
        samples=len(passes) + len(moves) + len(shifts) + len(copies),
        digest=digest(passes, moves, shifts, copies),
        **dict(fitted.fit),
    )
    return Calibration(
        profile,
        fitted.held_out,
        rounds=round(measurement.rounds, 1),
        half_width=paced.half_width,
        scatter=paced.scatter,
        resumed=resumed,
        left_out=disturbed / (kept + disturbed),
    )
