"""Compare the times of recorded servers with those predicted for the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsim.costs.cost_model import CostModel
from kvsim.costs.device_profiles import find_profile
from kvsim.costs.devices import recorded_device
from kvsim.costs.profile import Profile, load_profile, same_model
from kvsim.costs.shipped import is_shipped
from kvsim.engines.recorded.ranking import Ranking, rankings
from kvsim.engines.recorded.reading import UntimedError, read_recording
from kvsim.engines.recorded.replay import replay
from kvsim.engines.recorded.server import RecordedServer
from kvsim.engines.recorded.spread import Spread, Statistics, spread_of
from kvsim.engines.recorded.stepped import Fitted, predict, profile_for
from kvsim.engines.recorded.steps import SteppedServer
from kvsim.errors import UserError
from kvsim.model.recorded_names import recorded_model
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Progress, Recorder
from kvsim.simulation.result import Result
from kvsim.simulation.run import build_policy, drive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

MEASURES = ("ttft_s", "tpot_s", "e2e_s")
"""Latencies that are compared. ``tpot_s``: seconds per token after the first."""
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Statistics of each latency; quantiles are interpolated."""
BOUNDED = ("mean", "p50", "p99")
"""Statistics that a bound is on."""
RATES = ("output_tokens_per_s", "requests_per_s")
LOADS = ("running", "waiting")
WITHIN = {"p50": 0.05, "p99": 0.10}
"""Bounds of errors, where each step of a server is known."""

_UNQUEUED_SHARE, _UNQUEUED_LEAST = 4, 10
"""What of a client's times is not the engine's is fitted to a quarter of the requests, and no fewer than 10."""


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
    pace: tuple[float, float] | None = None
    """Lowest and highest pace of the machine during the run; None if it is not known."""
    spread: Spread | None = None
    """How much the server's times differ from run to run; None if no requests were sent twice."""
    fitted_to: str | None = None
    """What the profile is fitted to, in words; None for one that was given or found."""

    @property
    def name(self) -> str:
        """The name of the recording."""
        return self.recording.name

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
        for load in LOADS if len(self.load) else ():
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
            "model": self.scenario.model.name,
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
        """Draw a row for each run: distributions of the latencies, and running and waiting requests over time."""
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

    ``files``: recordings of vLLM. ``profile``: the costs, as such or by name or file; by default, for each recording,
    that of its model on its device. ``announce`` is called with the name of a recording and its number of requests
    before it is simulated. Raises ``UserError`` and ``WorkloadError``.
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
    failed = int((found.result.requests["status"] != "completed").sum()) - (
        recording.workload.n_requests - len(recording.requests)
    )
    return ServerRun(
        recording,
        recording.scenario,
        fitted.profile,
        _bounded(_errors(found.requests, recording, found.result, 0.0), found.requests, spread, verdict=found.in_range),
        found.requests,
        _load(recording, found.result),
        None,
        found.result.summary["preemptions"],
        recording.assumed,
        (
            *recording.notes,
            *((f"{recording.name}: {failed} more requests failed in the simulation",) if failed > 0 else ()),
            *(f"{recording.name}: {line}" for line in found.warnings),
        ),
        steps=found.steps,
        pace=found.pace,
        spread=spread,
        fitted_to=fitted.to,
    )


def _bounded(table: pd.DataFrame, requests: pd.DataFrame, spread: Spread | None, *, verdict: bool) -> pd.DataFrame:
    """The table of errors with the columns unpaced, spread and, for a ``verdict``, within."""
    unpaced, spreads, within = [], [], []
    for row in table.to_dict("records"):
        measure, statistic = row["measure"], row["statistic"]
        known = None if spread is None else spread.of.get((measure, statistic))
        spreads.append(np.nan if known is None else known)
        if measure in MEASURES:
            q, values = STATISTICS[statistic], requests[f"unpaced_{measure}"].dropna()
            unpaced.append(float(values.mean() if q is None else values.quantile(q)) / row["measured"] - 1)
        else:
            unpaced.append(np.nan)
        bounded = verdict and measure in MEASURES and statistic in WITHIN
        within.append(bool(abs(row["error"]) <= max(WITHIN[statistic], known or 0.0)) if bounded else None)
    return table.assign(unfitted=np.nan, unpaced=unpaced, spread=spreads, within=pd.Series(within, dtype=object))


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
    requests = _side_by_side(recording, result)
    network = None
    if recording.meta.clock == "client":
        network = _network_s(requests)
        for measure in ("ttft_s", "e2e_s"):
            requests[f"predicted_{measure}"] += network
    failed = result.summary["failed"]
    return ServerRun(
        recording,
        scenario,
        profile,
        _errors(requests, recording, result, network or 0.0),
        requests.drop(columns="waited_s"),
        _load(recording, result),
        network,
        result.summary["preemptions"],
        made.assumed,
        (
            *recording.notes,
            *((f"{recording.name}: {failed} of {len(requests)} requests failed in the simulation",) if failed else ()),
            *(f"{recording.name}: {line}" for line in costs.warnings()),
        ),
    )


