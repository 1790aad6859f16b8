"""``kvsim calibrate``: measure an engine on this machine, or a server that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.calibration_files import CalibrationFiles, ServerAsked
from kvsim.cli.console import console, fail, print_json
from kvsim.cli.options import AllowRemote, EngineName, Json, KeyEnv, LibraryFolder, LlamaThreads, storage_type_or_none
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORAGES, Storage
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.run import Calibration
    from kvsim.costs.profile import Profile

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to measure: tiny (the default), small, smollm2 (llama.cpp's), or a GGUF file; with --url, "
            "where the server's own cannot be read.",
            autocompletion=completion.engine_models,
        ),
    ] = None,
    engine: EngineName = "numpy",
    url: Annotated[
        str | None,
        typer.Option(help="Measure a server that runs, such as http://127.0.0.1:8080, instead; by a load of its own."),
    ] = None,
    flags: Annotated[
        str | None,
        typer.Option(help='--url: what the server was started with, such as "-np 4 -c 4096 -fa on".'),
    ] = None,
    key_env: KeyEnv = None,
    allow_remote: AllowRemote = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop after this time, everything included; by default 60, with --url 120.", min=1, max=86400
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The profile file to write; by default MODEL.profile.json.")] = None,
    cache_type_k: Annotated[
        str | None,
        typer.Option(
            help=f"Storage type of keys: {', '.join(STORAGES)}; by default f32, under llama.cpp f16.",
            autocompletion=completion.storages,
        ),
    ] = None,
    cache_type_v: Annotated[
        str | None, typer.Option(help="Storage type of values.", autocompletion=completion.storages)
    ] = None,
    threads: LlamaThreads = 1,
    library: LibraryFolder = None,
    bound: Annotated[
        float | None, typer.Option(help="Save only if the median held-out error is at most this.", min=0)
    ] = None,
    force: Annotated[
        bool,
        typer.Option(help="Save whatever the error is; what was refused before is taken as it is, not measured anew."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure an engine on this machine, or a server that runs, and write a profile of it.

    Measures until the intervals are tight or the time is over. An interrupted calibration goes on when called again.
    """
    if url is not None:
        from kvsim.cli.server_calibration import calibrate_url

        own = {"--engine": engine != "numpy", "--threads": threads != 1, "--library": library is not None}
        own |= {"--cache-type-k": cache_type_k is not None, "--cache-type-v": cache_type_v is not None}
        _refuse(own, "a server is measured as it runs; say by --flags what it was started with")
        asked = ServerAsked(url, model, flags or "", key_env, allow_remote=allow_remote)
        calibrate_url(asked, seconds or 120.0, out, bound, force=force, as_json=as_json)
        return
    given = {"--flags": flags is not None, "--key-env": key_env is not None, "--allow-remote": allow_remote}
    _refuse(given, "only with --url, for a server that runs")
    from kvsim.calibration.run import HELD_OUT_BOUND
    from kvsim.costs.profile import USUAL_MODEL, is_llamacpp

    llama = is_llamacpp(engine)
    model = model or USUAL_MODEL[engine]
    # Profiles of one model under two engines, and their journals, must not overwrite each other.
    target = out or Path(f"{Path(model).stem}{'.llamacpp' if llama else ''}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)
    types = storage_type_or_none("--cache-type-k", cache_type_k), storage_type_or_none("--cache-type-v", cache_type_v)
    use = f"kvsim {'validate SCENARIO --engine llamacpp' if llama else 'compare'} --profile {target}"
    if force and (taken := files.take_refused(partial(_measures, engine, model, types, threads))) is not None:
        _tell(taken, as_json, f"Saved {target}, as it was measured before. Use it with: {use}")
        return
    done = _measured(
        files,
        model,
        engine=engine,
        seconds=seconds or 60.0,
        type_k=types[0],
        type_v=types[1],
        threads=threads,
        library=library,
    )
    refusal = None if force else done.refusal(HELD_OUT_BOUND if bound is None else bound)
    if refusal is not None:
        files.save_refused(done, refusal)
        raise typer.Exit(fail(f"not saved as {target}: {refusal}. {files.ways_on}", 1))
    files.save(done)
    if not as_json:
        from kvsim.cli.tables.calibration import show_calibration

        show_calibration(console(), done)
    _tell(done.profile, as_json, f"\nSaved {target} and {files.picture.name}. Use it with: {use}")


def _refuse(given: dict[str, bool], why: str) -> None:
    """Raise ``UserError`` if an option was given."""
    for option, is_given in given.items():
        if is_given:
            raise UserError(f"{option}: {why}")


def _measured(files: CalibrationFiles, model: str, **options: Any) -> Calibration:
    """Measure, with progress; an interrupt ends the command."""
    from kvsim.calibration.run import calibrate as measure

    try:
        with RunProgress(f"measuring {model}", 100) as progress:
            return measure(model, name=files.name, report=progress.share, journal=files.journal, **options)
    except KeyboardInterrupt:
        kept = f"; called again, it goes on from what is in {files.journal}" if files.journal.exists() else ""
        raise typer.Exit(fail(f"stopped{kept}", 130)) from None


def _measures(
    engine: str, model: str, types: tuple[Storage | None, Storage | None], threads: int, found: Profile
) -> bool:
    """Whether a profile is of this engine and model on this machine."""
    from kvsim import machine
    from kvsim.costs.profile import is_llamacpp, same_model

    usual: Storage = "f16" if is_llamacpp(engine) else "f32"
    wanted = (is_llamacpp(engine), types[0] or usual, types[1] or usual, threads, machine.processor())
    measured = (
        found.engine != "numpy",
        found.type_k,
        found.type_v,
        found.measured_on.threads,
        found.measured_on.processor,
    )
    return wanted == measured and same_model(found.model, model)


def _tell(profile: Profile, as_json: bool, saved: str) -> None:
    if as_json:
        print_json(profile.model_dump(mode="json"))
    else:
        typer.echo(saved)
