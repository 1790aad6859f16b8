"""``kvsim calibrate --url``: measure a server that runs."""

from __future__ import annotations

import re
import time
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
    from kvsim.engines.live.load_measurement import LoadMeasurement
    from kvsim.engines.live.served import LiveServer


_OVER = 0.1
"""Share of the time by which it may be over when all is done; what is not drawn by then is left out."""
_STARTING_S = 10.0
"""A process that is older was not started for this command."""


def calibrate_url(
    asked: ServerAsked, seconds: float, out: Path | None, bound: float | None, *, force: bool, as_json: bool
) -> None:
    """Measure a server and save its profile, or say why not; all of it, the loading of what it takes included, ends
    when ``seconds`` are over, or a tenth of them later.
    """
    from kvsim import machine

    now = time.monotonic()
    age_s = machine.process_age_s()
    began = now - age_s if age_s < _STARTING_S else now
    server = asked.found(seconds + began - now)
    from kvsim.engines.live.bounded import Deadline
    from kvsim.engines.live.measuring import measure_server

    # On this machine, as busy as it is, what the fit takes is loaded in about as long as all this, and drawing takes
    # twice as long.
    loading_s = time.monotonic() - now
    target = out or Path(f"{file_name(server)}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)
    deadline = Deadline(seconds - min(2 * loading_s, _OVER * seconds), began)

    def is_known(measurement: LoadMeasurement) -> bool:
        from kvsim.engines.live.calibration import is_known

        return is_known(measurement)

    def measure(progress: RunProgress) -> ServerCalibration:
        measurement = measure_server(
            server,
            deadline,
            is_known,
            report=progress.share,
            notice=progress.say,
            journal=files.journal,
            fit_s=min(loading_s, seconds / 3),
        )
        from kvsim.engines.live.calibration import calibration_of

        done = calibration_of(measurement, files.name)
        files.draws = 2 * loading_s <= Deadline((1 + _OVER) * seconds, began).left_s
        return done

    if not as_json:
        known = "" if server.settings.started is None else f"{server.settings.started}; "
        typer.echo(f"{server.engine} at {server.address}, {server.model}; {known}assumed:")
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
    """Whether a profile is of this server, by whatever name it or ``--model`` calls the model."""
    cache = server.served.scenario.cache
    same = server.model == found.model or not set(server.served_as).isdisjoint(found.served_as)
    wanted = (server.engine, cache.type_k, cache.type_v)
    return same and wanted == (found.engine, found.type_k, found.type_v)
