"""The runs behind a recommendation: one setting at one load, and the largest load that meets the service level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.advice.recommend.early_miss import MissWatch
from kvsim.advice.recommend.slo import LATENCY_MEASURES, SHARES, Slo
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Profile
from kvsim.errors import UserError
from kvsim.experiments.traffic import InMemoryRequests, InMemoryScenario, Traffic
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.summary import inferred_lines
from workloads import WorkloadError

if TYPE_CHECKING:
    from kvsim.simulation.result import Result

MOST_DOUBLINGS = 6
"""Maximum number of times that the load is doubled or halved."""
LOWEST_LOAD = 2.0**-MOST_DOUBLINGS
"""The smallest multiple of the load that is tried."""

_FIRST_REACH = 0.125
"""How far, in doublings, the second load is from the first that is tried for a largest load."""
_FEWEST_REQUESTS = 40
"""Runs of fewer requests do not show whether arrivals outpace service, as in ``request_log``."""


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


class LoadSearch(NamedTuple):
    """A largest load to be found, as it is sent to a worker."""

    trial: TrialRun
    met_at_load_asked: bool | None = None
    """Whether the trial itself, at its own load, met the service level; None if that is not known."""
    about: float | None = None
    """Where the largest load is thought to be, as a power of 2 times the trial's; None if nothing is known."""


@dataclass(frozen=True)
class FindLargestLoad:
    """A callable that finds the largest load at which a setting meets a service level."""

    traffic: Traffic
    slo: Slo
    steps: int
    """Bisection steps within the last doubling; 5 steps distinguish loads that differ by 2 %."""

    def __call__(self, search: LoadSearch) -> tuple[TrialRun, float, int]:
        """Return the trial, the largest multiple of its load (0 if none was met), and the number of runs needed.

        What is met at a load counts as met at lower ones, what is missed as missed at higher ones.
        """
        trial = search.trial
        loads = _LoadsTried(self.traffic, self.slo, trial)
        if search.met_at_load_asked is not None:
            loads.learn(0.0, search.met_at_load_asked)
        most = float(most_doublings(self.traffic))
        if search.about is not None:
            loads.bracket(search.about, -float(MOST_DOUBLINGS), most)
        low = 0.0
        if loads.met(0.0):
            while low < most and loads.met(low + 1):
                low += 1
            if low == most:
                return trial, 2.0**low, loads.runs
        else:
            low = -1.0
            while low >= -MOST_DOUBLINGS and not loads.met(low):
                low -= 1
            if low < -MOST_DOUBLINGS:
                return trial, 0.0, loads.runs
        high = low + 1
        for _ in range(self.steps):
            middle = (low + high) / 2
            low, high = (middle, high) if loads.met(middle) else (low, middle)
        return trial, float(2.0**low), loads.runs


class _LoadsTried:
    """At which loads a setting meets a service level, as far as that has been seen; loads are powers of 2."""

    def __init__(self, traffic: Traffic, slo: Slo, trial: TrialRun):
        self.runs = 0
        self._traffic = traffic
        self._slo = slo
        self._trial = trial
        self._met = -math.inf
        """Largest load that was met."""
        self._missed = math.inf
        """Smallest load that was missed."""

    def met(self, power: float) -> bool:
        """Whether a load is met; it is tried if that does not follow from those that have been."""
        if power <= self._met or power >= self._missed:
            return power <= self._met
        self.runs += 1
        scaled = replace(self._trial, load=self._trial.load * 2.0**power)
        self.learn(power, run_trial(self._traffic, scaled, self._slo).met(self._slo))
        return power <= self._met

    def learn(self, power: float, met: bool) -> None:
        """A load has been tried."""
        if met:
            self._met = max(self._met, power)
        else:
            self._missed = min(self._missed, power)

    def bracket(self, about: float, least: float, most: float) -> None:
        """Try loads around where the largest one is thought to be, further and further away, until it lies between."""
        power, reach = min(max(about, least), most), _FIRST_REACH
        up = self.met(power)
        while True:
            further = min(max(power + (reach if up else -reach), least), most)
            if further == power or self.met(further) != up:
                return
            power, reach = further, 2 * reach


