"""Calibrations, from the first measurement to the profile."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsim import machine
from kvsim.calibration.causes import likely_cause
from kvsim.calibration.journal import Journal, JournalHeader, MeasuredPiece
from kvsim.calibration.pieces import PieceRecorder, at_one_pace, half_width_of
from kvsim.calibration.reference_passes import Clock, PaceKeeper, TimeOver
from kvsim.calibration.subject import NumpySubject, Subject
from kvsim.calibration.trials import Trials
from kvsim.costs.fitting import digest, fit
from kvsim.costs.profile import NUMPY, USUAL_MODEL, MachineInfo, Profile, Range, is_llamacpp
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage
from workloads import named_rng

Report = Callable[[float], None]
"""Called with the share of the work done."""

TIGHT = 0.01
"""Measuring ends when the half-width of half of the trials' 95 % intervals, over the median, is at most this."""

HELD_OUT_BOUND = 0.10
"""Largest median held-out error of a profile that is worth keeping."""

_ROUNDS = 4
"""Rounds through all trials and server runs for which a time budget is meant to suffice."""
_PIECES = 12
"""Entries of the journal in a time budget."""
_SHORTEST_PIECE_S = 1.0
_FIT_SHARE = 0.05
"""Share of a time budget that is kept for the fit."""
_LEAST = 3
"""Rounds before intervals say anything."""
_MOST_LEFT_OUT = 0.5
"""Share of the measurements that other work may disturb."""
_FEWEST = 8
"""Passes of each kernel without which nothing is fitted, however little time there was; and half as many moves, and
copies to the host and back."""


@dataclass(frozen=True)
class Calibration:
    """A profile and how well it fits the measurements."""

    profile: Profile
    held_out: pd.DataFrame
    """A row for each pass held out of the fit: kernel, tokens, chunks, mixed (in a running server, or alone),
    measured_s (at the median pace), predicted_s."""
    rounds: float
    """How often each trial was measured, on average."""
    half_width: float
    """Median over all trials of the 95 % interval's half-width relative to the trial's median; 1 if most trials were
    measured too seldom to say."""
    scatter: float | None
    """Median over the trials of the relative standard deviation from one measurement to the next, at one pace."""
    resumed: int
    """Trials and server runs taken over from an earlier, unfinished calibration."""
    left_out: float
    """Share of the measurements that were left out because other work had the processor."""

    @property
    def tight(self) -> bool:
        """Whether measuring ended because the intervals were narrow enough."""
        return self.rounds >= _LEAST and self.half_width <= TIGHT

    @property
    def busy(self) -> bool:
        """Whether other work disturbed so many of the measurements that the rest cannot be trusted."""
        return self.left_out > _MOST_LEFT_OUT

    def refusal(self, bound: float = HELD_OUT_BOUND) -> str | None:
        """Why the profile is not worth keeping, with the likeliest cause; None if it is."""
        error = self.profile.held_out_error_median
        if self.busy:
            return (
                f"the machine is busy: other work disturbed {self.left_out:.0%} of the measurements, and had "
                f"{1 - self.profile.measured_on.cpu_share:.0%} of the time"
            )
        if not error <= bound:
            cause = likely_cause(self.profile, self.held_out, self.scatter)
            return f"the median held-out error is {error:.1%}, over the bound of {bound:.1%}; {cause}"
        return None

    def plot(self) -> Figure:
        """Predicted against measured seconds of the held-out passes."""
        from kvsim.reports.plots import calibration_figure

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
    log = Journal(journal)
    header = _header(subject, *subject.sizes(seconds / _ROUNDS))
    earlier = log.header()
    if earlier is not None and earlier == header.model_copy(
        update={"each": earlier.each, "runs": earlier.runs, "trials": earlier.trials}
    ):
        # The earlier calibration may have had another time budget.
        header = earlier
    trials = subject.draw(header.each, named_rng(0, "calibration"))
    drawn = len(trials.all())
    # Another version of the program may have drawn other trials.
    done = log.pieces() if header is earlier and header.trials == drawn else []
    header = header.model_copy(update={"trials": drawn})
    if not done:
        log.begin(header)
    until = began + (1 - _FIT_SHARE) * seconds
    measurement = _Measurement(subject, trials, header, log, done, clock, until, seconds, report)
    resumed = measurement.items
    load_before = machine.system_load()
    with machine.measuring():
        while not measurement.ended():
            measurement.add_piece()
        return _build_calibration(name, measurement, resumed, load_before)


