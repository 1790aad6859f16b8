"""``kvsim validate --url``: send traffic to a running server, and hold what it took against what was predicted."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from kvsim.advice.recommend.slo import SHARES, Slo
from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Profile
from kvsim.engines.live.address import Address
from kvsim.engines.live.held import Held, pace_of, statistics_of
from kvsim.engines.live.listening import server_process
from kvsim.engines.live.processor_share import ProcessorShare, ProcessorWatch
from kvsim.engines.live.recorded_meta import Asking
from kvsim.engines.live.served import served
from kvsim.engines.live.server_recording import LiveRecording, record_server
from kvsim.engines.live.settings import ask_settings
from kvsim.engines.recordings.prediction import simulate
from kvsim.engines.recordings.recorded_profile import is_of
from kvsim.engines.recordings.recording_files import read_lines
from kvsim.engines.recordings.steps import SteppedServer
from kvsim.engines.recordings.validation import RecordedValidation, ServerRun, validate_recorded
from kvsim.errors import UserError, counted
from kvsim.experiments.measures import LATENCIES
from kvsim.model.durations import about
from kvsim.model.recorded_names import model_of_file
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.request_log import Progress
from kvsim.simulation.set_up import cost_model


@dataclass(frozen=True)
class ServerHeld:
    """One server: what was predicted before beside what it took in all of its turns together."""

    url: str
    runs: tuple[ServerRun, ...]
    """One for each turn."""
    held: Held

    @property
    def requests(self) -> int:
        """Requests that were answered, of all turns."""
        return sum(len(run.requests) for run in self.runs)

    @property
    def engine(self) -> str:
        """Engine and version."""
        meta = self.runs[0].recording.meta
        return f"{meta.engine} {meta.version}"

    @property
    def settings(self) -> str:
        """What it was started with, in words."""
        recording = self.runs[0].recording
        return recording.settings if isinstance(recording, SteppedServer) else "its settings"

    @property
    def profile(self) -> str:
        """The name of the profile that predicted it."""
        return self.runs[0].profile.name

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {"url": self.url, "turns": len(self.runs), "requests": self.requests, **self.held.to_dict()}


@dataclass(frozen=True)
class LiveValidation:
    """What servers took, beside what was predicted."""

    recordings: tuple[LiveRecording, ...]
    """One for each server and turn."""
    servers: tuple[ServerHeld, ...]
    compared: RecordedValidation
    """Each turn, also at the pace of the machine at the time."""

    @property
    def worst(self) -> float:
        """Largest size of an error of a latency at mean, P50, P95 or P99, predicted before; NaN if there is none."""
        return max((server.held.worst for server in self.servers), key=lambda error: (error != error, error))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must know of the runs, one line each."""
        found = [line for each in self.recordings for line in each.warnings]
        for each in self.recordings:
            if each.failed:
                found.append(f"{each.path.name}: {counted(each.failed, 'request')} failed; {each.first_failure}")
        return tuple(dict.fromkeys([*found, *(line for run in self.compared.runs for line in run.warnings)]))

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "servers": [each.to_dict() for each in self.servers],
            "recordings": [each.to_dict() for each in self.recordings],
            **self.compared.to_dict(),
        }


@dataclass
class _Turns:
    """One server's turns, as they are recorded."""

    server: Asking
    process: int | None
    paths: list[Path] = field(default_factory=list)
    shares: list[ProcessorShare] = field(default_factory=list)

    def record(
        self, scenario: Scenario, folder: Path, turn: int, texts: int, share: Callable[[float], None] | None
    ) -> LiveRecording | None:
        """Send the traffic once, with texts of this number; None where an earlier command has recorded this turn.

        Raises ``UserError`` or ``KeyboardInterrupt`` if it ends early.
        """
        server = self.server
        path = folder / f"{_name(scenario, server.address)}.turn{turn}.jsonl.gz"
        self.paths.append(path)
        begun = path.with_name(path.name + ".part").exists()
        if server.resume and path.exists() and not begun:
            _check(path, scenario)
            return None
        watch = ProcessorWatch(self.process)
        recorded = record_server(
            scenario, path, replace(server, texts=texts, resume=server.resume and begun), progress=share
        )
        self.shares.append(watch.share())
        if recorded.interrupted:
            raise KeyboardInterrupt
        if recorded.stopped is not None:
            kept = f"{recorded.ended:,} of {counted(recorded.requests, 'request')} are in {path}"
            raise UserError(f"{recorded.stopped}; {kept}; the same command with --resume goes on")
        return recorded


