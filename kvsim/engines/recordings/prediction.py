"""Predict a recorded server: its own requests, simulated, at the profile's pace and, with steps, at its machine's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import simpy

from kvsim.costs.cost_model import CostModel
from kvsim.costs.profile import Profile
from kvsim.engines.recordings.latencies import fitted_network_s, measured_latencies, predicted_latencies
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.run_pace import PacedServer, RunPace, step_errors, step_table, step_times
from kvsim.engines.recordings.steps import FrontEnd, SteppedServer
from kvsim.engines.recordings.vllm_scenario import replay_scenario
from kvsim.errors import counted
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.arrivals import Clients, send
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.cluster.run import run_cluster
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy
from workloads import Workload

_IN_RANGE = 2.0
"""How many times as large as what a profile was measured on a step may be for a verdict on its prediction."""


@dataclass(frozen=True)
class Prediction:
    """A recorded server, predicted."""

    scenario: Scenario
    result: Result
    """At the pace of the run, if that is known."""
    requests: pd.DataFrame
    """One row for each request: id, arrival_s, each latency as measured_*, predicted_* and, with steps, unpaced_*."""
    around_s: float
    """What lies between clients and server, and was added to each latency."""
    network_s: float | None
    """Seconds of the network and the front end, fitted to the requests; None where nothing was."""
    assumed: tuple[str, ...]
    """What the recording does not say, one line each."""
    warnings: tuple[str, ...]
    in_range: bool
    """Whether each step is known, and the profile was measured on steps about as large."""
    slowdown: float | None = None
    """See ``run_pace.StepTimes``; None if too few steps were seen."""
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    """See ``run_pace.step_errors``; empty if no steps were recorded."""
    by_step: pd.DataFrame = field(default_factory=pd.DataFrame)
    """See ``run_pace.step_table``; empty if the pace is not known."""


def predict(recording: RecordedServer, profile: Profile, name: str | None, progress: Progress | None) -> Prediction:
    """Simulate a recorded server with its own requests; ``name``: what loads the profile."""
    if isinstance(recording, SteppedServer):
        return _predict_steps(recording, profile, progress)
    costs, (scenario, assumed) = CostModel(profile), replay_scenario(recording, profile, name)
    if scenario.cluster.size > 1:
        result = run_cluster(scenario, progress=progress, detail="tables", profile=profile)
    else:
        policy = build_policy(scenario, None, costs)
        backend = SimulatedBackend(costs, policy.kernel, policy.groups)
        result, _ = drive(scenario, policy, backend, Recorder(progress), profile)
    requests = _side_by_side(recording, predicted=predicted_latencies(recording, result))
    network_s = None
    if recording.meta.clock == "client":
        network_s = fitted_network_s(requests)
        for measure in ("ttft_s", "e2e_s"):
            requests[f"predicted_{measure}"] += network_s
    failed = result.summary["failed"]
    what = f"{failed} of {len(requests)} requests" if failed else None
    warnings = (*_warnings(recording, what, costs), *(result.warnings if scenario.cluster.size > 1 else ()))
    return Prediction(scenario, result, requests, network_s or 0.0, network_s, assumed, warnings, in_range=False)


def _predict_steps(recording: SteppedServer, profile: Profile, progress: Progress | None) -> Prediction:
    costs, clients = CostModel(profile), recording.clients
    if recording.seen and profile.front_end_s is not None and clients.front_end.both_s <= 0:
        # The profile's front end, half of it there, half back.
        half = profile.front_end_s.value / 2
        clients = replace(clients, front_end=FrontEnd(half, half))
        recording = replace(recording, clients=clients)
    times = step_times(recording.steps, recording.kernel, costs) if recording.steps else None
    pace = RunPace(times) if times is not None and int((times.fitting & ~times.mixed).sum()) > 1 else None
    unpaced = simulate(recording.scenario, costs, recording.workload, clients)
    result = unpaced
    if pace is not None:
        result = simulate(recording.scenario, costs, recording.workload, clients, pace, progress)

    def predicted(result: Result) -> pd.DataFrame:
        there = np.array([clients.there(int(number)) for number in result.requests["id"]])
        return predicted_latencies(recording, result, there + clients.front_end.back_s)

    failed = int((result.requests["status"] != "completed").sum())
    failed -= recording.workload.n_requests - len(recording.requests)
    what = counted(failed, "more request") if failed > 0 else None
    return Prediction(
        recording.scenario,
        result,
        _side_by_side(recording, predicted=predicted(result), unpaced=predicted(unpaced)),
        clients.front_end.both_s,
        None,
        recording.assumed,
        _warnings(recording, what, costs),
        in_range=costs.most_tokens <= _IN_RANGE * profile.tokens.high
        and costs.most_cells <= _IN_RANGE * profile.cells.high,
        slowdown=None if times is None else times.slowdown,
        steps=pd.DataFrame() if times is None else step_errors(times, pace),
        by_step=pd.DataFrame() if times is None or pace is None else step_table(times, pace),
    )


def simulate(
    scenario: Scenario,
    costs: CostModel,
    workload: Workload,
    clients: Clients = send,
    pace: RunPace | float | None = None,
    progress: Progress | None = None,
) -> Result:
    """Simulate a server with these requests; ``pace``: that of its machine, by default the profile's own."""
    policy, env = build_policy(scenario), simpy.Environment()
    backend: Backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    if pace is not None:
        backend = PacedServer(backend, pace, lambda: float(env.now))
    recorder = Recorder(progress)
    return drive(scenario, policy, backend, recorder, None, workload=workload, clients=clients, env=env)[0]


def _warnings(recording: RecordedServer, failed: str | None, costs: CostModel) -> tuple[str, ...]:
    """``Prediction.warnings``; ``failed``: how many requests failed, in words."""
    found = [] if failed is None else [f"{failed} failed in the simulation"]
    return (*recording.notes, *(f"{recording.name}: {line}" for line in [*found, *costs.warnings()]))


def _side_by_side(recording: RecordedServer, **predicted: pd.DataFrame) -> pd.DataFrame:
    """``Prediction.requests``; ``predicted``: latencies by id, by what they are called."""
    measured = measured_latencies(recording)
    arrivals = [request.asked.arrival_s for request in recording.requests]
    requests = pd.DataFrame({"id": measured.index, "arrival_s": arrivals})
    for side, table in ({"measured": measured} | predicted).items():
        for measure in measured.columns:
            requests[f"{side}_{measure}"] = table.reindex(measured.index)[measure].to_numpy()
    return requests
