"""Predict a recorded server of which each step is known: at the profile's pace, and at that of its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import simpy

from kvsim.costs.cost_model import CostModel
from kvsim.costs.profile import Profile
from kvsim.engines.recordings.run_pace import PacedServer, RunPace, StepTimes, step_errors, step_table, step_times
from kvsim.engines.recordings.spread import latencies
from kvsim.engines.recordings.step_profile import fitted_to, has_steps_enough
from kvsim.engines.recordings.steps import FrontEnd, SteppedServer
from kvsim.errors import UserError
from kvsim.model.engine_shapes import file_name
from kvsim.simulation.backend import Backend, SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.result import Result
from kvsim.simulation.run import build_policy, drive

_IN_RANGE = 2.0
"""How many times as large as what a profile was measured on a step may be for a verdict on its prediction."""


@dataclass(frozen=True)
class Prediction:
    """A recorded server, predicted."""

    result: Result
    """At the pace of the run, if that is known."""
    requests: pd.DataFrame
    """One row for each answered request: id, arrival_s, each latency as measured_*, predicted_* and unpaced_*."""
    steps: pd.DataFrame
    """See ``pace.step_errors``; empty if no steps were recorded."""
    by_step: pd.DataFrame
    """See ``pace.step_table``; empty if the pace is not known."""
    warnings: tuple[str, ...]
    front_end: FrontEnd
    """What was added to each latency."""
    in_range: bool
    """Whether the profile was measured on steps about as large as those of the run."""


@dataclass(frozen=True)
class Fitted:
    """The profile for a recording, and what it is fitted to, in words; None for one that was given."""

    profile: Profile
    to: str | None


def profile_for(recording: SteppedServer, given: Profile | None, others: Sequence[SteppedServer]) -> Fitted:
    """The profile to predict a recording with, which never saw all of it.

    One that was given; else fitted to other recordings of the same server with settings that cost the same, or with
    other ones; else to every other step of its own. Raises ``UserError``: what is missing.
    """
    if given is not None:
        if not is_of(given, recording.meta.model, recording.model):
            raise UserError(
                f"{recording.path}: no times for {recording.meta.model}: profile {given.name} is of {given.model}"
            )
        return Fitted(given, None)
    apart = [other for other in others if other.path != recording.path and other.steps]
    for key, note in (("same_costs", ""), ("same_server", ", whose attention or scheduling is set otherwise")):
        alike = [other for other in apart if getattr(other, key) == getattr(recording, key)]
        if has_steps_enough(alike):
            names = ", ".join(other.name for other in alike)
            return Fitted(fitted_to(alike, "recorded"), f"the steps of {names}{note}")
    if not has_steps_enough([recording], half=True):
        raise UserError(
            f"{recording.path}: shows too few steps to tell what its server's cost; name other recordings of the same "
            "server beside it, or give --profile (kvsim calibrate --url measures one)"
        )
    return Fitted(fitted_to([recording], "recorded", half=True), "every other of its own steps")


def is_of(profile: Profile, model: str, known: str | None) -> bool:
    """Whether a profile is of a model: of the same file or, where a name is all there is, of that name.

    ``model``: the file or name that a server or a recording says; ``known``: what it is called here, if it is known.
    """
    measured, recorded = file_name(profile.model), Path(model).name
    if measured.endswith(".gguf") and recorded.endswith(".gguf"):
        return measured == recorded
    return profile.model in (model, known)


def predict(recording: SteppedServer, profile: Profile, progress: Progress | None) -> Prediction:
    """Simulate a recorded server with its own requests."""
    costs = CostModel(profile)
    recording = _with_front_end(recording, profile)
    times = step_times(recording, costs) if recording.steps else None
    pace = RunPace(times) if times is not None and _tells(times) else None
    unpaced = _simulate(recording, costs, None, None)
    result = unpaced if pace is None else _simulate(recording, costs, pace, progress)
    measured = latencies(recording)
    requests = pd.DataFrame({"id": measured.index})
    requests["arrival_s"] = [request.asked.arrival_s for request in recording.requests]
    for side, table in (
        ("measured", measured),
        ("predicted", _latencies(recording, result)),
        ("unpaced", _latencies(recording, unpaced)),
    ):
        for measure in measured.columns:
            requests[f"{side}_{measure}"] = table.reindex(measured.index)[measure].to_numpy()
    by_step = pd.DataFrame() if times is None or pace is None else step_table(times, pace)
    steps = pd.DataFrame() if times is None else step_errors(times, pace)
    in_range = (
        costs.most_tokens <= _IN_RANGE * profile.tokens.high and costs.most_cells <= _IN_RANGE * profile.cells.high
    )
    return Prediction(result, requests, steps, by_step, tuple(costs.warnings()), recording.clients.front_end, in_range)


def _with_front_end(recording: SteppedServer, profile: Profile) -> SteppedServer:
    """The recording, with the profile's front end where its own is not known: half of it there, half back."""
    if not recording.seen or profile.front_end_s is None or recording.clients.front_end.both_s > 0:
        return recording
    half = profile.front_end_s.value / 2
    return replace(recording, clients=replace(recording.clients, front_end=FrontEnd(half, half)))


def _tells(times: StepTimes) -> bool:
    """Whether enough steps tell the pace."""
    return int((times.tells & ~times.mixed).sum()) > 1


def _simulate(recording: SteppedServer, costs: CostModel, pace: RunPace | None, progress: Progress | None) -> Result:
    policy, env = build_policy(recording.scenario), simpy.Environment()
    backend: Backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    if pace is not None:
        backend = PacedServer(backend, pace, lambda: float(env.now))
    result, _ = drive(
        recording.scenario,
        policy,
        backend,
        Recorder(progress),
        None,
        workload=recording.workload,
        clients=recording.clients,
        env=env,
    )
    return result


def _latencies(recording: SteppedServer, result: Result) -> pd.DataFrame:
    """The latencies that clients would have measured, one row for each completed request by its id."""
    done = result.requests[result.requests["status"] == "completed"].set_index("id")
    clients = recording.clients
    there = np.array([clients.there(int(number)) for number in done.index])
    around = there + clients.front_end.back_s
    further = (done["output_tokens"] - 1).where(done["output_tokens"] > 1)
    table = pd.DataFrame(
        {
            "ttft_s": done["first_token_s"] - done["arrival_s"] + around,
            "tpot_s": (done["finished_s"] - done["first_token_s"]) / further,
            "e2e_s": done["finished_s"] - done["arrival_s"] + around,
        }
    )
    table.index = table.index.astype(str)
    return table