def validate_servers(
    scenario: Scenario,
    servers: Sequence[Asking],
    profile: Profile | str,
    folder: str | Path,
    *,
    turns: int = 2,
    slo: Slo | None = None,
    told: Callable[[str], object] = lambda line: None,
    announce: Callable[[str, int], object] = lambda name, total: None,
    share: Callable[[float], None] | None = None,
    progress: Progress | None = None,
) -> LiveValidation:
    """Send a scenario's traffic to each server, turn by turn, and compare.

    Every turn asks every server the same, but for the words, so that a slow moment of the machine affects all of them,
    and two turns tell how much a server itself strays. The recordings are kept in the folder; with ``Asking.resume``,
    those that are there are taken, and one that ended early goes on. ``told`` hears how long it will
    take, ``announce`` the name of what begins and what it amounts to; ``share``, how much of all recordings is
    done. Raises ``UserError``, with what was gathered kept.
    """
    target = writable(folder)
    given = load_profile(profile) if isinstance(profile, str) else profile
    lasts_s = [_check_profile(scenario, server, given) for server in servers]
    _check_folder(target, scenario, servers)
    each = f", {turns} times" if turns > 1 else ""
    asked = counted(scenario.build_workload().n_requests, "request")
    told(f"sending {asked} to {counted(len(servers), 'server')}{each}: {about(turns * sum(lasts_s))}, by the profile")
    # Texts that no earlier command has sent either.
    first_texts = secrets.randbelow(1 << 40) + 1
    done: list[LiveRecording] = []
    of_servers = [_Turns(server, server_process(server.address)) for server in servers]
    for turn in range(1, turns + 1):
        for at, of_server in enumerate(of_servers):
            announce(f"turn {turn} of {turns}: {of_server.server.address}", 100)
            before = (turn - 1) * len(servers) + at
            part = _part_of(share, before, turns * len(servers))
            # Texts of its own, or a turn would find those of the one before in the server's cache.
            recorded = of_server.record(scenario, target, turn, first_texts + turn, part)
            done += [] if recorded is None else [recorded]
    paths = [path for of_server in of_servers for path in of_server.paths]
    compared = validate_recorded(paths, profile, announce=announce, progress=progress)
    runs = [[run for run in compared.runs if run.recording.path in each.paths] for each in of_servers]
    held = (held_in(own, each.shares, slo) for own, each in zip(runs, of_servers, strict=True))
    named = zip(servers, runs, held, strict=True)
    return LiveValidation(
        tuple(done), tuple(ServerHeld(each.address.url, tuple(own), found) for each, own, found in named), compared
    )


def _part_of(share: Callable[[float], None] | None, before: int, parts: int) -> Callable[[float], None] | None:
    """Tells ``share`` how much of all parts is done, by how much of the one after ``before`` others is."""
    return None if share is None else lambda done: share((before + done) / parts)


def held_in(runs: Sequence[ServerRun], shares: Sequence[ProcessorShare], slo: Slo | None) -> Held:
    """What was predicted of a server before, beside what it took in all turns together.

    ``shares``: what it had of the processors in each turn, where that is known.
    """
    predicted, measured, at_pace = (
        _measures(runs, *sides) for sides in (("unpaced", "predicted"), ("measured",), ("predicted",))
    )
    slowdowns = [run.slowdown for run in runs if run.slowdown is not None]
    pace = pace_of(sum(slowdowns) / len(slowdowns) if slowdowns else None, predicted, measured)
    spread = {
        f"{measure.removesuffix('_s')}_{statistic}": largest
        for run in runs
        if run.spread is not None
        for (measure, statistic), largest in run.spread.of.items()
    }
    busiest = max(shares, key=lambda share: share.waited or 0.0, default=None)
    return Held(predicted, measured, at_pace, pace, busiest, () if slo is None else slo.bounds, spread)


