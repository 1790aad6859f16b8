"""``kvsim validate --url``: send traffic to a running server, and hold what it took against what was predicted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from kvsim.costs.load_profile import load_profile
from kvsim.costs.profile import Profile
from kvsim.engines.live.address import Address
from kvsim.engines.live.recorded_meta import Asking
from kvsim.engines.live.server_recording import LiveRecording, record_server
from kvsim.engines.live.settings import ask_settings
from kvsim.engines.recordings.recorded_profile import is_of
from kvsim.engines.recordings.recording_files import read_lines
from kvsim.engines.recordings.server_flags import model_of_file
from kvsim.engines.recordings.validation import RecordedValidation, validate_recorded
from kvsim.errors import UserError, counted
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.request_log import Progress


@dataclass(frozen=True)
class LiveValidation:
    """What servers took, beside what was predicted."""

    recordings: tuple[LiveRecording, ...]
    """One for each server and turn."""
    compared: RecordedValidation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must know of the runs, one line each."""
        found = [line for each in self.recordings for line in each.warnings]
        for each in self.recordings:
            if each.failed:
                found.append(f"{each.path.name}: {counted(each.failed, 'request')} failed; {each.first_failure}")
        return tuple(dict.fromkeys([*found, *(line for run in self.compared.runs for line in run.warnings)]))


def validate_servers(
    scenario: Scenario,
    servers: Sequence[Asking],
    profile: Profile | str | None,
    folder: str | Path,
    *,
    turns: int = 2,
    announce: Callable[[str, int], object] = lambda name, total: None,
    share: Callable[[float], None] | None = None,
    progress: Progress | None = None,
) -> LiveValidation:
    """Send a scenario's traffic to each server, turn by turn, and compare.

    Every turn asks every server the same, but for the words, so that a slow moment of the machine affects all of them,
    and two turns tell how much a server itself strays. The recordings are kept in the folder; with ``Asking.resume``,
    those that are there are taken, and one that ended early goes on. ``announce`` is told the name of what begins and
    what it amounts to; ``share``, how much of a recording is done. Raises ``UserError``, with what was gathered kept.
    """
    target = writable(folder)
    _check_profile(profile, servers)
    _check_folder(target, scenario, servers)
    # Texts that no earlier command has sent either.
    first_texts = secrets.randbelow(1 << 40) + 1
    done: list[LiveRecording] = []
    paths: list[Path] = []
    for turn in range(1, turns + 1):
        for server in servers:
            path = target / f"{_name(scenario, server.address)}.turn{turn}.jsonl.gz"
            paths.append(path)
            part = path.with_name(path.name + ".part")
            if server.resume and path.exists() and not part.exists():
                _check(path, scenario)
                continue
            announce(f"turn {turn} of {turns}: {server.address}", 100)
            # Texts of its own, or a turn would find those of the one before in the server's cache.
            asking = replace(server, texts=first_texts + turn, resume=server.resume and part.exists())
            recorded = record_server(scenario, path, asking, progress=share)
            done.append(recorded)
            if recorded.interrupted:
                raise KeyboardInterrupt
            if recorded.stopped is not None:
                kept = f"{recorded.ended:,} of {counted(recorded.requests, 'request')} are in {path}"
                raise UserError(f"{recorded.stopped}; {kept}; the same command with --resume goes on")
    compared = validate_recorded(paths, profile, announce=announce, progress=progress)
    return LiveValidation(tuple(done), compared)


def _check_profile(profile: Profile | str | None, servers: Sequence[Asking]) -> None:
    """Raises ``UserError`` if a profile is of another model than a server has, before anything is sent."""
    if profile is None:
        return
    given = load_profile(profile) if isinstance(profile, str) else profile
    for server in servers:
        settings = ask_settings(server.address, key=server.key)
        title = settings.model_file or settings.model or ""
        known = model_of_file(PurePath(title).name)
        # Of others it is known when they have been recorded.
        if (known is not None or title.endswith(".gguf")) and not is_of(given, title, known):
            raise UserError(f"{server.address}: serves {title}, and profile {given.name} is of {given.model}")


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
