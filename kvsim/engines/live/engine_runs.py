"""Runs of a real engine, and predictions of the same schedules: same steps, same cells, other times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvsim import machine
from kvsim.calibration.llamacpp import llama_reference_passes
from kvsim.calibration.llamacpp_session import LlamaCppSession
from kvsim.calibration.numpy_engine import numpy_reference_passes
from kvsim.calibration.pace import PaceCurve, Tick, choose_windows
from kvsim.calibration.reference_passes import (
    PaceKeeper,
    PaceMeasuringBackend,
    ReferencePasses,
    known_seconds,
)
from kvsim.costs.profile import NUMPY, Profile
from kvsim.engines.recordings.run_pace import PacedBackend
from kvsim.errors import Divergence, UserError
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.arrivals import Turn
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy, chosen, cost_model, ledger_for
from policies import Chunk, MicroBatch, Policy, PolicyFactory
from policies.layouts.virtually_contiguous import VirtuallyContiguousPolicy
from real_engine import Engine, load_model
from real_engine.llamacpp import LlamaCpp
from real_engine.virtual_memory import VirtualEngine

_EVERY_S = 0.25
"""Least seconds between reference passes: each leaves the next step with colder caches."""


class ScheduleMismatch(Divergence):
    """The predicted run placed other cells than the real one, or llama.cpp others than its policy: a bug of ours."""


@dataclass(frozen=True)
class EngineRun:
    """A policy's real run and two predictions of it."""

    policy: str
    real: Result
    predicted: Result
    unscaled: Result
    """Prediction not scaled by the machine's pace."""
    digest: str
    """A digest of all placements and moves, equal in all three."""
    ticks: Sequence[Tick]
    """The reference passes among the real run's steps."""
    pace: float
    """Predicted seconds of all steps with the machine's pace, over those without."""
    cpu_share: float
    """Processor over wall seconds of the real run."""
    compared: int
    """Dumps of llama.cpp's cells that were compared with the policy's, all equal."""


class EngineRunner(ABC):
    """A real engine that runs the scenario."""

    reference_passes: ReferencePasses

    @abstractmethod
    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
        """Make a new backend, and the policy to drive it with."""

    def run_share(self, backend: Backend, watch: machine.Stopwatch) -> tuple[float, int]:
        """Share of its processors that the run got, and number of cell dumps compared in it."""
        return watch.cpu_share, 0

    def recheck_cells(self, choice: str | PolicyFactory, script: Sequence[Turn]) -> int:
        """Repeat the run untimed if its cells could not be compared; return the number of dumps compared."""
        return 0

    def close(self, backend: Backend) -> None:  # noqa: B027  (our own engine has nothing to free)
        """Free the backend after its run."""

    def shut_down(self) -> None:  # noqa: B027  (our own engine has nothing to free)
        """Free everything after all runs."""


class NumpyRunner(EngineRunner):
    """Our own engine as the real one."""

    def __init__(self, scenario: Scenario, profile: Profile):
        if profile.engine != NUMPY:
            raise UserError(f"profile {profile.name} was measured on {profile.engine}, so engine must be llamacpp")
        self._scenario, cache = scenario, scenario.cache
        self._model = load_model(scenario.model.name, scenario.seed).transformer
        self.reference_passes = numpy_reference_passes(self._model, cache.type_k, cache.type_v)

    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
        """A new backend and the policy to drive it with."""
        served, cache, seed = self._scenario, self._scenario.cache, self._scenario.seed
        if isinstance(policy, VirtuallyContiguousPolicy) and policy.kernel == "sliced":
            if (cache.type_k, cache.type_v) != ("f32", "f32"):
                raise UserError(f"{policy.name}: pages are mapped for K and V in f32 only")
            return policy, VirtualEngine(
                self._model,
                policy.groups,
                seed,
                page_tokens=policy.block_size,
                slots=served.server.slots,
                max_tokens=served.slot_context,
            )
        engine = Engine(self._model, policy.groups, policy.kernel, seed, type_k=cache.type_k, type_v=cache.type_v)
        return policy, engine


class LlamaCppRunner(EngineRunner):
    """llama.cpp as the real engine."""

    def __init__(self, session: LlamaCppSession, profile: Profile):
        if profile.engine == NUMPY:
            raise UserError(f"profile {profile.name} was measured on our own engine, not on llama.cpp")
        if profile.engine != session.library.name:
            raise UserError(f"profile {profile.name} was measured on {profile.engine}; this is {session.library.name}")
        self._session = session
        self.reference_passes, self._reference_context = llama_reference_passes(session)

    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
        """A new context, and the policy of which it repeats what it is asked."""
        backend = self._session.backend(choice)
        return backend.policy, backend

    def run_share(self, backend: Backend, watch: machine.Stopwatch) -> tuple[float, int]:
        """Share of the processors while llama.cpp's own calls ran, and the number of cell dumps compared."""
        assert isinstance(backend, LlamaCpp)
        context = backend.context
        share = context.cpu_s / (context.wall_s * self._session.threads) if context.wall_s else 1.0
        return min(share, 1.0), backend.compared.streams

    def close(self, backend: Backend) -> None:
        """Free the context."""
        assert isinstance(backend, LlamaCpp)
        backend.context.close()

    def shut_down(self) -> None:
        """Free the model."""
        self._reference_context.close()
        self._session.close()

    def recheck_cells(self, choice: str | PolicyFactory, script: Sequence[Turn]) -> int:
        """In era B showing the cells takes time: they are compared in a run of their own."""
        if self._session.library.era == "A":
            return 0
        backend = self._session.backend(choice, show_cells=True)
        with backend.context:
            drive(self._session.scenario, backend.policy, backend, Recorder(detail="requests"), None, script)
            backend.finish()
        return backend.compared.streams