@dataclass(slots=True)
class _Measurement:
    """Measures piece after piece of an endless row of trials and server runs."""

    subject: Subject
    trials: Trials
    header: JournalHeader
    log: Journal
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
        if not _enough(self.trials, self.done):
            return False
        return self.over or (self.rounds >= _LEAST and half_width_of(self.trials, self.done) <= TIGHT)

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
            while self.clock() < until and not (self.over and self._enough_with(recorder)):
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

    def _enough_with(self, recorder: PieceRecorder) -> bool:
        return _enough(self.trials, [*self.done, recorder.piece(0.0, 0.0)])

    def _measure(self, item: int, recorder: PieceRecorder) -> None:
        """Measure the ``item``-th trial or server run of all rounds."""
        alone, kinds = self.trials.all(), self.subject.kinds
        number, place = divmod(item, len(self._round(0)))
        index = self._round(number)[place]
        if index < len(alone):
            # When the time is over and there is not enough yet, anything is better than to go on for ever.
            recorder.time(index, alone[index], keep_disturbed=self.over)
            return
        kind, i = divmod(index - len(alone), self.header.runs)
        turn = number * self.header.runs + i
        # Each run has an origin of its own, numbered after those of the trials.
        origin = len(self.trials.passes) + turn * kinds + kind
        with suppress(TimeOver):
            self.subject.serve(kind, turn, origin, named_rng(0, f"calibration run {origin}"), recorder)

    def _round(self, number: int) -> list[int]:
        """The random order of a round: numbers of trials, and behind them of server runs."""
        n = len(self.trials.all()) + self.subject.kinds * self.header.runs
        order: list[int] = named_rng(0, f"calibration round {number}").permutation(n).tolist()
        return order


def _enough(trials: Trials, pieces: Sequence[MeasuredPiece]) -> bool:
    """Whether there are measurements enough for a fit."""
    found = {each.trial for piece in pieces for each in piece.trials}
    kernels = [kernel for kernel, *_ in trials.passes]
    for kernel in set(kernels):
        own = {number for number, other in enumerate(kernels) if other == kernel}
        if len(own & found) < min(_FEWEST, len(own)):
            return False
    first, last = len(kernels), len(kernels) + len(trials.moves)
    moves = sum(first <= number < last for number in found)
    shifts = sum(last <= number < last + len(trials.shifts) for number in found)
    behind = last + len(trials.shifts)
    for out in (True, False):
        own = {behind + i for i, (work, _) in enumerate(trials.host_copies) if work.out == out}
        if len(own & found) < min(_FEWEST // 2, len(own)):
            return False
    return moves >= min(_FEWEST // 2, len(trials.moves)) and shifts >= min(1, len(trials.shifts))


def _left_out(pieces: Sequence[MeasuredPiece]) -> float:
    """``Calibration.left_out``."""
    kept = sum(len(piece.trials) + len(piece.mixed) for piece in pieces)
    disturbed = sum(piece.disturbed for piece in pieces)
    return disturbed / (kept + disturbed)


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
    rng = named_rng(0, "calibration fit")
    fitted = fit(
        paced.samples,
        paced.moves,
        paced.shifts,
        rng,
        trials.skipping,
        paced.unpaced_s,
        paced.host_copies,
    )
    measurements = paced.samples, paced.moves, paced.shifts, paced.host_copies
    works = [work for sample in paced.samples for work in (sample, *sample.further)]
    scanned = [cells for work in works for _, cells in work.scans]
    wall_s, cpu_s = sum(piece.wall_s for piece in done), sum(piece.cpu_s for piece in done)
    profile = Profile(
        name=name,
        engine=header.engine,
        shifts_all=subject.shifts_all,
        model=header.model,
        type_k=header.type_k,
        type_v=header.type_v,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=MachineInfo(
            processor=header.processor,
            cores=os.cpu_count() or 1,
            blas=header.blas,
            threads=header.threads,
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            numpy=header.numpy,
            load_before=load_before,
            load_after=machine.system_load(),
            cpu_share=min(cpu_s / wall_s, 1.0) if wall_s > 0 else 1.0,
        ),
        reference_passes_s=paced.reference_s,
        pace=paced.pace,
        tokens=Range(low=min(work.tokens for work in works), high=max(work.tokens for work in works)),
        cells=Range(low=min(scanned), high=max(scanned)),
        samples=sum(len(kind) for kind in measurements),
        digest=digest(*measurements),
        **dict(fitted.fit),
    )
    return Calibration(
        profile,
        fitted.held_out,
        rounds=round(measurement.rounds, 1),
        half_width=paced.half_width,
        scatter=paced.scatter,
        resumed=resumed,
        left_out=_left_out(done),
    )