def run_trial(traffic: Traffic, trial: TrialRun, only_if_met: Slo | None = None) -> TrialOutcome:
    """Execute one trial run. A scenario that cannot be served gives an outcome with an error; nothing is raised.

    ``only_if_met``: a service level; a run that misses it for certain is ended there, as an outcome with an error.
    """
    try:
        scenario, requests = traffic.part(trial.scenario, trial.replication, trial.share, trial.load)
    except (UserError, WorkloadError) as e:
        return _failed(e)
    open_loop = traffic.scalable and traffic.users is None
    return run_requests(scenario, requests, open_loop=open_loop, only_if_met=only_if_met)


def run_requests(
    scenario: Scenario, requests: InMemoryRequests | None, *, open_loop: bool, only_if_met: Slo | None = None
) -> TrialOutcome:
    """Run a scenario with the given requests, or with its own; an outcome with an error if it cannot be served.

    ``open_loop``: requests come whether or not others end. ``only_if_met``: as for ``run_trial``.
    """
    try:
        if requests is not None:
            scenario = InMemoryScenario.of(scenario, requests)
        result, warnings = _run(scenario, only_if_met)
    except (UserError, WorkloadError) as e:
        return _failed(e)
    return _outcome(result, warnings, open_loop=open_loop)


def _failed(fault: Exception) -> TrialOutcome:
    return TrialOutcome({}, False, error="; ".join(str(fault).splitlines()))


def _run(scenario: Scenario, only_if_met: Slo | None) -> tuple[Result, tuple[str, ...]]:
    """Like ``simulation.run``, but without reading the scenario, and with it the trace, again."""
    if scenario.cluster.size > 1:
        from kvsim.simulation.cluster.run import run_cluster

        several = run_cluster(scenario, detail="requests")
        return several, tuple(line for line in several.warnings if line not in several.notes)
    from kvsim.simulation.backend import SimulatedBackend
    from kvsim.simulation.recorder import Recorder
    from kvsim.simulation.request_log import RequestLog
    from kvsim.simulation.run import drive
    from kvsim.simulation.set_up import build_policy, cost_model

    costs = cost_model(scenario, _profile(scenario.machine.profile, scenario.folder))
    policy = build_policy(scenario, None, costs)
    workload = scenario.build_workload()
    watch = None if only_if_met is None else MissWatch(only_if_met, workload.n_requests)
    recorder = Recorder(detail="requests", requests=RequestLog(ended=watch))
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(scenario, policy, backend, recorder, costs.profile, workload=workload)
    return result, tuple(costs.warnings())


@cache
def _profile(name: str, folder: Path) -> Profile:
    return load_profile(name, folder)


def latencies_and_shares(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Latencies in seconds, ``failed_share`` and ``truncated_share`` of a run, by the names that bounds have."""
    found: dict[str, float | None] = {}
    for measure in LATENCY_MEASURES:
        latency, statistic = measure.split("_")
        found[measure] = summary[f"{latency}_s"][statistic]
    return found | {measure: summary[name] / summary["requests"] for name, measure in SHARES.items()}


def _outcome(result: Result, warnings: tuple[str, ...], *, open_loop: bool) -> TrialOutcome:
    summary, queue = result.summary, result.summary["queue"]
    measures = latencies_and_shares(summary) | {
        "throughput_tokens_per_s": summary["throughput_tokens_per_s"],
        "requests_per_s": summary["completed"] / summary["makespan_s"] if summary["makespan_s"] else None,
        "prefix_hit_rate": summary["prefix"]["hit_rate"],
    }
    # If hardly any request was served before the last one arrived, there is no sign that the server keeps up.
    unknown = open_loop and summary["requests"] >= _FEWEST_REQUESTS and queue["growth_per_arrival"] is None
    return TrialOutcome(measures, not (queue["unstable"] or unknown), (*inferred_lines([summary]), *warnings))
