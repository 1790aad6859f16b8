"""``kvsim calibrate --url``: measure a server that runs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvsim.cli.calibration_files import CalibrationFiles, ServerAsked
from kvsim.cli.console import console, fail, print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServersAsked, key_of
from kvsim.errors import UserError
from kvsim.model.memory_shapes import shape_name
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.costs.profile import Profile
    from kvsim.engines.live.calibration import LiveServer, ServerCalibration


def calibrate_url(
    asked: ServerAsked, seconds: float, out: Path | None, bound: float | None, *, force: bool, as_json: bool
) -> None:
    """Measure a server and save its profile, or say why not."""
    from kvsim.calibration.run import HELD_OUT_BOUND
    from kvsim.cli.tables.calibration import show_server_calibration
    from kvsim.engines.live.calibration import find_server

    server = find_server(
        asked.url,
        model=asked.model,
        flags=asked.flags,
        key=key_of(asked.key_env),
        allow_remote=asked.allow_remote,
    )
    target = out or Path(f"{file_name(server)}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)
    use = f"kvsim recommend --trace TRACE --slo 'ttft_p95<1s' --profile {target}"
    if force and (taken := files.take_refused(partial(is_of, server))) is not None:
        _tell(taken, as_json, f"Saved {target}, as it was measured before. Use it with: {use}")
        return
    if not as_json:
        typer.echo(f"{server.engine} at {server.address}, {server.model}; assumed:")
        for line in server.served.assumed or ("nothing",):
            typer.echo(f"  {line}")
    done = _measured(files, server, seconds)
    warn(done.warnings)
    refusal = None if force else done.refusal(HELD_OUT_BOUND if bound is None else bound)
    if refusal is not None:
        files.save_refused(done, refusal)
        raise typer.Exit(fail(f"not saved as {target}: {refusal}. {files.ways_on}", 1))
    files.save(done)
    if not as_json:
        show_server_calibration(console(), done)
    _tell(done.profile, as_json, f"\nSaved {target} and {files.picture.name}. Use it with: {use}")


def profile_for(asked: ServersAsked, seconds: float, progress: RunProgress) -> Profile:
    """The profile of the first server, as ``calibrate --url`` saved it here, or measured now. Raises ``UserError``."""
    from kvsim.engines.live.calibration import calibrate_server, find_server

    server = find_server(
        asked.url[0],
        model=asked.model,
        flags=asked.flags[0] if asked.flags else "",
        key=key_of(asked.key_env),
        allow_remote=asked.allow_remote,
    )
    saved = _saved_here(server)
    if saved is not None:
        return saved
    progress.begin(f"measuring {server.address}", 100)
    done = calibrate_server(server, seconds=seconds, report=progress.share)
    return done.profile.model_copy(update={"refused": done.refusal()})


def _saved_here(server: LiveServer) -> Profile | None:
    """The latest profile of a server among the files ``*.profile.json`` of this folder; None if there is none."""
    from kvsim.costs.profile import load_profile

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


def _measured(files: CalibrationFiles, server: LiveServer, seconds: float) -> ServerCalibration:
    """Measure, with progress; an interrupt ends the command."""
    from kvsim.engines.live.calibration import calibrate_server

    def kept() -> str:
        return f"; called again, it goes on from what is in {files.journal}" if files.journal.exists() else ""

    try:
        with RunProgress(f"measuring {server.address}", 100) as progress:
            return calibrate_server(
                server, seconds=seconds, name=files.name, report=progress.share, journal=files.journal
            )
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"stopped{kept()}", 130)) from None
    except UserError as e:
        raise UserError(f"{e}{kept()}") from None


def _tell(profile: Profile, as_json: bool, saved: str) -> None:
    if as_json:
        print_json(profile.model_dump(mode="json"))
    else:
        typer.echo(saved)