def _measures(runs: Sequence[ServerRun], *sides: str) -> dict[str, float | None]:
    """Latencies and shares of all runs together; of the first of the sides that each has."""
    values: dict[str, list[float | None]] = {latency: [] for latency in LATENCIES}
    asked = failed = truncated = 0
    for run in runs:
        side = next(side for side in sides if f"{side}_ttft_s" in run.requests)
        for latency, found in values.items():
            found += run.requests[f"{side}_{latency}_s"].tolist()
        counts = _counts(run) if side == "measured" else _predicted_counts(run)
        asked, failed, truncated = (a + b for a, b in zip((asked, failed, truncated), counts, strict=True))
    shares = {"failed": failed, "truncated": truncated}
    return statistics_of(values) | {SHARES[name]: count / asked if asked else None for name, count in shares.items()}


def _predicted_counts(run: ServerRun) -> tuple[int, int, int]:
    summary = run.result.summary
    return summary["requests"], summary["failed"], summary["truncated"]


def _counts(run: ServerRun) -> tuple[int, int, int]:
    """Requests that were sent, that got no answer, and whose answer was cut short."""
    recording = run.recording
    assert isinstance(recording, SteppedServer)
    wanted = {str(request.id): request.output_tokens for request in recording.workload}
    cut = sum(request.asked.output_tokens < wanted[request.id] for request in recording.requests)
    return len(wanted), len(wanted) - len(recording.requests), cut


def _check_profile(scenario: Scenario, server: Asking, profile: Profile) -> float:
    """Seconds in which a server will answer the scenario's requests, by the profile.

    Where it is not known here what it serves, until the last of them is sent. Raises ``UserError`` if the profile is of
    another model than the server has, before anything is sent.
    """
    settings = ask_settings(server.address, key=server.key)
    title = settings.model_file or settings.model or ""
    known = model_of_file(PurePath(title).name)
    # Of others it is known when they have been recorded.
    if (known is not None or title.endswith(".gguf")) and not is_of(profile, title, known):
        raise UserError(f"{server.address}: serves {title}, and profile {profile.name} is of {profile.model}")
    workload = scenario.build_workload()
    try:
        ours = served(server.address, settings, None, shlex.join(server.flags or ())).scenario
        lasts_s: float = simulate(ours, cost_model(ours, profile), workload).summary["makespan_s"]
    except UserError:
        lasts_s = max((request.arrival_s for request in workload), default=0.0)
    return lasts_s


def _check_folder(target: Path, scenario: Scenario, servers: Sequence[Asking]) -> None:
    """Raises ``UserError`` if recordings of an earlier command would be overwritten."""
    for server in servers:
        there = sorted(target.glob(f"{_name(scenario, server.address)}.turn*.jsonl.gz"))
        if there and not server.resume:
            raise UserError(f"{there[0]}: is there already; --resume takes it, or name another folder by --out")


def _check(path: Path, scenario: Scenario) -> None:
    """Raises ``UserError`` unless a recording that is there is of as many requests, with the same seed."""
    _, meta = next(read_lines(path), (0, {}))
    there, wanted = (meta.get("requests"), meta.get("seed")), (scenario.build_workload().n_requests, scenario.seed)
    if there != wanted:
        raise UserError(
            f"{path}: has {there[0]} requests with seed {there[1]}; asked for are {wanted[0]} with seed {wanted[1]}; "
            "without --resume it is recorded anew"
        )


def _name(scenario: Scenario, address: Address) -> str:
    """The beginning of a file's name."""
    return re.sub(r"[^\w.-]+", "-", f"{scenario.name}.{address.url.split('//')[-1]}")
