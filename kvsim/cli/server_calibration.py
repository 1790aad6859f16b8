"""``kvsim calibrate --url``: measure a server that runs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvsim.cli.calibration_files import CalibrationFiles, Measuring
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked
from kvsim.errors import UserError
from kvsim.model.memory_shapes import shape_name
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.costs.profile import Profile
    from kvsim.engines.live.calibration import ServerCalibration
    from kvsim.engines.live.served import LiveServer


def calibrate_url(
    asked: ServerAsked, seconds: float, out: Path | None, bound: float | None, *, force: bool, as_json: bool
) -> None:
    """Measure a server and save its profile, or say why not."""
    server = asked.found()
    from kvsim.engines.live.calibration import calibrate_server

    target = out or Path(f"{file_name(server)}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)

    def measure(progress: RunProgress) -> ServerCalibration:
        return calibrate_server(server, seconds=seconds, name=files.name, report=progress.share, journal=files.journal)

    if not as_json:
        typer.echo(f"{server.engine} at {server.address}, {server.model}; assumed:")
        for line in server.served.assumed or ("nothing",):
            typer.echo(f"  {line}")
    use = f"kvsim recommend --trace TRACE --slo 'ttft_p95<1s' --profile {target}"
    measuring = Measuring(files, str(server.address), measure, partial(is_of, server), use)
    measuring.run(bound, force=force, as_json=as_json)


def profile_for(asked: ServerAsked, seconds: float, progress: RunProgress) -> Profile:
    """The profile of a server, as ``calibrate --url`` saved it here, or measured now. Raises ``UserError``."""
    server = asked.found()
    saved = _saved_here(server)
    if saved is not None:
        return saved
    from kvsim.engines.live.calibration import calibrate_server

    progress.begin(f"measuring {server.address}", 100)
    done = calibrate_server(server, seconds=seconds, report=progress.share)
    return done.profile.model_copy(update={"refused": done.refusal()})


def _saved_here(server: LiveServer) -> Profile | None:
    """The latest profile of a server among the files ``*.profile.json`` of this folder; None if there is none."""
    from kvsim.costs.load_profile import load_profile

    for path in sorted(Path().glob("*.profile.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            found = load_profile(str(path))
        except UserError:
            continue  # Another kind of file.
        if is_of(server, found):
            return found
    return None


def file_name(server: LiveServer) -> str:
    """A name for the file of a server's profile, such as ``smollm2.llama-server``."""
    return re.sub(r"[^\w.+-]", "_", f"{shape_name(server.model)}.{server.engine.split()[0]}")


def is_of(server: LiveServer, found: Profile) -> bool:
    """Whether a profile is of this server."""
    cache = server.served.scenario.cache
    wanted = (server.engine, server.model, cache.type_k, cache.type_v)
    return wanted == (found.engine, found.model, found.type_k, found.type_v)
