"""What an engine must do to be calibrated."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import ReferencePasses
from kvsim.calibration.serving import USERS
from kvsim.calibration.trials import Trial
from kvsim.model.engine_shapes import Storage
from policies import Kernel

_EACH = (24, 150)
"""Fewest and most forward passes for each kernel."""


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
    skipping: tuple[Kernel, ...]
    """Kernels that skip masked cells one by one."""
    reference_passes: ReferencePasses

    @property
    def kinds(self) -> int:
        """Kinds of server runs in a round."""
        ...

    def sizes(self, seconds: float) -> tuple[int, int]:
        """Forward passes for each kernel, and server runs of each kind, that fit into a round of ``seconds``."""
        ...

    def draw(self, each: int, rng: np.random.Generator) -> list[Trial]:
        """Draw ``each`` passes for every kernel, then moves, rotations and host copies; equal for equal generators."""
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


def passes_in(many: float) -> int:
    """Forward passes for each kernel in a round that has time for ``many``."""
    return int(np.clip(many, *_EACH))


def runs_in(many: float) -> int:
    """Server runs of each kind in a round that has time for ``many``."""
    return int(np.clip(many, 1, len(USERS)))
