"""The runs behind a recommendation: one setting at one load, and the largest load that meets the service level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.advice.slo import LATENCY_MEASURES, Slo
from kvsim.costs.profile import Profile, load_profile
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryRequests, InMemoryScenario, Traffic
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.inferred_text import inferred_lines
from workloads import WorkloadError

if TYPE_CHECKING:
    from kvsim.simulation.result import Result

MOST_DOUBLINGS = 6
"""Maximum number of times that the load is doubled or halved."""

_FEWEST_REQUESTS = 40
"""Runs of fewer requests do not show whether arrivals outpace service, as in ``latency_stats``."""


def most_doublings(traffic: Traffic) -> int:
    """Number of times that the load is doubled at most: fewer where the requests cannot make a higher load."""
    return min(MOST_DOUBLINGS, int(math.log2(min(traffic.largest_factor, 2.0**MOST_DOUBLINGS))))


@dataclass(frozen=True)
class TrialRun:
    """A run to execute, as it is sent to a worker."""

    number: int
    """Number of the setting."""
    replication: int
    scenario: Scenario
    share: float
    """Share of the replication's requests that are used."""
    load: float
    """Multiple of the load asked about."""


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial run."""

    measures: dict[str, float | None]
    """Latencies in seconds, ``failed_share``, ``truncated_share``, ``throughput_tokens_per_s``, ``requests_per_s``,
    ``prefix_hit_rate``."""
    settled: bool
    """False if arrivals outpace service, so that the latencies depend on the length of the run."""
    warnings: tuple[str, ...] = ()
    error: str = ""
    """Why the run could not finish; there are no measures then."""

    def met(self, slo: Slo) -> bool:
        """Whether the server keeps up and meets all bounds."""
        return not self.error and self.settled and slo.met(self.measures)

    def factor(self, slo: Slo) -> float:
        """Return the worst measure divided by its limit, so above 1 if missed; infinite after an error."""
        return float("inf") if self.error else slo.worst(self.measures)[1]


@dataclass(frozen=True)
class RunTrials:
    """A callable that executes trial runs in whichever process calls it."""

    traffic: Traffic

    def __call__(self, trials: Sequence[TrialRun]) -> list[tuple[TrialRun, TrialOutcome]]:
        """Return each trial with its outcome."""
        return [(trial, run_trial(self.traffic, trial)) for trial in trials]


@dataclass(frozen=True)
class FindLargestLoad:
    """A callable that finds the largest load at which a setting meets a service level."""

    traffic: Traffic
    slo: Slo
    steps: int
    """Bisection steps within the last doubling; 5 steps distinguish loads that differ by 2 %."""

    def __call__(self, trial: TrialRun) -> tuple[TrialRun, float, int]:
        """Return the trial, the largest multiple of its load (0 if none was met), and the number of runs needed."""
        runs = 0

        def met(power: float) -> bool:
            nonlocal runs
            runs += 1
            scaled = replace(trial, load=trial.load * 2.0**power)
            return run_trial(self.traffic, scaled).met(self.slo)

        if met(0.0):
            low = 0.0
            most = most_doublings(self.traffic)
            while low < most and met(low + 1):
                low += 1
            if low == most:
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
    """Execute one trial run. A scenario that cannot be served gives an outcome with an error; nothing is raised."""
    try:
        scenario, requests = traffic.part(trial.scenario, trial.replication, trial.share, trial.load)
    except (UserError, WorkloadError) as e:
        return _failed(e)
    return run_requests(scenario, requests, open_loop=traffic.scalable and scenario.workload.kind != "closed-loop")


def run_requests(scenario: Scenario, requests: InMemoryRequests | None, *, open_loop: bool) -> TrialOutcome:
    """Run a scenario with the given requests, or with its own; an outcome with an error if it cannot be served.

    ``open_loop``: requests come whether or not others end.
    """
    try:
        if requests is not None:
            scenario = InMemoryScenario.of(scenario, requests)
        result, warnings = _run(scenario)
    except (UserError, WorkloadError) as e:
        return _failed(e)
    return _outcome(result, warnings, open_loop=open_loop)


def _failed(fault: Exception) -> TrialOutcome:
    return TrialOutcome({}, False, error="; ".join(str(fault).splitlines()))


def _run(scenario: Scenario) -> tuple[Result, tuple[str, ...]]:
    """Like ``simulation.run``, but without reading the scenario, and with it the trace, again."""
    from kvsim.simulation.backend import SimulatedBackend
    from kvsim.simulation.recorder import Recorder
    from kvsim.simulation.run import build_policy, cost_model, drive

    costs = cost_model(scenario, _profile(scenario.machine.profile, scenario.folder))
    policy = build_policy(scenario, None, costs)
    recorder = Recorder(None, detail="requests", snapshots=False)
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(scenario, policy, backend, recorder, costs.profile)
    return result, tuple(costs.warnings())


@cache
def _profile(name: str, folder: Path) -> Profile:
    return load_profile(name, folder)


def _outcome(result: Result, warnings: tuple[str, ...], *, open_loop: bool) -> TrialOutcome:
    summary, queue = result.summary, result.summary["queue"]
    measures: dict[str, float | None] = {}
    for measure in LATENCY_MEASURES:
        latency, statistic = measure.split("_")
        measures[measure] = summary[f"{latency}_s"][statistic]
    total = summary["requests"]
    measures |= {
        "failed_share": summary["failed"] / total,
        "truncated_share": summary["truncated"] / total,
        "throughput_tokens_per_s": summary["throughput_tokens_per_s"],
        "requests_per_s": summary["completed"] / summary["makespan_s"] if summary["makespan_s"] else None,
        "prefix_hit_rate": summary["prefix"]["hit_rate"],
    }
    # If hardly any request was served before the last one arrived, there is no sign that the server keeps up.
    unknown = open_loop and total >= _FEWEST_REQUESTS and queue["growth_per_arrival"] is None
    return TrialOutcome(measures, not (queue["unstable"] or unknown), (*inferred_lines([summary]), *warnings))
