"""Compare predicted with measured times of the same schedule.

A machine's speed changes, on some twofold within seconds. Among the steps of every real run, passes that are
independent of the scenario are timed (``calibration.reference_passes``), and each step's prediction is scaled by the
pace at its moment; the errors of unscaled predictions are reported as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from kvsim import machine
from kvsim.calibration.llamacpp_session import LlamaCppSession
from kvsim.calibration.pace import PaceCurve, Tick, choose_windows, median_seconds
from kvsim.calibration.reference_passes import (
    PaceKeeper,
    PaceMeasuringBackend,
    ReferencePasses,
    known_seconds,
    numpy_reference_passes,
)
from kvsim.costs.profile import NUMPY, Profile, is_llamacpp
from kvsim.errors import Divergence, UserError
from kvsim.experiments.comparison import choose
from kvsim.scenario.scenario import Scenario, load_scenario, shortened
from kvsim.simulation.arrivals import Turn
from kvsim.simulation.backend import Backend, DelegatingBackend, SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import build_policy, cost_model, drive, ledger_for
from policies import Chunk, HostCopy, MicroBatch, Moves, Policy, PolicyFactory, Transfer, in_group
from policies.layouts.virtually_contiguous import VirtuallyContiguousPolicy
from real_engine import Engine, load_model
from real_engine.llamacpp import LlamaCpp
from real_engine.virtual_memory import VirtualEngine

_MEASURES = ("ttft_s", "tpot_s", "e2e_s")
_STATISTICS = ("mean", "p50", "p95", "p99")
_EVERY_S = 0.25
"""Least seconds between reference passes: each leaves the next step with colder caches."""


class ScheduleMismatch(Divergence):
    """The predicted run placed other cells than the real one, or llama.cpp others than its policy: a bug of ours."""


@dataclass(frozen=True)
class Validation:
    """Predicted against measured times, for each policy and measure."""

    scenario: Scenario
    profile: Profile
    repeats: int
    table: pd.DataFrame
    """Columns policy, measure, statistic; predicted, measured (seconds; tokens/s for throughput; medians over the
    repeats); error (relative: predicted / measured - 1, the median over the repeats, each against its own
    prediction); low, high (the errors' range over the repeats); unscaled (the error of predictions not scaled by the
    machine's pace); spread (half the range of the measured values over their median)."""
    schedules: dict[str, str]
    """By policy: the digest of all placements and moves of the first repeat, equal in both runs."""
    moved_bytes: dict[str, int]
    """By policy: bytes moved by the first repeat's real run, as by the predicted one."""
    pace: dict[str, tuple[float, float]]
    """By policy: lowest and highest pace over the repeats, the ratio of the predicted seconds of all steps with the
    machine's pace to those without."""
    reference: tuple[float, float]
    """Median seconds of both reference passes, decode and prompt, over those in the profile."""
    cpu_share: dict[str, float]
    """By policy: lowest ratio over the repeats of processor to wall seconds of the real runs."""
    compared: dict[str, int]
    """On llama.cpp, by policy: dumps of llama.cpp's cells that were compared with the policy's, all equal."""
    causes: pd.DataFrame
    """One row for each policy, repeat and request that both runs completed: policy, repeat (from 1), id, arrival_s,
    e2e_s (measured), on what its seconds were spent as predicted without the machine's pace
    (``time_breakdown.SECONDS``), and machine_s: measured less predicted."""
    warnings: tuple[str, ...] = ()
    """A line for each prediction beyond the profile's measured range, and for each policy with failed requests."""

    @property
    def busy(self) -> bool:
        """Whether other work took so much of the machine that the figures cannot be trusted."""
        return min(self.cpu_share.values()) < machine.BUSY_BELOW

    @property
    def worst(self) -> float:
        """Largest absolute error of end-to-end latency at P50 or P99, over all policies."""
        return self._worst("error")

    @property
    def worst_unscaled(self) -> float:
        """``worst`` of the predictions not scaled by the machine's pace."""
        return self._worst("unscaled")

    @property
    def elsewhere(self) -> bool:
        """Whether the profile was measured on another processor."""
        return self.profile.measured_on.processor != machine.processor()

    def _worst(self, error: str) -> float:
        t = self.table
        return float(t[(t["measure"] == "e2e_s") & t["statistic"].isin(["p50", "p99"])][error].abs().max())

    @property
    def ranking(self) -> tuple[float | None, int]:
        """Kendall's tau between the policies' predicted and measured mean end-to-end latencies (None for fewer than
        two policies), and the number of pairs ranked differently although they differ by more than their spreads."""
        t = self.table
        means = t[(t["measure"] == "e2e_s") & (t["statistic"] == "mean")]
        if len(means) < 2:
            return None, 0
        rows = list(zip(means["predicted"], means["measured"], means["measured"] * means["spread"], strict=True))
        wrong = sum(
            (a[0] - b[0]) * (a[1] - b[1]) < 0 and abs(a[1] - b[1]) > a[2] + b[2] for a, b in combinations(rows, 2)
        )
        tau = float(kendalltau(means["predicted"], means["measured"]).statistic)
        return (None if tau != tau else tau), wrong

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        tau, wrong = self.ranking
        return {
            "scenario": self.scenario.name,
            "seed": self.scenario.seed,
            "model": self.scenario.model.name,
            "profile": self.profile.name,
            "engine": self.profile.engine,
            "repeats": self.repeats,
            "busy": self.busy,
            "worst_e2e_error": self.worst,
            "worst_e2e_error_unscaled": self.worst_unscaled,
            "profile_of_another_processor": self.elsewhere,
            "reference_decode": self.reference[0],
            "reference_prompt": self.reference[1],
            "kendall_tau": tau,
            "pairs_ranked_wrong": wrong,
            "warnings": list(self.warnings),
            "policies": [
                {
                    "policy": policy,
                    "schedule": digest,
                    "cpu_share": self.cpu_share[policy],
                    "pace": list(self.pace[policy]),
                    "moved_bytes": self.moved_bytes[policy],
                    "compared": self.compared.get(policy),
                    "causes": self.causes[self.causes["policy"] == policy].drop(columns="policy").to_dict("records"),
                    "measures": json.loads(
                        self.table[self.table["policy"] == policy].drop(columns="policy").to_json(orient="records")
                    ),
                }
                for policy, digest in self.schedules.items()
            ],
        }


def validate(
    scenario: Scenario | str | Path,
    profile: Profile,
    policies: Sequence[str | PolicyFactory] | None = None,
    *,
    requests: int | None = 60,
    repeats: int = 1,
    engine: str = NUMPY,
    library: Path | str | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Validation:
    """Run the scenario (its first ``requests``) on the real engine, then predict the same schedule.

    With ``engine="llamacpp"`` the real llama.cpp runs, with as many threads as the profile was measured with, and by
    default under the policies that describe its version (``library``: a folder with another llama-cpp-python). Its
    cells are compared after every step; in era B, where showing them takes time, in an additional untimed run along
    the script of the first.

    The real run decides by its own clock which requests have arrived before each step. The predicted run follows that
    script, so that both make the same decisions and place the same cells (checked), and differ only in the steps'
    times. With several ``repeats`` the policies alternate, so that slow moments of the machine affect all of them.
    Raises ``UserError`` if the scenario's decisions depend on the clock in other ways.
    """
    scenario = shortened(load_scenario(scenario), requests)
    if scenario.server.prefetch == "predictive":
        raise UserError(
            f"{scenario.name}: server.prefetch: 'predictive' follows the clock, and the two runs' clocks differ"
        )
    runner: _RealRunner
    if is_llamacpp(engine):
        session = LlamaCppSession(scenario, library=library, threads=profile.measured_on.threads)
        scenario = session.scenario
        chosen, left_out = choose(policies, session.policies, session.check)
        runner = _LlamaCppRunner(session, profile)
    else:
        runner = _NumpyRunner(scenario, profile)
        chosen, _ = choose(policies, in_group("standard"), lambda policy: build_policy(scenario, policy))
        left_out = ()
    runs: dict[str, list[_Run]] = {}
    try:
        for repeat in range(repeats):
            for choice in chosen:
                done = _run(scenario, profile, choice, runner, progress, announce, first=repeat == 0)
                runs.setdefault(done.policy, []).append(done)
            if announce is not None and repeats > 1:
                announce(f"repeat {repeat + 1} of {repeats} is done")
    finally:
        runner.shut_down()
    return _validation(scenario, profile, runs, repeats, left_out, compared=is_llamacpp(engine))


def _validation(
    scenario: Scenario,
    profile: Profile,
    runs: dict[str, list[_Run]],
    repeats: int,
    left_out: Sequence[str],
    *,
    compared: bool,
) -> Validation:
    beyond = dict.fromkeys(line for own in runs.values() for run in own for line in _warnings(run))
    return Validation(
        scenario,
        profile,
        repeats,
        _summary([(policy, *row) for policy, own in runs.items() for run in own for row in _measures(run)]),
        schedules={policy: own[0].digest for policy, own in runs.items()},
        moved_bytes={policy: own[0].real.summary["cache"]["moved_bytes"] for policy, own in runs.items()},
        pace={policy: (min(r.pace for r in own), max(r.pace for r in own)) for policy, own in runs.items()},
        reference=_reference([run for own in runs.values() for run in own], profile),
        cpu_share={policy: min(r.cpu_share for r in own) for policy, own in runs.items()},
        compared={policy: sum(r.compared for r in own) for policy, own in runs.items() if compared},
        causes=pd.concat(
            [_causes(r).assign(policy=r.policy, repeat=i) for own in runs.values() for i, r in enumerate(own, 1)],
            ignore_index=True,
        ),
        warnings=(*left_out, *beyond),
    )


def _reference(runs: Sequence[_Run], profile: Profile) -> tuple[float, float]:
    """``Validation.reference``."""
    now, then = median_seconds([run.ticks for run in runs]), known_seconds(profile)
    return now[0] / then[0], now[1] / then[1]


def _warnings(run: _Run) -> Iterator[str]:
    for line in run.unscaled.warnings:
        yield f"{run.policy}: {line}"
    failed, requests = run.real.summary["failed"], run.real.summary["requests"]
    if failed:
        yield f"{run.policy}: {failed:,} of {requests:,} requests failed; the errors are of those that were left"


def _causes(run: _Run) -> pd.DataFrame:
    """Rows of ``Validation.causes``, without policy and repeat."""
    real = run.real.requests[["id", "e2e_s"]].rename(columns={"e2e_s": "measured_s"})
    both = run.unscaled.causes.merge(real, on="id")
    both["machine_s"] = both["measured_s"] - both["e2e_s"]
    return both.drop(columns="e2e_s").rename(columns={"measured_s": "e2e_s"})


@dataclass(frozen=True)
class _Run:
    """A policy's real run and two predictions of it."""

    policy: str
    real: Result
    predicted: Result
    unscaled: Result
    """Prediction not scaled by the machine's pace."""
    digest: str
    ticks: Sequence[Tick]
    """The reference passes among the real run's steps."""
    pace: float
    cpu_share: float
    compared: int
    """See ``Validation.compared``."""


class _RealRunner(Protocol):
    """A real engine that runs the scenario."""

    reference_passes: ReferencePasses

    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
        """A new backend and the policy to drive it with."""
        ...

    def run_share(self, backend: Backend, watch: machine.Stopwatch) -> tuple[float, int]:
        """Share of its processors that the run got, and number of cell dumps compared in it."""
        ...

    def recheck_cells(self, choice: str | PolicyFactory, script: Sequence[Turn]) -> int:
        """Repeat the run untimed if its cells could not be compared; return the number of dumps compared."""
        ...

    def close(self, backend: Backend) -> None:
        """Free the backend after its run."""
        ...

    def shut_down(self) -> None:
        """Free everything after all runs."""
        ...


class _NumpyRunner:
    """Our own engine as the real one."""

    def __init__(self, scenario: Scenario, profile: Profile):
        if profile.engine != NUMPY:
            raise UserError(f"profile {profile.name} was measured on {profile.engine}, so engine must be llamacpp")
        self._scenario, cache = scenario, scenario.cache
        self._model = load_model(scenario.model.name, scenario.seed).transformer
        self.reference_passes = numpy_reference_passes(self._model, cache.type_k, cache.type_v)

    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
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

    def run_share(self, backend: Backend, watch: machine.Stopwatch) -> tuple[float, int]:
        return watch.cpu_share, 0

    def close(self, backend: Backend) -> None:
        pass

    def shut_down(self) -> None:
        pass

    def recheck_cells(self, choice: str | PolicyFactory, script: Sequence[Turn]) -> int:
        return 0


class _LlamaCppRunner:
    """llama.cpp as the real engine."""

    def __init__(self, session: LlamaCppSession, profile: Profile):
        from kvsim.calibration.llamacpp import llama_reference_passes

        if profile.engine == NUMPY:
            raise UserError(f"profile {profile.name} was measured on our own engine, not on llama.cpp")
        if profile.engine != session.library.name:
            raise UserError(f"profile {profile.name} was measured on {profile.engine}; this is {session.library.name}")
        self._session = session
        self.reference_passes, self._reference_context = llama_reference_passes(session)

    def backend(self, policy: Policy, choice: str | PolicyFactory) -> tuple[Policy, Backend]:
        backend = self._session.backend(choice)
        return backend.policy, backend

    def run_share(self, backend: Backend, watch: machine.Stopwatch) -> tuple[float, int]:
        assert isinstance(backend, LlamaCpp)
        context = backend.context
        share = context.cpu_s / (context.wall_s * self._session.threads) if context.wall_s else 1.0
        return min(share, 1.0), backend.compared.streams

    def close(self, backend: Backend) -> None:
        assert isinstance(backend, LlamaCpp)
        backend.context.close()

    def shut_down(self) -> None:
        self._reference_context.close()
        self._session.close()

    def recheck_cells(self, choice: str | PolicyFactory, script: Sequence[Turn]) -> int:
        if self._session.library.era == "A":
            return 0
        backend = self._session.backend(choice, show_cells=True)
        with backend.context:
            drive(self._session.scenario, backend.policy, backend, Recorder(detail="requests"), None, script)
            backend.finish()
        return backend.compared.streams


def _run(
    scenario: Scenario,
    profile: Profile,
    choice: str | PolicyFactory,
    runner: _RealRunner,
    progress: Progress | None,
    announce: Callable[[str], None] | None,
    *,
    first: bool,
) -> _Run:
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
    return _Run(policy.name, real, predicted, unscaled, digest, ticks, scale.mean, cpu_share, compared)


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


class _PacedBackend(DelegatingBackend):
    """Predictions at the pace that the machine had at each step of the real run."""

    def __init__(self, inner: Backend, pace: _PaceOfSteps):
        super().__init__(inner)
        self._pace = pace
        self._steps = 0

    def step(self, step: Sequence[Chunk], batches: Sequence[MicroBatch]) -> Sequence[float]:
        """Predicted seconds of each micro-batch."""
        seconds = super().step(step, batches)
        self._steps += 1
        return self._pace.scale(self._steps - 1, [batch.n_tokens for batch in batches], seconds)

    def move(self, moves: Moves) -> float:
        """Predicted seconds."""
        return self._between_steps(super().move(moves))

    def transfer(self, transfers: Sequence[Transfer]) -> float:
        """Predicted seconds."""
        return self._between_steps(super().transfer(transfers))

    def copy(self, copies: Sequence[HostCopy]) -> float:
        """Predicted seconds."""
        return self._between_steps(super().copy(copies))

    def _between_steps(self, seconds: float) -> float:
        (scaled,) = self._pace.scale(self._steps, [1], [seconds])
        return scaled


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
    costs = cost_model(scenario, profile)
    policy = build_policy(scenario, choice, costs)
    backend: Backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    if pace is None:
        recorder = Recorder(digest=True, time_breakdown=ledger_for(scenario, policy, costs))
    else:
        recorder, backend = Recorder(digest=True), _PacedBackend(backend, pace)
    result, _ = drive(scenario, policy, backend, recorder, profile, script)
    same_bytes = result.summary["cache"]["moved_bytes"] == real.summary["cache"]["moved_bytes"]
    if recorder.schedule_digest != digest or not same_bytes:
        raise ScheduleMismatch(f"{policy.name}: the predicted run placed other cells than the real one")
    return replace(result, warnings=tuple(costs.warnings()))


def _measures(run: _Run) -> Iterator[tuple[str, str, float | None, float | None, float | None]]:
    """Rows of measure, statistic, predicted, predicted without the pace, measured."""
    results = (run.predicted, run.unscaled, run.real)
    for measure in _MEASURES:
        for statistic in _STATISTICS:
            predicted, unscaled, measured = (result.summary[measure][statistic] for result in results)
            yield measure, statistic, predicted, unscaled, measured
    throughput = "throughput_tokens_per_s"
    predicted, unscaled, measured = (result.summary[throughput] for result in results)
    yield throughput, "mean", predicted, unscaled, measured


def _summary(rows: Sequence[tuple[str, str, str, float | None, float | None, float | None]]) -> pd.DataFrame:
    """``Validation.table`` from the rows of all repeats."""
    keys = ["policy", "measure", "statistic"]
    each = pd.DataFrame(rows, columns=[*keys, "predicted", "unscaled", "measured"])
    for column, prediction in (("error", "predicted"), ("unscaled", "unscaled")):
        each[column] = each[prediction] / each["measured"] - 1
    by = each.groupby(keys, sort=False)
    table = by[["predicted", "measured", "error", "unscaled"]].median()
    table["low"], table["high"] = by["error"].min(), by["error"].max()
    table["spread"] = (by["measured"].max() - by["measured"].min()) / 2 / by["measured"].median()
    return table.reset_index()
