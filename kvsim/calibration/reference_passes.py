"""The machine's present speed, from a few reference passes timed during calibrations and validations.

Clock rates, other load and temperature change a machine's speed by some percent from minute to minute; a profile's
predictions hold for the speed at which it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.calibration.trials import CELLS, Trial, timed_pass, whole_pass
from kvsim.errors import UserError
from kvsim.model.engine_shapes import Storage
from kvsim.simulation.backend import Backend, DelegatingBackend
from policies import Chunk, Group, MicroBatch
from real_engine import Engine, Transformer

_DECODES = ((1, 128), (1, 1024), (2, 1536), (4, 1024), (8, 2048), (16, 4096))
"""Sequences and cells of memory-bound passes."""
_PROMPTS = ((32, 512), (128, 1024))
"""Tokens and cells of compute-bound passes, which need not slow down together with memory-bound ones."""

_FEWEST = 3
"""Measurements of each pass before a pace is computed."""
_EVERY_S = 0.5


class ReferencePasses:
    """Reference passes on a separate cache."""

    def __init__(self, trials: Sequence[Trial], every_s: float = _EVERY_S):
        """``every_s``: seconds of the engine's work between two measurements."""
        self.trials = list(trials)
        self.every_s = every_s

    def measure(self) -> None:
        """Time all passes once, after an untimed run that warms the processor's caches."""
        for trial in self.trials:
            trial.run()
        for trial in self.trials:
            trial.measure()

    def medians_s(self) -> tuple[float, ...]:
        """Median seconds of each pass."""
        return tuple(trial.median_s for trial in self.trials)

    def pace(self, known_s: Sequence[float]) -> float:
        """Mean ratio of the measured seconds to ``known_s``; the measurements are then cleared.

        Measures further if there are fewer than three measurements. Raises ``UserError`` if ``known_s`` are of other
        passes.
        """
        while min(len(trial.seconds) for trial in self.trials) < _FEWEST:
            self.measure()
        if len(known_s) != len(self.trials):
            raise UserError(f"the profile has {len(known_s)} reference passes, not {len(self.trials)}; calibrate anew")
        found = float(np.mean(np.array(self.medians_s()) / np.array(known_s)))
        for trial in self.trials:
            trial.seconds.clear()
        return found


def numpy_reference_passes(transformer: Transformer, type_k: Storage, type_v: Storage) -> ReferencePasses:
    """Reference passes of our own engine."""
    engine = Engine(transformer, (Group(CELLS),), "sliced", seed=0, type_k=type_k, type_v=type_v)
    engine.fill()
    decodes = [timed_pass(engine, whole_pass(n, cells, prompt=False)) for n, cells in _DECODES]
    prompts = [timed_pass(engine, whole_pass(n, cells, prompt=True)) for n, cells in _PROMPTS]
    return ReferencePasses([Trial(run) for run in decodes] + [Trial(run, decodes[0]) for run in prompts])


class PaceMeasuringBackend(DelegatingBackend):
    """An engine that also times reference passes now and then, outside of the server's clock."""

    def __init__(self, engine: Backend, reference_passes: ReferencePasses):
        super().__init__(engine)
        self._reference_passes = reference_passes
        self._since = reference_passes.every_s

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Run the step, and time the reference passes before it if they are due."""
        if self._since >= self._reference_passes.every_s:
            self._reference_passes.measure()
            self._since = 0.0
        seconds = super().step(step, batches)
        self._since += sum(seconds)
        return seconds
