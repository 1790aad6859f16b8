"""A calibration from its first measurement to the profile."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsim import machine
from kvsim.calibration.journal import Header, Journal, Round
from kvsim.calibration.serving import USERS, serve, traffic
from kvsim.calibration.trials import CELLS, Trial, Trials, draw_trials, random_pass
from kvsim.calibration.yardstick import Yardstick
from kvsim.costs import ATTENTION_KNOTS, KNOTS, MachineInfo, Profile, Range
from kvsim.fitting import Sample, digest, fit
from kvsim.model import Storage
from policies import Group, Kernel
from real_engine import Engine, load_model
from workloads import stream

Report = Callable[[float], None]
"""Called with the share of the work that is done."""

TIGHT = 0.01
"""Measuring ends when the 95 % interval of the median of half of the trials is not wider than this to either side."""

HELD_OUT_BOUND = 0.10
"""A profile whose median held-out error is larger is not worth keeping."""

_EACH = (24, 150)
"""The fewest and the most forward passes, for each kernel."""
_ROUNDS = 4
"""Rounds that a time budget should have room for."""
_PACED = 10
"""Times that the yardstick is measured in a round."""
_LEAST = 3
"""Rounds before intervals say anything."""
_PASSES = 18
"""Decodes that a trial, with what runs before it, takes as long as; roughly."""
_SERVED = 160
"""And a run of a server."""


@dataclass(frozen=True)
class Calibration:
    """A profile, and what it was fitted to."""

    profile: Profile
    held_out: pd.DataFrame
    """A row for each pass that was held out: kernel, tokens, chunks, mixed (in a running server, or by itself),
    measured_s, predicted_s."""
    rounds: int
    half_width: float
    """Of the 95 % interval of the median, over the median; the middle one of all trials."""
    resumed: int
    """Rounds that an earlier, unfinished calibration had left."""

    @property
    def tight(self) -> bool:
        """Whether measuring ended because more would not have told more."""
        return self.half_width <= TIGHT

    @property
    def busy(self) -> bool:
        """Whether other work had so much of the core that nothing here can be trusted."""
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
        """Predicted against measured, of what was held out."""
        from kvsim.plots import calibration_figure

        return calibration_figure(self)


def calibrate(
    model: str = "tiny",
    *,
    seconds: float = 60.0,
    name: str = "calibrated",
    type_k: Storage = "f32",
    type_v: Storage = "f32",
    report: Report | None = None,
    journal: Path | None = None,
) -> Calibration:
    """Measure the real engine and fit a profile for K and V kept as these types.

    Each cost alone (forward passes of random sizes under each kernel, copies of random runs) and mixed (passes of
    running servers under random traffic) are measured by turns, round after round, so that a slow moment of the
    machine falls on all alike; until the intervals are tight, or ``seconds`` have passed and the round is done. With a
    ``journal``, what an earlier calibration had measured until it was cut short counts too. Raises ``UserError``.
    """
    transformer = load_model(model).transformer
    book = Journal(journal)
    rng = stream(0, "calibration")
    engines: dict[Kernel, Engine] = {
        kernel: Engine(transformer, (Group(CELLS),), kernel, seed=0, type_k=type_k, type_v=type_v)
        for kernel in get_args(Kernel)
    }
    for engine in engines.values():
        engine.fill()
    header = _header(model, type_k, type_v, *_sizes(engines, seconds))
    before = book.header()
    done: list[Round] = []
    if before is not None and before == header.model_copy(update={"each": before.each, "runs": before.runs}):
        # It was begun with another budget, perhaps.
        header, done = before, book.rounds()
    trials = draw_trials(engines, header.each, rng)
    yardstick = Yardstick(transformer, type_k, type_v)
    # Another version may have drawn other trials: what it measured is of no use here.
    sizes = len(trials.all()), len(yardstick.trials)
    done = [each for each in done if (len(each.trials), len(each.yardstick)) == sizes]
    for earlier in done:
        for trial, took in zip(trials.all(), earlier.trials, strict=True):
            trial.seconds += took
        for trial, took in zip(yardstick.trials, earlier.yardstick, strict=True):
            trial.seconds += took
    resumed = len(done)
    if not done:
        book.begin(header)

    load_before = machine.load()
    began = time.perf_counter()
    while not _enough(trials, len(done), time.perf_counter() - began, seconds):
        turn = _Turn(trials, yardstick, header, len(done), began, seconds, report)
        done.append(turn.run())
        book.add(done[-1])
    return _fitted(name, header, trials, yardstick, done, resumed, load_before)


@dataclass(slots=True)
class _Turn:
    """A round."""

    trials: Trials
    yardstick: Yardstick
    header: Header
    number: int
    began: float
    seconds: float
    report: Report | None

    def run(self) -> Round:
        """All trials and the runs of servers, in random order."""
        rng = stream(0, f"calibration round {self.number}")
        alone = self.trials.all()
        served = [(kernel, i) for kernel in self.trials.engines for i in range(self.header.runs)]
        measured = [*alone, *self.yardstick.trials]
        had = [len(trial.seconds) for trial in measured]
        paced = np.linspace(0, len(alone) + len(served) - 1, _PACED).astype(int).tolist()
        mixed: list[Sample] = []
        with machine.measuring() as watch:
            for at, index in enumerate(rng.permutation(len(alone) + len(served)).tolist()):
                if at in paced:
                    self.yardstick.measure()
                if index < len(alone):
                    alone[index].measure()
                else:
                    kernel, i = served[index - len(alone)]
                    mixed += self._serve(kernel, i, rng)
                if self.report is not None:
                    self.report(min((time.perf_counter() - self.began) / self.seconds, 1.0))
        news = tuple(tuple(trial.seconds[n:]) for trial, n in zip(measured, had, strict=True))
        return Round(
            trials=news[: len(alone)],
            yardstick=news[len(alone) :],
            mixed=tuple(mixed),
            wall_s=watch.wall_s,
            cpu_s=watch.cpu_s,
        )

    def _serve(self, kernel: Kernel, i: int, rng: np.random.Generator) -> list[Sample]:
        header = self.header
        turn = self.number * header.runs + i
        # Each run an origin of its own, behind those of the trials.
        origin = len(self.trials.passes) + turn * len(self.trials.engines) + list(self.trials.engines).index(kernel)
        return serve(
            self.trials.engines[kernel], traffic(header.model, header.type_k, header.type_v, turn, rng), origin
        )


def _enough(trials: Trials, rounds: int, took: float, budget: float) -> bool:
    return rounds > 0 and (took >= budget or (rounds >= _LEAST and _half_width(trials) <= TIGHT))


def _half_width(trials: Trials) -> float:
    return float(np.median([trial.half_width for trial in trials.all()]))


def _sizes(engines: dict[Kernel, Engine], seconds: float) -> tuple[int, int]:
    """Forward passes and runs of servers for each kernel, so that some rounds fit into the time."""
    engine = engines["sliced"]
    batch = random_pass("sliced", stream(0, "calibration size"), decodes=1)
    engine.tokens = {0: [7] * (batch.chunks[0].start + 2)}
    trial = Trial(lambda: engine.forward(batch))
    with machine.measuring():
        trial.measure()
    share = seconds / _ROUNDS / 2 / len(engines) / trial.median_s
    return int(np.clip(share / _PASSES, *_EACH)), int(np.clip(share / _SERVED, 1, len(USERS)))


def _header(model: str, type_k: Storage, type_v: Storage, each: int, runs: int) -> Header:
    return Header(
        model=model,
        type_k=type_k,
        type_v=type_v,
        each=each,
        runs=runs,
        processor=machine.processor(),
        blas=machine.blas(),
        numpy=np.__version__,
    )


def _fitted(
    name: str,
    header: Header,
    trials: Trials,
    yardstick: Yardstick,
    done: list[Round],
    resumed: int,
    load_before: float,
) -> Calibration:
    passes, moves, shifts = trials.samples()
    samples = passes + [sample for each in done for sample in each.mixed]
    fitted = fit(samples, moves, shifts, stream(0, "calibration fit"))
    scanned = [cells for sample in samples for _, cells in sample.scans]
    profile = Profile(
        name=name,
        model=header.model,
        type_k=header.type_k,
        type_v=header.type_v,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=MachineInfo(
            processor=header.processor,
            cores=os.cpu_count() or 1,
            blas=header.blas,
            threads=1,
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            numpy=header.numpy,
            load_before=load_before,
            load_after=machine.load(),
            cpu_share=min(sum(each.cpu_s for each in done) / sum(each.wall_s for each in done), 1.0),
        ),
        matmul_knots=KNOTS,
        attention_knots=ATTENTION_KNOTS,
        yardstick_s=yardstick.medians_s(),
        tokens=Range(low=min(s.tokens for s in samples), high=max(s.tokens for s in samples)),
        cells=Range(low=min(scanned), high=max(scanned)),
        samples=len(samples) + len(moves) + len(shifts),
        digest=digest(samples, moves, shifts),
        **dict(fitted.fit),
    )
    return Calibration(profile, fitted.held_out, len(done), _half_width(trials), resumed)
