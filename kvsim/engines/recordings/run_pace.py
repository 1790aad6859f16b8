"""The pace of a recorded server's machine: how much slower it was, moment by moment, than a profile says.

The same machine is up to twofold slower at another time, and runs of the same requests differ accordingly. Every other
step tells the pace; those between are what a prediction at this pace is held against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvsim.calibration.pace import best_window, clipped, smoothed
from kvsim.costs.cost_model import CostModel
from kvsim.costs.pass_price import PassPrice
from kvsim.costs.tables import FloatArray
from kvsim.engines.recordings.steps import MeasuredStep, fitting_half
from kvsim.simulation.backend import Backend, DelegatingBackend
from policies import Chunk, HostCopy, Kernel, MicroBatch, Moves, Transfer
from policies.placement.rule import PassReads

LEAST_WINDOW_S = 0.8
"""Standard deviation of the narrowest window: a pace is of many steps, not the accident of one."""

_FEWEST_STEPS = 20
"""Steps that tell how fast a server was."""


@dataclass(frozen=True)
class StepTimes:
    """The steps of a recording beside their prices."""

    start_s: FloatArray
    measured_s: FloatArray
    predicted_s: FloatArray
    """At the profile's own pace."""
    mixed: np.ndarray
    """Whether a step has a prompt; bool of shape (steps,)."""
    fitting: np.ndarray
    """Whether the pace may be fitted to a step; bool of shape (steps,)."""

    @property
    def slowdown(self) -> float | None:
        """How many times as long all steps took together as the profile says; None of fewer than 20.

        Of their sums: a server that waits for a processor is as fast as ever in most steps, and far slower in some.
        """
        if len(self.measured_s) < _FEWEST_STEPS:
            return None
        return float(self.measured_s.sum() / self.predicted_s.sum())


def step_times(steps: Sequence[MeasuredStep], kernel: Kernel, costs: CostModel) -> StepTimes:
    """Price steps."""
    price = costs.pass_price(kernel)
    front_end = costs.profile.front_end_s
    beside_s = 0.0 if front_end is None else front_end.value
    mixed = np.array([step.regime == "mixed" for step in steps], dtype=bool)
    return StepTimes(
        np.array([step.start_s for step in steps]),
        np.array([step.seconds for step in steps]),
        np.array([_priced(price, step) + step.by_client * beside_s for step in steps]),
        mixed,
        np.array(fitting_half(steps), dtype=bool),
    )


def _priced(price: PassPrice, step: MeasuredStep) -> float:
    return sum(price.seconds(PassReads.counted(w.tokens, w.chunks, w.runs, w.scans)) for w in step.works)


class RunPace:
    """The pace of one run: measured over predicted seconds, smoothed over time, and of prompts beside that."""

    def __init__(self, times: StepTimes):
        decodes = times.fitting & ~times.mixed
        logs = np.log(times.measured_s / times.predicted_s)
        self._at = times.start_s[decodes]
        self._level = clipped(logs[decodes])
        self.window_s = max(best_window([(self._at, self._level)]), LEAST_WINDOW_S)
        prompts = times.fitting & times.mixed
        beyond = logs[prompts] - self._logs_at(times.start_s[prompts])
        self._prompts = float(np.median(beyond)) if len(beyond) else 0.0

    def at(self, at_s: Sequence[float] | FloatArray, mixed: Sequence[bool] | np.ndarray) -> FloatArray:
        """The pace at these moments of steps of these kinds; float64 of shape (n,)."""
        found: FloatArray = np.exp(self._logs_at(np.asarray(at_s, dtype=float)) + self._prompts * np.asarray(mixed))
        return found

    def _logs_at(self, at_s: FloatArray) -> FloatArray:
        return smoothed(at_s, self._at, self._level, self.window_s)


def step_errors(times: StepTimes, pace: RunPace | None) -> pd.DataFrame:
    """How well single steps are predicted: those that did not tell the pace.

    Columns kind (all, decode, mixed), steps, error (median of predicted / measured - 1), at_pace (the same at the run's
    pace), spread and spread_at_pace (medians of the errors without their signs).
    """
    judged = ~times.fitting
    alone = times.predicted_s / times.measured_s - 1
    paced = alone if pace is None else times.predicted_s * pace.at(times.start_s, times.mixed) / times.measured_s - 1
    rows = []
    for kind, own in (("all", judged), ("decode", judged & ~times.mixed), ("mixed", judged & times.mixed)):
        if own.any():
            errors = [float(np.median(each[own])) for each in (alone, paced)]
            sizes = [float(np.median(np.abs(each[own]))) for each in (alone, paced)]
            rows.append((kind, int(own.sum()), *errors, *sizes))
    return pd.DataFrame(rows, columns=["kind", "steps", "error", "at_pace", "spread", "spread_at_pace"])


def step_table(times: StepTimes, pace: RunPace) -> pd.DataFrame:
    """Each step beside the pace of its moment.

    Columns t (seconds since the start), mixed, compared (whether it did not tell the pace), took (its seconds over
    those of the profile) and pace (that of a step without a prompt at this moment).
    """
    return pd.DataFrame(
        {
            "t": times.start_s,
            "mixed": times.mixed,
            "compared": ~times.fitting,
            "took": times.measured_s / times.predicted_s,
            "pace": pace.at(times.start_s, np.zeros(len(times.start_s), dtype=bool)),
        }
    )


class PacedBackend(DelegatingBackend, ABC):
    """Another backend's predictions, at a machine's pace."""

    @abstractmethod
    def _paced(self, batches: Sequence[MicroBatch], seconds: Sequence[float]) -> list[float]:
        """The predicted seconds of micro-batches, or without these of what is done between steps, at the pace."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Seconds of each micro-batch."""
        return self._paced(batches, super().step(step, batches))

    def move(self, moves: Moves) -> float:
        """Seconds of the moves."""
        return self._paced((), [super().move(moves)])[0]

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Seconds of the transfers."""
        return self._paced((), [super().transfer(transfers)])[0]

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Seconds of the copies."""
        return self._paced((), [super().copy(copies)])[0]


class PacedServer(PacedBackend):
    """Predictions at the pace that a machine had at the time."""

    def __init__(self, inner: Backend, pace: RunPace | float, clock: Callable[[], float]):
        """``pace``: by the time of ``clock``, in seconds since the start of the run, or the same all the time."""
        super().__init__(inner)
        self._pace, self._clock = pace, clock

    def _paced(self, batches: Sequence[MicroBatch], seconds: Sequence[float]) -> list[float]:
        pace = self._pace
        if isinstance(pace, RunPace):
            mixed = any(batch.n_tokens > len(batch.chunks) for batch in batches)
            pace = float(pace.at([self._clock()], [mixed])[0])
        return [pace * each for each in seconds]
