"""``kvsim calibrate``: measure an engine on this machine, or a server that runs, or read what benchmarks measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli import options as declared
from kvsim.cli.calibration_files import CalibrationFiles, Measuring
from kvsim.cli.option_groups import refuse, takes_groups
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked
from kvsim.costs.memory_settings import PLAN_ENGINES, Engine
from kvsim.errors import UserError, no_such
from kvsim.model.engine_shapes import STORAGES
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.calibration.run import Calibration
    from kvsim.costs.profile import Profile

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Options:
    """The options of all uses."""

    files: Annotated[
        list[Path] | None, typer.Argument(hidden=True, help="With --from: more files, as the shell makes of *.json.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to measure: tiny (the default), small, smollm2 (llama.cpp's), or a GGUF file; with --url, "
            "the server's model, if its file cannot be read; with --from, the model that was benchmarked.",
            autocompletion=completion.engine_models,
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="numpy (our own engine) or llamacpp (the real llama.cpp); with --from, vllm or llamacpp.",
            autocompletion=completion.measured_engines,
        ),
    ] = "numpy"
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE...",
            help="Instead, correct the times of a model on a device by results of llama-bench, llama-batched-bench, "
            "vllm bench, GuideLLM or AIPerf.",
        ),
    ] = None
    device: declared.DeviceName = None
    tp: declared.TensorParallel = None
    weights: declared.DeviceWeights = None
    url: Annotated[
        str | None,
        typer.Option(
            help="Instead, measure the server at this address, such as http://127.0.0.1:8080, by sending it a load."
        ),
    ] = None
    flags: Annotated[
        str | None,
        typer.Option(
            help='With --url: what the server was started with, such as "-np 4 -c 4096 -fa on"; with --from: what vllm '
            'bench latency or throughput was, such as "--input-len 512 --output-len 128 --batch-size 8".'
        ),
    ] = None
    key_env: declared.KeyEnv = None
    allow_remote: declared.AllowRemote = False
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop after this time, everything included; by default 60, with --url 120.", min=1, max=86400
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="The profile file to write; by default MODEL.profile.json.")] = None
    cache_type_k: Annotated[
        str | None,
        typer.Option(
            help=f"Storage type of keys: {', '.join(STORAGES)}; by default f32, under llama.cpp f16.",
            autocompletion=completion.storages,
        ),
    ] = None
    cache_type_v: Annotated[
        str | None, typer.Option(help="Storage type of values.", autocompletion=completion.storages)
    ] = None
    threads: declared.LlamaThreads = 1
    library: declared.LibraryFolder = None
    bound: Annotated[
        float | None, typer.Option(help="Save only if the median held-out error is at most this.", min=0)
    ] = None
    force: Annotated[
        bool,
        typer.Option(help="Save the profile whatever its error is; one that was refused before is not measured anew."),
    ] = False
    as_json: declared.Json = False


@app.command()
@takes_groups
def calibrate(options: Options) -> None:
    """Measure an engine on this machine, or a server that runs, and write a profile of it.

    Measures until the intervals are tight or the time is over. An interrupted calibration continues when run again.
    With --from, reads what benchmarks have measured: kvsim calibrate --from bench.json --model qwen3-8b
    """
    if options.from_:
        _by_benchmarks(options)
        return
    if options.files:
        raise UserError(f"{options.files[0]}: a file means something only after --from")
    refuse(options, "only with --from, for results of benchmarks", "device", "tp", "weights")
    if options.url is not None:
        from kvsim.cli.server_calibration import calibrate_url

        why = "a server is measured as it runs; say by --flags what it was started with"
        refuse(options, why, "engine", "threads", "library", "cache_type_k", "cache_type_v")
        asked = ServerAsked(options.url, options.flags, options.key_env, options.allow_remote, options.model)
        out, seconds = options.out, options.seconds or 120.0
        calibrate_url(asked, seconds, out, options.bound, force=options.force, as_json=options.as_json)
        return
    refuse(options, "only with --url, for a server that runs", "flags", "key_env", "allow_remote")
    _measure_here(options)


def _by_benchmarks(options: Options) -> None:
    """Correct the times of a device by files of benchmarks."""
    from kvsim.calibration.bench_subject import BenchOptions
    from kvsim.cli.bench_calibration import calibrate_by_benchmarks

    why = "means nothing beside --from, which measures nothing"
    refuse(options, why, "url", "key_env", "allow_remote", "seconds", "threads", "library", "bound", "force")
    calibrate_by_benchmarks(
        [*(options.from_ or []), *(options.files or [])],
        BenchOptions(
            model=options.model,
            device=options.device,
            engine=_served_engine(options.engine),
            weights=options.weights,
            tp=options.tp or 1,
            type_k=options.cache_type_k,
            type_v=options.cache_type_v,
            flags=options.flags or "",
        ),
        options.out,
        as_json=options.as_json,
    )


def _measure_here(options: Options) -> None:
    """Measure an engine on this machine."""
    from kvsim.calibration.run import calibrate as measure
    from kvsim.costs.profile import USUAL_MODEL, is_llamacpp

    llama = is_llamacpp(options.engine)
    model = options.model or USUAL_MODEL[options.engine]
    # Profiles of one model under two engines, and their journals, must not overwrite each other.
    target = options.out or Path(f"{Path(model).stem}{'.llamacpp' if llama else ''}.profile.json")
    files = CalibrationFiles(writable(target.parent) / target.name)
    type_k = declared.storage_type_or_none("--cache-type-k", options.cache_type_k)
    type_v = declared.storage_type_or_none("--cache-type-v", options.cache_type_v)

    def measured(progress: RunProgress) -> Calibration:
        return measure(
            model,
            engine=options.engine,
            seconds=options.seconds or 60.0,
            name=files.name,
            type_k=type_k,
            type_v=type_v,
            threads=options.threads,
            library=options.library,
            report=progress.share,
            journal=files.journal,
        )

    use = f"kvsim {'validate SCENARIO --engine llamacpp' if llama else 'compare'} --profile {target}"
    wanted = partial(_measures, options, model)
    Measuring(files, model, measured, wanted, use).run(options.bound, force=options.force, as_json=options.as_json)


def _served_engine(name: str) -> Engine | None:
    """The engine that a server has, as it is named beside --from; None: as the files say. Raises ``UserError``."""
    if name == "numpy":
        return None
    for known in PLAN_ENGINES:
        if known == name:
            return known
    raise UserError(f"--engine: {no_such('engine', name, PLAN_ENGINES)}")


def _measures(options: Options, model: str, found: Profile) -> bool:
    """Whether a profile is of this engine and model on this machine."""
    from kvsim import machine
    from kvsim.costs.profile import is_llamacpp, same_model

    llama, on = is_llamacpp(options.engine), found.measured_on
    types = [given or ("f16" if llama else "f32") for given in (options.cache_type_k, options.cache_type_v)]
    wanted = (llama, *types, options.threads, machine.processor())
    measured = (found.engine != "numpy", found.type_k, found.type_v, on.threads, on.processor)
    return wanted == measured and same_model(found.model, model)