def run_and_predict(
    scenario: Scenario,
    profile: Profile,
    choice: str | PolicyFactory,
    runner: EngineRunner,
    progress: Progress | None,
    announce: Callable[[str], object] | None,
    *,
    first: bool,
) -> EngineRun:
    """Run a policy on the real engine, then predict along the script of that run; ``first``: of its repeats.

    Raises ``ScheduleMismatch``.
    """
    scenario, _ = chosen(scenario, choice)
    policy = build_policy(scenario, choice, cost_model(scenario, profile))
    if announce is not None:
        announce(policy.name)
    driven, backend = runner.backend(policy, choice)
    recorder = Recorder(progress, digest=True)
    paced = PaceMeasuringBackend(backend, PaceKeeper(runner.reference_passes, _EVERY_S))
    try:
        with machine.measuring() as watch:
            real, script = drive(scenario, driven, paced, recorder, None)
            paced.keeper.tick()
        cpu_share, compared = runner.run_share(backend, watch)
        runner.close(backend)
        compared += runner.recheck_cells(choice, script) if first else 0
    except Divergence as e:
        raise ScheduleMismatch(f"{policy.name}: {e}") from None
    finally:
        runner.close(backend)
    digest, ticks, known_s = recorder.schedule_digest, paced.keeper.ticks, known_seconds(profile)
    scale = _PaceOfSteps(PaceCurve(ticks, known_s, choose_windows([ticks], known_s)), paced.stamps)
    predicted = _predict(scenario, profile, choice, script, real, digest, scale)
    unscaled = _predict(scenario, profile, choice, script, real, digest, None)
    return EngineRun(policy.name, real, predicted, unscaled, digest, ticks, scale.mean, cpu_share, compared)


class _PaceOfSteps:
    """The machine's pace at each step of a real run, for the steps of its prediction."""

    def __init__(self, curve: PaceCurve, stamps: Sequence[float]):
        """``stamps``: when each step ran, on the curve's clock."""
        self._curve, self._stamps = curve, stamps
        self._paced_s = self._unpaced_s = 0.0

    @property
    def mean(self) -> float:
        """Seconds of all steps with the pace, over those without."""
        return self._paced_s / self._unpaced_s if self._unpaced_s else 1.0

    def scale(self, step: int, tokens: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """Predicted seconds of passes of so many tokens at the pace of the ``step``-th step."""
        pace = self._curve.at([self._stamps[min(step, len(self._stamps) - 1)]] * len(tokens), tokens)
        scaled: list[float] = (pace * np.array(seconds)).tolist()
        self._unpaced_s += sum(seconds)
        self._paced_s += sum(scaled)
        return scaled


class _PacedPrediction(PacedBackend):
    """Predictions at the pace that the machine had at each step of the real run."""

    def __init__(self, inner: Backend, pace: _PaceOfSteps):
        super().__init__(inner)
        self._pace = pace
        self._steps = 0

    def _paced(self, batches: Sequence[MicroBatch], seconds: Sequence[float]) -> list[float]:
        return self._pace.scale(self._steps, [batch.n_tokens for batch in batches] or [1] * len(seconds), seconds)

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Predicted seconds of each micro-batch."""
        seconds = super().step(step, batches)
        self._steps += 1
        return seconds


def _predict(
    scenario: Scenario,
    profile: Profile,
    choice: str | PolicyFactory,
    script: Sequence[Turn],
    real: Result,
    digest: str,
    pace: _PaceOfSteps | None,
) -> Result:
    """Rerun the schedule with predicted times. Raises ``ScheduleMismatch`` if it places other cells."""
    scenario, _ = chosen(scenario, choice)
    costs = cost_model(scenario, profile)
    policy = build_policy(scenario, choice, costs)
    backend: Backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    if pace is None:
        recorder = Recorder(digest=True, time_breakdown=ledger_for(scenario, policy, costs))
    else:
        recorder, backend = Recorder(digest=True), _PacedPrediction(backend, pace)
    result, _ = drive(scenario, policy, backend, recorder, profile, script)
    same_bytes = result.summary["cache"]["moved_bytes"] == real.summary["cache"]["moved_bytes"]
    if recorder.schedule_digest != digest or not same_bytes:
        raise ScheduleMismatch(f"{policy.name}: the predicted run placed other cells than the real one")
    return replace(result, warnings=tuple(costs.warnings()))
