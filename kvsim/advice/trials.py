"""Runs that a recommendation rests on: one setting, one stretch of traffic, one load; and the largest load met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvsim.advice.slo import LATENCY_MEASURES, Slo
from kvsim.costs.profile import Profile, load_profile
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryScenario, Traffic
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.result import Result
from kvsim.simulation.run import build_policy, cost_model, drive
from workloads import WorkloadError

MOST_DOUBLINGS = 6
"""The load is doubled, or halved, so often at most."""

_LEAST = 40
"""Requests below which nothing is said of whether arrivals outpace service, as in ``outcomes``."""


@dataclass(frozen=True)
class TrialRun:
    """A run to be made, as it travels to a worker."""

    number: int
    """Of the setting."""
    replication: int
    scenario: Scenario
    share: float
    """Of the replication's requests."""
    load: float
    """Times the load that is asked about."""


@dataclass(frozen=True)
class TrialOutcome:
    """What came of it."""

    measures: dict[str, float | None]
    """Latencies in seconds, ``failed_share``, ``truncated_share``, ``throughput_tokens_per_s``, ``prefix_hit_rate``."""
    settled: bool
    """False: arrivals outpace service, so that the latencies tell how long the run was."""
    warnings: tuple[str, ...] = ()
    error: str = ""
    """Why there was no end to it; there are no measures then."""

    def met(self, slo: Slo) -> bool:
        """Whether all bounds are, by a server that keeps up."""
        return not self.error and self.settled and slo.met(self.measures)

    def factor(self, slo: Slo) -> float:
        """By which the worst bound is missed, above 1; infinite where there is nothing to say."""
        return float("inf") if self.error else slo.worst(self.measures)[1]


@dataclass(frozen=True)
class Make:
    """Makes runs, wherever it is called."""

    traffic: Traffic

    def __call__(self, trials: Sequence[TrialRun]) -> list[tuple[TrialRun, TrialOutcome]]:
        """Each trial with its outcome."""
        return [(trial, run_trial(self.traffic, trial)) for trial in trials]


@dataclass(frozen=True)
class FindLargestLoad:
    """Finds the largest load at which a service level is met, wherever it is called."""

    traffic: Traffic
    slo: Slo
    steps: int
    """Halvings of the last doubling: 5 tell loads apart that differ by 2 %."""

    def __call__(self, trial: TrialRun) -> tuple[TrialRun, float, int]:
        """The trial, the largest multiple of its load (0: none that was tried), and the runs that it took."""
        runs = 0

        def met(power: float) -> bool:
            nonlocal runs
            runs += 1
            asked = TrialRun(trial.number, trial.replication, trial.scenario, trial.share, trial.load * 2.0**power)
            return run_trial(self.traffic, asked).met(self.slo)

        if met(0.0):
            low = 0.0
            while low < MOST_DOUBLINGS and met(low + 1):
                low += 1
            if low == MOST_DOUBLINGS:
                return trial, 2.0**low, runs
        else:
            low = -1.0
            while low >= -MOST_DOUBLINGS and not met(low):
                low -= 1
            if low < -MOST_DOUBLINGS:
                return trial, 0.0, runs
        high = low + 1
        for _ in range(self.steps):
            middle = (low + high) / 2
            low, high = (middle, high) if met(middle) else (low, middle)
        return trial, float(2.0**low), runs


def run_trial(traffic: Traffic, trial: TrialRun) -> TrialOutcome:
    """Make one run. What cannot be served is an outcome, not an error."""
    try:
        scenario, held = traffic.stretch(trial.scenario, trial.replication, trial.share, trial.load)
        if held is not None:
            scenario = InMemoryScenario.of(scenario, held)
        result, warnings = _run(scenario)
    except (UserError, WorkloadError) as e:
        return TrialOutcome({}, False, error="; ".join(str(e).splitlines()))
    return _outcome(result, warnings, open_loop=traffic.scalable and scenario.workload.kind != "closed-loop")


def _run(scenario: Scenario) -> tuple[Result, tuple[str, ...]]:
    """As ``simulation.run``, which would read the scenario again, and with it the trace."""
    costs = cost_model(scenario, _profile(scenario.machine.profile, scenario.folder))
    policy = build_policy(scenario, None, costs)
    recorder = Recorder(None, detail="requests", snapshots=False)
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(scenario, policy, backend, recorder, costs.profile.name)
    return result, tuple(costs.warnings())


@cache
def _profile(name: str, folder: Path) -> Profile:
    return load_profile(name, folder)


def _outcome(result: Result, warnings: tuple[str, ...], *, open_loop: bool) -> TrialOutcome:
    summary, queue = result.summary, result.summary["queue"]
    found: dict[str, float | None] = {}
    for measure in LATENCY_MEASURES:
        latency, statistic = measure.split("_")
        found[measure] = summary[f"{latency}_s"][statistic]
    total = summary["requests"]
    found |= {
        "failed_share": summary["failed"] / total,
        "truncated_share": summary["truncated"] / total,
        "throughput_tokens_per_s": summary["throughput_tokens_per_s"],
        "prefix_hit_rate": summary["prefix"]["hit_rate"],
    }
    # Where hardly anybody was served before the last arrived, nobody can say that the server keeps up.
    unsure = open_loop and total >= _LEAST and queue["growth_per_arrival"] is None
    return TrialOutcome(found, not (queue["unstable"] or unsure), warnings)
