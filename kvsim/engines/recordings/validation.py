"""Read recorded servers, in whichever of the known forms, and compare their times with those predicted for the same
requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ValidationError

from kvsim.costs.profile import Profile
from kvsim.engines.recordings.error_tables import BOUNDED, error_table, load_table, with_bounds
from kvsim.engines.recordings.from_llama_server import read_llama_server
from kvsim.engines.recordings.from_vllm import read_vllm
from kvsim.engines.recordings.latencies import MEASURES
from kvsim.engines.recordings.prediction import Prediction, predict
from kvsim.engines.recordings.recorded_profile import ChosenProfile, given_profile, profile_for
from kvsim.engines.recordings.recorded_server import RecordedServer, read_recorded_server
from kvsim.engines.recordings.recording_files import NOT_A_RECORD, read_lines
from kvsim.engines.recordings.settings_ranking import Ranking, rankings
from kvsim.engines.recordings.spread import Spread, spread_of
from kvsim.engines.recordings.steps import LONGEST_S, SteppedServer
from kvsim.errors import UserError
from kvsim.results import writable
from kvsim.simulation.request_log import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class ServerRun(Prediction):
    """One recorded server, predicted beside measured; times in seconds."""

    recording: RecordedServer
    profile: Profile
    fitted_to: str | None
    """What the profile is fitted to, in words; None for one that was given or found."""
    table: pd.DataFrame
    """Columns measure, statistic, measured, predicted, error (relative: predicted / measured - 1), unfitted: the error
    of predictions without ``network_s``, unpaced: that of predictions at the profile's own pace, spread: how much the
    same statistic differs between runs of the server with the same requests, and within: whether the error is in its
    bound, or in the spread where that is wider. NaN and None where there is none."""
    load: pd.DataFrame
    """One row for each second that was recorded: t, and each of running and waiting as ``measured_*`` and
    ``predicted_*``."""
    spread: Spread | None
    """How much the server's times differ from run to run; None if no requests were sent twice."""

    @property
    def name(self) -> str:
        """The name of the recording."""
        return self.recording.name

    @property
    def preemptions(self) -> int:
        """Preemptions of the simulated run."""
        return int(self.result.summary["preemptions"])

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
    """Predicted and measured times of recorded servers."""

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
    or by name or file; else see ``recorded_profile.profile_for``. ``announce`` is called with the name of a recording
    and its number of requests before it is simulated. Raises ``UserError`` and ``WorkloadError``.
    """
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise UserError("no recording was given")
    given = given_profile(profile)
    # All files are read before anything is simulated, so that a fault in the last one does not cost a run of the first.
    recordings, untimed = _read_all(paths)
    stepped = [each for each in recordings if isinstance(each, SteppedServer)]
    chosen = [profile_for(each, given, stepped) for each in recordings]
    runs = []
    for recording, one in zip(recordings, chosen, strict=True):
        announce(recording.name, len(recording.requests))
        runs.append(_run(recording, one, stepped, progress))
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


def _run(
    recording: RecordedServer, chosen: ChosenProfile, others: Sequence[SteppedServer], progress: Progress | None
) -> ServerRun:
    """Simulate one recording and compare."""
    found = predict(recording, chosen.profile, chosen.name, progress)
    spread = spread_of(recording, others) if isinstance(recording, SteppedServer) else None
    table = error_table(
        found.requests, recording, found.result, found.around_s, fitted=not isinstance(recording, SteppedServer)
    )
    return ServerRun(
        **vars(found),
        recording=recording,
        profile=chosen.profile,
        fitted_to=chosen.fitted_to,
        table=with_bounds(table, spread, verdict=found.in_range),
        load=load_table(recording, found.result),
        spread=spread,
    )


def read_recording(path: str | Path) -> RecordedServer:
    """Read a recording of requests alone, of llama-server or of vLLM with its steps.

    Raises ``UserError`` and ``WorkloadError``, one line.
    """
    path = Path(path)
    try:
        _, header = next(read_lines(path), (0, {}))
    except UserError:
        return read_recorded_server(path)  # Which reads other compressions too, and says what is wrong.
    if header.get("type") != "meta":
        return read_recorded_server(path)
    if header.get("timed") is False:
        raise UntimedError(f"{path}: its times mean nothing (timed is false); kvsim conform compares its decisions")
    try:
        is_vllm = isinstance(header.get("engine"), dict)
        records = [record for _, record in read_lines(path)][1:]
        found = (read_vllm if is_vllm else read_llama_server)(path, header, records)
    except UserError as e:
        said = str(e).partition("\n")[0]  # A scenario names all of its faults.
        raise UserError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    except ValidationError as e:
        fault = e.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError(f"{path}: not a recording of vLLM or llama-server ({where}: {fault['msg']})") from None
    except NOT_A_RECORD as e:
        said = str(e).partition("\n")[0]
        raise UserError(f"{path}: not a recording of vLLM or llama-server ({type(e).__name__}: {said})") from None
    _check(found)
    return found


def _check(recording: SteppedServer) -> None:
    """Raise ``UserError`` for what cannot have been measured."""
    path = recording.path
    if not recording.requests:
        raise UserError(f"{path}: no request was answered, so there is nothing to compare")
    numbers = [request.id for request in recording.workload]
    if len(set(numbers)) < len(numbers):
        twice = next(number for at, number in enumerate(numbers) if number in numbers[:at])
        raise UserError(f"{path}: a second request {twice}")
    for request in recording.requests:
        times = (0.0, request.asked.arrival_s, request.first_token_s, request.last_token_s, LONGEST_S)
        if not all(a <= b for a, b in pairwise(times)):
            raise UserError(f"{path}: request {request.id}: sent, first and last token at {times[1:4]} s: not in order")
    for step in recording.steps:
        if not (0 < step.seconds <= LONGEST_S and 0 <= step.start_s <= LONGEST_S):
            raise UserError(f"{path}: a step at {step.start_s} s takes {step.seconds} s; more than 0 is expected")


class UntimedError(UserError):
    """A recording says of itself that its times mean nothing."""
