"""Compare the times of recorded servers with those predicted for the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvsim.costs.cost_model import CostModel
from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import recorded_device
from kvsim.costs.profile import Profile, load_profile, same_model
from kvsim.costs.shipped import is_shipped
from kvsim.engines.recordings.errors import (
    BOUNDED,
    MEASURES,
    STATISTICS,
    error_table,
    fitted_network_s,
    load_table,
    side_by_side,
    with_bounds,
)
from kvsim.engines.recordings.prediction import Fitted, predict, profile_for
from kvsim.engines.recordings.ranking import Ranking, rankings
from kvsim.engines.recordings.reading import UntimedError, read_recording
from kvsim.engines.recordings.recorded_server import RecordedServer
from kvsim.engines.recordings.spread import Spread, Statistics, spread_of
from kvsim.engines.recordings.steps import SteppedServer
from kvsim.engines.recordings.vllm_scenario import replay
from kvsim.errors import UserError, counted
from kvsim.model.recorded_names import recorded_model
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.run import build_policy, drive

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ServerRun:
    """One recorded server, predicted beside measured; times in seconds."""

    recording: RecordedServer
    scenario: Scenario
    """What was simulated."""
    profile: Profile
    table: pd.DataFrame
    """Columns measure, statistic, measured, predicted, error (relative: predicted / measured - 1), unfitted: the error
    of predictions without ``network_s``, unpaced: that of predictions at the profile's own pace, spread: how much the
    same statistic differs between runs of the server with the same requests, and within: whether the error is in its
    bound, or in the spread where that is wider. NaN and None where there is none."""
    requests: pd.DataFrame
    """One row for each request: id, arrival_s, and each latency as ``measured_*`` and ``predicted_*``; NaN where there
    is none."""
    load: pd.DataFrame
    """One row for each second that was recorded: t, and each of running and waiting as ``measured_*`` and
    ``predicted_*``."""
    network_s: float | None
    """Seconds of the network and the front end, fitted; None where the engine's own clock was recorded."""
    preemptions: int
    """Preemptions of the simulated run."""
    assumed: tuple[str, ...]
    """What the recording does not say, one line each."""
    warnings: tuple[str, ...]
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    """How well single steps are predicted (see ``pace.step_errors``); empty if none were recorded."""
    by_step: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Each step beside the machine's pace (see ``pace.step_table``); empty if the pace is not known."""
    spread: Spread | None = None
    """How much the server's times differ from run to run; None if no requests were sent twice."""
    fitted_to: str | None = None
    """What the profile is fitted to, in words; None for one that was given or found."""

    @property
    def name(self) -> str:
        """The name of the recording."""
        return self.recording.name

    @property
    def pace(self) -> tuple[float, float] | None:
        """Lowest and highest pace of the machine during the run; None if it is not known."""
        return None if self.by_step.empty else (float(self.by_step["pace"].min()), float(self.by_step["pace"].max()))

    @property
    def worst(self) -> float:
        """Largest absolute error of any latency at mean, P50 or P99; NaN if there is none."""
        t = self.table
        return float(t[t["measure"].isin(MEASURES) & t["statistic"].isin(BOUNDED)]["error"].abs().max())

    @property
    def within(self) -> bool | None:
        """Whether all errors that have a bound are within it, or within the spread; None if none has one."""
        told = self.table["within"].dropna()
        return None if told.empty else bool(told.all())

    @property
    def loads(self) -> dict[str, dict[str, float]]:
        """For running and waiting: the mean measured and predicted, and the mean absolute difference by the second."""
        found = {}
        for load in ("running", "waiting") if len(self.load) else ():
            measured, predicted = self.load[f"measured_{load}"], self.load[f"predicted_{load}"]
            found[load] = {
                "measured": float(measured.mean()),
                "predicted": float(predicted.mean()),
                "difference": float((predicted - measured).abs().mean()),
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """The part of the object that ``--json`` prints."""
        meta = self.recording.meta
        table = self.table.astype(object).where(self.table.notna(), None)
        return {
            "file": str(self.recording.path),
            "engine": f"{meta.engine} {meta.version}",
            "model": self.recording.model if isinstance(self.recording, SteppedServer) else self.scenario.model.name,
            "device": meta.device,
            "clock": meta.clock,
            "profile": self.profile.name,
            "basis": self.profile.basis,
            "blocks": self.scenario.cache.cells // self.scenario.cache.block_size,
            "assumed": list(self.assumed),
            "warnings": list(self.warnings),
            "network_s": self.network_s,
            "fitted_to": self.fitted_to,
            "pace": None if self.pace is None else list(self.pace),
            "spread_of": None if self.spread is None else list(self.spread.runs),
            "steps": self.steps.to_dict("records"),
            "within": self.within,
            "worst_error": None if self.worst != self.worst else self.worst,
            "preemptions": {"measured": self.recording.preemptions, "predicted": self.preemptions},
            "loads": self.loads,
            "measures": table.to_dict("records"),
        }


@dataclass(frozen=True)
class RecordedValidation:
    """Recorded servers, predicted beside measured."""

    runs: tuple[ServerRun, ...]
    left_out: tuple[str, ...] = ()
    """Why recordings were left out, one line each."""

    @property
    def table(self) -> pd.DataFrame:
        """The tables of all runs, with the name of each in the column ``file``."""
        return pd.concat([run.table.assign(file=run.name) for run in self.runs], ignore_index=True)

    @property
    def worst(self) -> float:
        """Largest absolute error of any latency at mean, P50 or P99 in any run; NaN if one has none."""
        return max((run.worst for run in self.runs), key=lambda error: (error != error, error))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        worst = self.worst
        runs = [run.to_dict() for run in self.runs]
        ranked = [ranking.to_dict() for ranking in self.rankings]
        return {
            "rankings": ranked,
            "worst_error": None if worst != worst else worst,
            "left_out": list(self.left_out),
            "runs": runs,
        }

    @cached_property
    def rankings(self) -> tuple[Ranking, ...]:
        """How settings rank, where the same requests were sent under several."""
        return rankings(
            [(run.recording, run.requests) for run in self.runs if isinstance(run.recording, SteppedServer)]
        )

    def plot(self) -> Figure:
        """Draw a row for each run: distributions of the latencies; requests, and the machine's pace, over time."""
        from kvsim.reports.recorded_plots import recorded_figure

        return recorded_figure(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the picture and the table into a folder; returns the files. Raises ``UserError``."""
        target = writable(folder)
        picture, table = target / "recorded.png", target / "recorded.csv"
        try:
            self.plot().savefig(picture, dpi=150)
            self.table.to_csv(table, index=False)
        except OSError as e:
            raise UserError(f"{target}: cannot write results: {e.strerror or e}") from None
        return [picture, table]


def validate_recorded(
    files: Sequence[str | Path] | str | Path,
    profile: Profile | str | None = None,
    *,
    announce: Callable[[str, int], object] = lambda name, requests: None,
    progress: Progress | None = None,
) -> RecordedValidation:
    """Simulate what recorded servers were asked, and compare the times.

    ``files``: recordings of requests alone, of llama-server, or of vLLM with its steps. ``profile``: the costs, as such
    or by name or file. By default, of requests alone that of the model on its device; else one that is fitted to the
    other recordings of the same server (see ``stepped.profile_for``). ``announce`` is called with the name of a
    recording and its number of requests before it is simulated. Raises ``UserError`` and ``WorkloadError``.
    """
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise UserError("no recording was given")
    given = (load_profile(profile), _absolute(profile)) if isinstance(profile, str) else (profile, None)
    # All files are read before anything is simulated, so that a fault in the last one does not cost a run of the first.
    recordings, untimed = _read_all(paths)
    stepped = [each for each in recordings if isinstance(each, SteppedServer)]
    named: dict[Path, tuple[Profile, str | None]] = {}
    fitted: dict[Path, Fitted] = {}
    for each in recordings:
        if isinstance(each, SteppedServer):
            fitted[each.path] = profile_for(each, given[0], stepped)
        else:
            named[each.path] = _profile_of(each) if given[0] is None else (_fitting(given[0], each), given[1])
    runs = []
    for recording in recordings:
        announce(recording.name, len(recording.requests))
        if isinstance(recording, SteppedServer):
            runs.append(_stepped_run(recording, fitted[recording.path], stepped, progress))
        else:
            runs.append(_run(recording, *named[recording.path], progress))
    return RecordedValidation(tuple(runs), untimed)


def _read_all(paths: Sequence[str | Path]) -> tuple[list[RecordedServer], tuple[str, ...]]:
    """The recordings, and a line for each that says its times mean nothing. Raises ``UserError`` if that is all."""
    recordings, untimed = [], []
    for path in paths:
        try:
            recordings.append(read_recording(path))
        except UntimedError as e:
            untimed.append(str(e))
    if not recordings:
        raise UserError("\n".join(untimed))
    return recordings, tuple(untimed)


def _stepped_run(
    recording: SteppedServer, fitted: Fitted, others: Sequence[SteppedServer], progress: Progress | None
) -> ServerRun:
    """Simulate a recording with steps and compare."""
    found = predict(recording, fitted.profile, progress)
    spread = spread_of(recording, others, Statistics(STATISTICS))
    table = error_table(found.requests, recording, found.result, found.front_end.both_s)
    failed = int((found.result.requests["status"] != "completed").sum()) - (
        recording.workload.n_requests - len(recording.requests)
    )
    more = counted(failed, "more request")
    return ServerRun(
        recording,
        recording.scenario,
        fitted.profile,
        with_bounds(table, found.requests, spread, verdict=found.in_range),
        found.requests,
        load_table(recording, found.result),
        None,
        found.result.summary["preemptions"],
        recording.assumed,
        (
            *recording.notes,
            *((f"{recording.name}: {more} failed in the simulation",) if failed > 0 else ()),
            *(f"{recording.name}: {line}" for line in found.warnings),
        ),
        steps=found.steps,
        by_step=found.by_step,
        spread=spread,
        fitted_to=fitted.to,
    )


_SIXTEEN_BITS = ("bfloat16", "float16", "half", "auto")
"""Types of weights and activations that the profiles of devices have, unless they say otherwise."""


def _fitting(profile: Profile, recording: RecordedServer) -> Profile:
    """The profile, if it is of the recorded model on the recorded device. Raises ``UserError`` otherwise."""
    meta = recording.meta
    model = recorded_model(meta.model)
    if not same_model(profile.model, model):
        raise UserError(f"{recording.path}: no times for {model}: profile {profile.name} is of {profile.model}")
    if profile.device is not None:
        device = recorded_device(meta.device).name
        recorded, given = (device, meta.tensor_parallel_size), (profile.device, profile.tensor_parallel)
        if recorded != given:
            of = f"{given[1]} x {given[0]}, not of {recorded[1]} x {recorded[0]}"
            raise UserError(f"{recording.path}: profile {profile.name} is of {of}")
    return profile


def _absolute(profile: str) -> str:
    """The name of a shipped profile, or the absolute path of another."""
    return profile if is_shipped(profile) else str(Path(profile).expanduser().absolute())


def _profile_of(recording: RecordedServer) -> tuple[Profile, str]:
    """The profile of a recording's model on its device, and what loads it. Raises ``UserError``: how to make one."""
    meta = recording.meta
    if meta.dtype is not None and meta.dtype.lower().removeprefix("torch.") not in _SIXTEEN_BITS:
        raise UserError(
            f"{recording.path}: dtype {meta.dtype!r:.40}; there are times of {', '.join(_SIXTEEN_BITS)} only"
        )
    try:
        device = recorded_device(meta.device)
        name = find_profile(recorded_model(meta.model), device.name, tp=meta.tensor_parallel_size)
        return load_profile(name), name
    except UserError as e:
        raise UserError(f"{recording.path}: {e}") from None


def _run(recording: RecordedServer, profile: Profile, name: str | None, progress: Progress | None) -> ServerRun:
    """Simulate one recording and compare; ``name``: what loads the profile."""
    made = replay(recording, profile, name)
    scenario, costs = made.scenario, CostModel(profile)
    policy = build_policy(scenario, None, costs)
    backend = SimulatedBackend(costs, policy.kernel, policy.groups)
    result, _ = drive(scenario, policy, backend, Recorder(progress), profile)
    requests = side_by_side(recording, result)
    network = None
    if recording.meta.clock == "client":
        network = fitted_network_s(requests)
        for measure in ("ttft_s", "e2e_s"):
            requests[f"predicted_{measure}"] += network
    failed = result.summary["failed"]
    return ServerRun(
        recording,
        scenario,
        profile,
        error_table(requests, recording, result, network or 0.0),
        requests.drop(columns="waited_s"),
        load_table(recording, result),
        network,
        result.summary["preemptions"],
        made.assumed,
        (
            *recording.notes,
            *((f"{recording.name}: {failed} of {len(requests)} requests failed in the simulation",) if failed else ()),
            *(f"{recording.name}: {line}" for line in costs.warnings()),
        ),
    )
