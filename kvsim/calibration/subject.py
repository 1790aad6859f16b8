"""The engines that can be calibrated, behind one protocol."""

from __future__ import annotations

import time
from typing import Protocol, get_args

import numpy as np

from kvsim import machine
from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import ReferencePasses, numpy_reference_passes
from kvsim.calibration.serving import USERS, serve, traffic
from kvsim.calibration.trials import CELLS, Trial, Trials, draw_trials, random_pass, timed_pass
from kvsim.costs.profile import NUMPY
from kvsim.model.engine_shapes import Storage
from policies import Group, Kernel
from real_engine import Engine, load_model
from workloads import named_rng

_EACH = (24, 150)
"""Fewest and most forward passes for each kernel."""
_PASSES = 18
"""Approximate length of a trial and its warm-up, in decodes."""
_SERVED = 160
"""Approximate length of a server run, in decodes."""


class Subject(Protocol):
    """An engine with a model that a calibration measures."""

    engine: str
    """Name of the engine in the profile."""
    model: str
    type_k: Storage
    type_v: Storage
    threads: int
    shifts_all: bool
    """See ``Profile.shifts_all``."""
    reference_passes: ReferencePasses

    @property
    def kinds(self) -> int:
        """Kinds of server runs in a round."""
        ...

    def sizes(self, seconds: float) -> tuple[int, int]:
        """Forward passes for each kernel, and server runs of each kind, that fit into a round of ``seconds``."""
        ...

    def draw(self, each: int, rng: np.random.Generator) -> Trials:
        """Draw ``each`` passes for every kernel, moves, rotations and host copies; equal for equal generators."""
        ...

    def serve(self, kind: int, turn: int, origin: int, rng: np.random.Generator, recorder: PieceRecorder) -> None:
        """Record passes of a server run under random traffic. Raises ``TimeOver``."""
        ...

    def spent(self) -> tuple[float, float]:
        """Seconds so far by the clock times the threads at work, and processor seconds."""
        ...

    def close(self) -> None:
        """Free the memory; nothing more can be measured."""
        ...


class NumpySubject:
    """Our own engine, under all four kernels, on one thread."""

    engine = NUMPY
    threads = 1
    shifts_all = False

    def __init__(self, model: str, type_k: Storage, type_v: Storage):
        """Raises ``UserError`` if there is no such model."""
        self.model, self.type_k, self.type_v = model, type_k, type_v
        transformer = load_model(model).transformer
        self.engines: dict[Kernel, Engine] = {
            kernel: Engine(transformer, (Group(CELLS),), kernel, seed=0, type_k=type_k, type_v=type_v)
            for kernel in get_args(Kernel)
        }
        for engine in self.engines.values():
            engine.fill()
        self.reference_passes = numpy_reference_passes(transformer, type_k, type_v)

    @property
    def kinds(self) -> int:
        """One for each kernel."""
        return len(self.engines)

    def sizes(self, seconds: float) -> tuple[int, int]:
        """Sizes from the time of one decode."""
        engine = self.engines["sliced"]
        batch = random_pass("sliced", named_rng(0, "calibration size"), [1])
        with machine.measuring():
            decode_s = min(Trial(timed_pass(engine, batch)).measure())
        decodes = seconds / 2 / len(self.engines) / decode_s
        return passes_in(decodes / _PASSES), runs_in(decodes / _SERVED)

    def draw(self, each: int, rng: np.random.Generator) -> Trials:
        """Draw trials on the engines."""
        return draw_trials(self.engines, each, rng)

    def serve(self, kind: int, turn: int, origin: int, rng: np.random.Generator, recorder: PieceRecorder) -> None:
        """Serve under the policy of the ``kind``-th kernel."""
        engine = list(self.engines.values())[kind]
        serve(engine, traffic(self.model, self.type_k, self.type_v, turn, rng), origin, recorder)

    def spent(self) -> tuple[float, float]:
        """Seconds of the whole process, which does nothing else."""
        return time.perf_counter(), time.process_time()

    def close(self) -> None:
        """Do nothing: Python frees the memory."""


def passes_in(many: float) -> int:
    """Forward passes for each kernel in a round that has time for ``many``."""
    return int(np.clip(many, *_EACH))


def runs_in(many: float) -> int:
    """Server runs of each kind in a round that has time for ``many``."""
    return int(np.clip(many, 1, len(USERS)))
