"""``kvsim calibrate --from``: a profile corrected by results of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvsim.cli.console import answer
from kvsim.errors import UserError
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.bench_calibration import BenchCalibration
    from kvsim.calibration.bench_subject import BenchOptions


def calibrate_by_benchmarks(files: Sequence[Path], options: BenchOptions, out: Path | None, *, as_json: bool) -> None:
    """Read the files, correct the profile and save it where ``--device`` and ``--model`` find it, or as ``out``."""
    from kvsim.calibration.bench_calibration import calibrate_from
    from kvsim.calibration.published.device_fit import profile_file
    from kvsim.costs.device_profiles import own_profiles

    target = None if out is None else profile_file(out)
    done = calibrate_from(files, options)
    path = target or own_profiles() / f"{done.profile.name}.json"
    writable(path.parent)
    try:
        done.profile.save(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None
    answer(done, as_json)
    if not as_json:
        typer.echo(
            f"\nSaved {path}. Use it with: kvsim run chat {_found_by(done, options, None if out is None else path)}"
        )


def _found_by(done: BenchCalibration, options: BenchOptions, file: Path | None) -> str:
    """The options by which a run takes the profile."""
    subject = done.subject
    if file is not None:
        return f"--model {subject.model} --device {subject.device_name} --profile {file}"
    words = {"--model": subject.model, "--device": subject.device_name, "--engine": subject.engine}
    words |= {"--weights": subject.weights} if subject.weights else {}
    words |= {"--tp": str(options.tp)} if options.tp > 1 else {}
    return " ".join(word for pair in words.items() for word in pair)
