"""Mixed costs: consecutive passes of a running server under random traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsim.calibration.pieces import PieceRecorder
from kvsim.calibration.reference_passes import PaceMeasuringBackend
from kvsim.costs.pass_layout import sample_of
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.simulation.backend import Backend
from policies import Chunk, Group, Kernel, MicroBatch

USERS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Concurrent requests; the runs cycle through these numbers."""

_COLD = 8
"""First passes of a run, which are not sampled: the processor's caches still hold earlier work."""

_COLD_AFTER_REFERENCE = 2
"""First passes after reference passes in the middle of a run, which are not sampled either."""


class SamplingBackend(PaceMeasuringBackend):
    """An engine whose passes are sampled, except cold ones and those with copies or rotations."""

    def __init__(
        self,
        engine: Backend,
        recorder: PieceRecorder,
        kernel: Kernel,
        group: Group,
        origin: int,
        *,
        per_pass: bool = True,
        skips: bool = False,
    ):
        """``per_pass``: whether each pass of a step is timed separately. ``skips`` as in ``Attention``."""
        super().__init__(engine, recorder.keeper)
        self._recorder = recorder
        self._kernel, self._group, self._origin, self._per_pass, self._skips = kernel, group, origin, per_pass, skips
        self._cold = _COLD
        """Passes that are still not to be sampled."""

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Run the step and sample its passes."""
        found = super().step(step, batches)
        if self.just_paced:
            self._cold = max(self._cold, _COLD_AFTER_REFERENCE)
        if self._per_pass:
            for batch, seconds in zip(batches, found, strict=True):
                self._sample([batch], seconds)
        elif batches:
            self._sample(batches, sum(found))
        return found

    def _sample(self, batches: Sequence[MicroBatch], seconds: float) -> None:
        if self._cold:
            self._cold -= 1
            return
        if self.disturbed:
            self._recorder.disturbed += 1
            return
        places = [batch.places[0] for batch in batches]
        if not any(p.moves.n_runs or len(p.shift.cells) or p.transfers for p in places):
            sample = sample_of(self._kernel, batches, self._group, seconds, self._origin, True, self._skips)
            self._recorder.add(self.stamps[-1], sample)


def closed_loop(
    turn: int,
    seed: int,
    model: str,
    users: int,
    requests: int,
    server: Mapping[str, object],
    cache: Mapping[str, object],
) -> Scenario:
    """A scenario of random requests of ``users`` users in a closed loop; ``server``, ``cache``: further keys."""
    return load_scenario(
        {
            "name": f"calibration {turn}",
            "seed": seed,
            "workload": {
                "kind": "closed-loop",
                "users": users,
                "think_s": 0.0,
                "requests": requests,
                "prompt_tokens": {"kind": "lognormal", "mu": 4.2, "sigma": 1.0, "min": 2, "max": 480},
                "output_tokens": {"kind": "lognormal", "mu": 3.2, "sigma": 0.8, "min": 2, "max": 120},
            },
            "model": {"name": model},
            "server": {"slots": users, "slot_context": 640, **server},
            "cache": dict(cache),
        }
    )
