"""Calibrations, from the first measurement to the profile."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsim import machine
from kvsim.calibration.journal import Journal, JournalHeader, MeasuredRound
from kvsim.calibration.subject import NumpySubject, Subject
from kvsim.calibration.trials import Trials
from kvsim.costs.fitting import Sample, digest, fit
from kvsim.costs.profile import NUMPY, USUAL_MODEL, MachineInfo, Profile, Range, is_llamacpp
from kvsim.costs.tables import ATTENTION_KNOTS, KNOTS
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
"""Rounds into which a time budget is divided."""
_REFERENCE_MEASUREMENTS = 10
"""Measurements of the reference passes in each round."""
_LEAST = 3
"""Rounds earlier_header intervals say anything."""


@dataclass(frozen=True)
class Calibration:
    """A profile and how well it fits the measurements."""

    profile: Profile
    held_out: pd.DataFrame
    """A row for each pass held out of the fit: kernel, tokens, chunks, mixed (in a running server, or alone),
    measured_s, predicted_s."""
    rounds: int
    half_width: float
    """Median over all trials of the 95 % interval's half-width relative to the trial's median."""
    resumed: int
    """Rounds taken over from an earlier, unfinished calibration."""

    @property
    def tight(self) -> bool:
        """Whether measuring ended because the intervals were narrow enough."""
        return self.rounds >= _LEAST and self.half_width <= TIGHT

    @property
    def busy(self) -> bool:
        """Whether other work took so much of the core that the result cannot be trusted."""
        return self.profile.machine.cpu_share < machine.BUSY_BELOW

    def refusal(self, bound: float = HELD_OUT_BOUND) -> str | None:
        """Why the profile is not worth keeping; None if it is."""
        share, error = self.profile.machine.cpu_share, self.profile.held_out_error_median
        if self.busy:
            return f"the machine is busy, the measurement got {share:.0%} of its core; try again when it is quiet"
        if not error <= bound:
            return f"the median held-out error is {error:.1%}, over the bound of {bound:.1%}"
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
    subject = build_subject(model, engine, type_k, type_v, threads, library)
    try:
        return measure(subject, seconds=seconds, name=name, report=report, journal=journal)
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
) -> Calibration:
    """Measure an engine and fit a profile.

    Each round measures in random order each cost alone (forward passes of random sizes under each kernel, copies of
    random runs) and mixed (passes of running servers under random traffic), so that slow moments of the machine affect
    all alike. Rounds go on until the intervals are narrow, or ``seconds`` have passed. With a ``journal``, the rounds
    of an interrupted calibration count too. Raises ``UserError``.
    """
    log = Journal(journal)
    header = _header(subject, *subject.sizes(seconds / _ROUNDS))
    earlier = log.header()
    done: list[MeasuredRound] = []
    if earlier is not None and earlier == header.model_copy(update={"each": earlier.each, "runs": earlier.runs}):
        # The earlier calibration may have had another time budget.
        header, done = earlier, log.rounds()
    trials = subject.draw(header.each, named_rng(0, "calibration"))
    reference_passes = subject.reference_passes
    # Another version of the program may have drawn other trials.
    sizes = len(trials.all()), len(reference_passes.trials)
    done = [each for each in done if (len(each.trials), len(each.reference_passes)) == sizes]
    for past in done:
        for trial, took in zip(trials.all(), past.trials, strict=True):
            trial.seconds += took
        for trial, took in zip(reference_passes.trials, past.reference_passes, strict=True):
            trial.seconds += took
    resumed = len(done)
    if not done:
        log.begin(header)

    load_before = machine.system_load()
    began = time.perf_counter()
    while not _enough(trials, len(done), time.perf_counter() - began, seconds):
        turn = _RoundRunner(subject, trials, header, len(done), began, seconds, report)
        done.append(turn.run())
        log.add(done[-1])
    return _build_calibration(name, header, subject, trials, done, resumed, load_before)


@dataclass(slots=True)
class _RoundRunner:
    """Measures one round."""

    subject: Subject
    trials: Trials
    header: JournalHeader
    number: int
    began: float
    seconds: float
    report: Report | None

    def run(self) -> MeasuredRound:
        """Run all trials and servers in random order."""
        rng = named_rng(0, f"calibration round {self.number}")
        alone, reference_passes, kinds = self.trials.all(), self.subject.reference_passes, self.subject.kinds
        served = [(kind, i) for kind in range(kinds) for i in range(self.header.runs)]
        measured = [*alone, *reference_passes.trials]
        had = [len(trial.seconds) for trial in measured]
        paced = np.linspace(0, len(alone) + len(served) - 1, _REFERENCE_MEASUREMENTS).astype(int).tolist()
        mixed: list[Sample] = []
        wall_before, cpu_before = self.subject.spent()
        with machine.measuring():
            for at, index in enumerate(rng.permutation(len(alone) + len(served)).tolist()):
                if at in paced:
                    reference_passes.measure()
                if index < len(alone):
                    alone[index].measure()
                else:
                    kind, i = served[index - len(alone)]
                    turn = self.number * self.header.runs + i
                    # Each run has an origin of its own, numbered after those of the trials.
                    mixed += self.subject.serve(kind, turn, len(self.trials.passes) + turn * kinds + kind, rng)
                if self.report is not None:
                    self.report(min((time.perf_counter() - self.began) / self.seconds, 1.0))
        news = tuple(tuple(trial.seconds[n:]) for trial, n in zip(measured, had, strict=True))
        wall, cpu = self.subject.spent()
        return MeasuredRound(
            trials=news[: len(alone)],
            reference_passes=news[len(alone) :],
            mixed=tuple(mixed),
            wall_s=wall - wall_before,
            cpu_s=cpu - cpu_before,
        )


def _enough(trials: Trials, rounds: int, took: float, budget: float) -> bool:
    return rounds > 0 and (took >= budget or (rounds >= _LEAST and _half_width(trials) <= TIGHT))


def _half_width(trials: Trials) -> float:
    return float(np.median([trial.half_width for trial in trials.all()]))


def _header(subject: Subject, each: int, runs: int) -> JournalHeader:
    return JournalHeader(
        model=subject.model,
        type_k=subject.type_k,
        type_v=subject.type_v,
        each=each,
        runs=runs,
        processor=machine.processor(),
        blas=machine.blas(),
        numpy=np.__version__,
        engine=subject.engine,
        threads=subject.threads,
    )


def _build_calibration(
    name: str,
    header: JournalHeader,
    subject: Subject,
    trials: Trials,
    done: list[MeasuredRound],
    resumed: int,
    load_before: float,
) -> Calibration:
    passes, moves, shifts = trials.samples()
    samples = passes + [sample for each in done for sample in each.mixed]
    fitted = fit(samples, moves, shifts, named_rng(0, "calibration fit"), trials.skipping)
    works = [work for sample in samples for work in (sample, *sample.further)]
    scanned = [cells for work in works for _, cells in work.scans]
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
            cpu_share=min(sum(each.cpu_s for each in done) / sum(each.wall_s for each in done), 1.0),
        ),
        matmul_knots=KNOTS,
        attention_knots=ATTENTION_KNOTS,
        reference_passes_s=subject.reference_passes.medians_s(),
        tokens=Range(low=min(work.tokens for work in works), high=max(work.tokens for work in works)),
        cells=Range(low=min(scanned), high=max(scanned)),
        samples=len(samples) + len(moves) + len(shifts),
        digest=digest(samples, moves, shifts),
        **dict(fitted.fit),
    )
    return Calibration(profile, fitted.held_out, len(done), _half_width(trials), resumed)