def _side_by_side(recording: RecordedServer, result: Result) -> pd.DataFrame:
    """``ServerRun.requests``, and ``waited_s``: how long each request waited in the simulation."""
    measured = pd.DataFrame(
        [(r.id, r.asked.arrival_s, r.first_token_s, r.last_token_s, r.asked.output_tokens) for r in recording.requests],
        columns=["id", "arrival_s", "first_s", "last_s", "tokens"],
    )
    table = measured[["id", "arrival_s"]].copy()
    ours = result.requests
    arrival = ours["arrival_s"].to_numpy()
    if recording.meta.clock == "engine":
        arrival = _taken_in(arrival, result.passes)
    done = ours["status"] == "completed"
    sides = {
        "measured": (table["arrival_s"], measured["first_s"], measured["last_s"], measured["tokens"]),
        "predicted": (
            pd.Series(arrival),
            ours["first_token_s"].where(done),
            ours["finished_s"].where(done),
            ours["output_tokens"],
        ),
    }
    for side, (arrived, first, last, tokens) in sides.items():
        several = tokens > 1
        table[f"{side}_ttft_s"] = first - arrived
        table[f"{side}_tpot_s"] = (last - first).where(several) / (tokens - 1).where(several)
        table[f"{side}_e2e_s"] = last - arrived
    return table.assign(waited_s=ours["started_s"] - arrival)


def _taken_in(arrival: FloatArray, passes: pd.DataFrame) -> FloatArray:
    """When the engine takes each request in: it looks for new ones when a step ends, or at once if none runs.

    vLLM notes the arrival of a request then (``Scheduler.add_request``).
    """
    start = passes["start_s"].to_numpy()
    end = start + passes["seconds"].to_numpy()
    before = np.searchsorted(start, arrival, side="left") - 1
    return np.where(before >= 0, np.maximum(arrival, end[before]), arrival)


def _network_s(requests: pd.DataFrame) -> float:
    """The seconds of a client's TTFT that are not the engine's: the network's and the front end's, at least 0.

    The median of what was measured beyond the prediction, over the quarter of the requests that waited least in the
    simulation: an error in how long requests wait is not to be taken for the network.
    """
    beyond = (requests["measured_ttft_s"] - requests["predicted_ttft_s"]).dropna()
    most = max(len(beyond) // _UNQUEUED_SHARE, _UNQUEUED_LEAST)
    least_waited = requests.loc[beyond.index, "waited_s"].sort_values(kind="stable").index[:most]
    return max(0.0, float(beyond[least_waited].median())) if len(beyond) else 0.0


def _errors(requests: pd.DataFrame, recording: RecordedServer, result: Result, network_s: float) -> pd.DataFrame:
    """``ServerRun.table``."""
    rows: list[tuple[str, str, float, float, float]] = []
    for measure in MEASURES:
        fitted = 0.0 if measure == "tpot_s" else network_s
        measured, predicted = (requests[f"{side}_{measure}"].dropna() for side in ("measured", "predicted"))
        for statistic, q in STATISTICS.items():
            pair = [float(values.mean() if q is None else values.quantile(q)) for values in (measured, predicted)]
            rows.append((measure, statistic, pair[0], pair[1], pair[1] - fitted))
    tokens = sum(request.asked.output_tokens for request in recording.requests)
    last_s = max(request.last_token_s for request in recording.requests)
    done, seconds = result.summary["completed"], result.summary["makespan_s"] + network_s
    predicted_rates = (result.summary["output_tokens"] / seconds, done / seconds) if seconds else (0.0, 0.0)
    for rate, count, ours in zip(RATES, (tokens, len(recording.requests)), predicted_rates, strict=True):
        rows.append((rate, "mean", count / last_s if last_s else float("nan"), ours, ours))
    table = pd.DataFrame(rows, columns=["measure", "statistic", "measured", "predicted", "unfitted"])
    table["error"] = table["predicted"] / table["measured"] - 1
    table["unfitted"] = table["unfitted"] / table["measured"] - 1
    # Nothing against nothing agrees; something against nothing has no relative error.
    table.loc[(table["predicted"] == 0) & (table["measured"] == 0), ["error", "unfitted"]] = 0.0
    table = table.replace([np.inf, -np.inf], np.nan)
    table["unpaced"], table["spread"], table["within"] = np.nan, np.nan, None
    columns = ["measure", "statistic", "measured", "predicted", "error", "unfitted", "unpaced", "spread", "within"]
    return table[columns]


def _load(recording: RecordedServer, result: Result) -> pd.DataFrame:
    """``ServerRun.load``: the simulated server at the times at which the recorded one was looked at."""
    at = np.array([second.t for second in recording.seconds], dtype=np.float64)
    start = result.passes["start_s"].to_numpy()
    end = start + result.passes["seconds"].to_numpy()
    current = np.searchsorted(start, at, side="right") - 1
    running = np.where((current >= 0) & (at < end[current]), result.passes["chunks"].to_numpy()[current], 0)
    arrived, ended = (
        np.searchsorted(np.sort(result.requests[column].to_numpy()), at, side="right")
        for column in ("arrival_s", "finished_s")
    )
    return pd.DataFrame(
        {
            "t": at,
            "measured_running": [second.running for second in recording.seconds],
            "predicted_running": running,
            "measured_waiting": [second.waiting for second in recording.seconds],
            "predicted_waiting": np.maximum(arrived - ended - running, 0),
        }
    )
