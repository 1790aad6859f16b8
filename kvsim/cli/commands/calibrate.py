"""``kvsim calibrate``: measure an engine on this machine, or a server that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.calibration_files import CalibrationFiles, Measuring
from kvsim.cli.options import AllowRemote, EngineName, Json, KeyEnv, LibraryFolder, LlamaThreads, storage_type_or_none
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked, refuse_options
from kvsim.model.engine_shapes import STORAGES, Storage
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.run import Calibration
    from kvsim.costs.profile import Profile

app = typer.Typer(add_completion=False)

_Model = Annotated[
    str | None,
    typer.Option(
        help="The model to measure: tiny (the default), small, smollm2 (llama.cpp's), or a GGUF file; with --url, "
        "the server's model, if its file cannot be read.",
        autocompletion=completion.engine_models,
    ),
]
_Url = Annotated[
    str | None,
    typer.Option(
        help="Instead, measure the server at this address, such as http://127.0.0.1:8080, by sending it a load."
    ),
]
_Flags = Annotated[
    str | None,
    typer.Option(help='With --url: what the server was started with, such as "-np 4 -c 4096 -fa on".'),
]
_Seconds = Annotated[
    float | None,
    typer.Option(help="Stop after this time, everything included; by default 60, with --url 120.", min=1, max=86400),
]
_CacheTypeK = Annotated[
    str | None,
    typer.Option(
        help=f"Storage type of keys: {', '.join(STORAGES)}; by default f32, under llama.cpp f16.",
        autocompletion=completion.storages,
    ),
]
_CacheTypeV = Annotated[str | None, typer.Option(help="Storage type of values.", autocompletion=completion.storages)]
_Bound = Annotated[float | None, typer.Option(help="Save only if the median held-out error is at most this.", min=0)]
_Force = Annotated[
    bool,
    typer.Option(help="Save the profile whatever its error is; one that was refused before is not measured anew."),
]


@app.command()
def calibrate(
    model: _Model = None,
    engine: EngineName = "numpy",
    url: _Url = None,
    flags: _Flags = None,
    key_env: KeyEnv = None,
    allow_remote: AllowRemote = False,
    seconds: _Seconds = None,
    out: Annotated[Path | None, typer.Option(help="The profile file to write; by default MODEL.profile.json.")] = None,
    cache_type_k: _CacheTypeK = None,
    cache_type_v: _CacheTypeV = None,
    threads: LlamaThreads = 1,
    library: LibraryFolder = None,
    bound: _Bound = None,
    force: _Force = False,
    as_json: Json = False,
) -> None:
    """Measure an engine on this machine, or a server that runs, and write a profile of it.

    Measures until the intervals are tight or the time is over. An interrupted calibration continues when run again.
    """
    if url is not None:
        from kvsim.cli.server_calibration import calibrate_url

        own = {"--engine": engine != "numpy", "--threads": threads != 1, "--library": library is not None}
        own |= {"--cache-type-k": cache_type_k is not None, "--cache-type-v": cache_type_v is not None}
        refuse_options(own, "a server is measured as it runs; say by --flags what it was started with")
        asked = ServerAsked(url, flags, key_env, allow_remote, model)
        calibrate_url(asked, seconds or 120.0, out, bound, force=force, as_json=as_json)
        return
    given = {"--flags": flags is not None, "--key-env": key_env is not None, "--allow-remote": allow_remote}
    refuse_options(given, "only with --url, for a server that runs")
    from kvsim.calibration.run import calibrate as measure
    from kvsim.costs.profile import USUAL_MODEL, is_llamacpp

    llama = is_llamacpp(engine)
    chosen = model or USUAL_MODEL[engine]
    # Profiles of one model under two engines, and their journals, must not overwrite each other.
    target = out or Path(f"{Path(chosen).stem}{'.llamacpp' if llama else ''}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)
    types = storage_type_or_none("--cache-type-k", cache_type_k), storage_type_or_none("--cache-type-v", cache_type_v)

    def measured(progress: RunProgress) -> Calibration:
        return measure(
            chosen,
            engine=engine,
            seconds=seconds or 60.0,
            name=files.name,
            type_k=types[0],
            type_v=types[1],
            threads=threads,
            library=library,
            report=progress.share,
            journal=files.journal,
        )

    use = f"kvsim {'validate SCENARIO --engine llamacpp' if llama else 'compare'} --profile {target}"
    wanted = partial(_measures, engine, chosen, types, threads)
    Measuring(files, chosen, measured, wanted, use).run(bound, force=force, as_json=as_json)


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
