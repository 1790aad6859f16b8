"""``kvsim validate``: prediction against measurement, on a real engine here or of recorded servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, fail, print_json, print_saved, warn
from kvsim.cli.options import (
    EngineName,
    Json,
    LibraryFolder,
    Out,
    Plugins,
    Policies,
    ProfileName,
    Seed,
    load_plugins,
    load_with,
)
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError

if TYPE_CHECKING:
    from kvsim.costs.profile import Profile
    from kvsim.scenario.scenario import Scenario

app = typer.Typer(add_completion=False)

_OF_RECORDED = {"context", "scenario", "recorded", "profile", "bound", "out", "as_json"}
"""Parameters that mean something beside --recorded."""


class _EngineRun(NamedTuple):
    """The options of a run on a real engine."""

    scenario: str
    model: str | None
    engine: str
    policy: list[str] | None
    seed: int | None
    requests: int
    repeat: int
    profile: str | None
    calibration_seconds: float
    threads: int | None
    library: Path | None


@app.command()
def validate(
    context: typer.Context,
    scenario: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO]", help="A built-in scenario or a TOML file (chat).", autocompletion=completion.scenarios
        ),
    ] = None,
    recorded: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE...", help="Instead, compare with recorded servers: JSONL, plain or compressed."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Replace the scenario's model.", autocompletion=completion.engine_models)
    ] = None,
    engine: EngineName = "numpy",
    policy: Policies = None,
    plugin: Plugins = None,
    seed: Seed = None,
    requests: Annotated[int, typer.Option(help="Shorten the scenario to this many requests.", min=1)] = 60,
    repeat: Annotated[int, typer.Option(help="Run every policy this many times, in turns.", min=1, max=1000)] = 1,
    bound: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if the error of end-to-end latency at P50 or P99 is larger (of recorded servers: of any "
            "latency at mean, P50 or P99).",
            min=0,
        ),
    ] = None,
    profile: ProfileName = None,
    calibration_seconds: Annotated[float, typer.Option(help="How long to calibrate.", min=1, max=86400)] = 60.0,
    threads: Annotated[
        int | None, typer.Option(help="llama.cpp: threads; by default the profile's.", min=1, max=512)
    ] = None,
    library: LibraryFolder = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Compare predicted times with those of a real engine here, or of recorded servers.

    Calibrates first, unless a profile of this machine is given; for a recorded server, the profile is that of its model
    on its device.
    """
    files = _recordings(context, recorded, scenario)
    if files:
        _against_recorded(files, profile, bound, out / "recorded-servers", as_json)
        return
    load_plugins(plugin)
    name = (scenario or ["chat"])[0]
    _on_engine(
        _EngineRun(name, model, engine, policy, seed, requests, repeat, profile, calibration_seconds, threads, library),
        bound,
        as_json,
    )


def _recordings(context: typer.Context, recorded: list[str] | None, others: list[str] | None) -> list[str]:
    """The recordings that were named; none without --recorded. Raises ``UserError`` for what goes with neither use.

    The shell makes of ``--recorded *.jsonl`` one value of the option, and arguments.
    """
    given = [parameter for parameter in context.command.params if _is_typed(context, parameter.name or "")]
    if not recorded:
        if len(others or []) > 1:
            raise UserError(f"{len(others or [])} scenarios; one is accepted, or recordings after --recorded")
        if any(parameter.name == "out" for parameter in given):
            raise UserError("--out is for the pictures of recorded servers (--recorded)")
        return []
    for parameter in given:
        if parameter.name not in _OF_RECORDED:
            raise UserError(
                f"{parameter.opts[0]} means nothing beside --recorded; accepted: --profile, --bound, --out and --json"
            )
    return [*recorded, *(others or [])]


def _is_typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _against_recorded(files: list[str], profile: str | None, bound: float | None, out: Path, as_json: bool) -> None:
    """Compare with recorded servers, and say whether all errors are within the bound."""
    from kvsim.engines.recorded.validation import validate_recorded

    with RunProgress("recorded servers", 1) as progress:
        done = validate_recorded(files, profile, announce=progress.begin, progress=progress)
    if as_json:
        print_json(done.to_dict())
    else:
        from kvsim.cli.tables.recorded import show_recorded

        show_recorded(console(), done)
        print_saved(done.save(out), out)
    warn([*done.left_out, *(line for run in done.runs for line in run.warnings)])
    _end_by(bound, done.worst)


def _end_by(bound: float | None, worst: float) -> None:
    """End with 1 if the largest error is over the bound."""
    if bound is not None and not worst <= bound:
        raise typer.Exit(fail(f"the largest error, {worst:.1%}, is over the bound of {bound:.1%}", 1))


def _on_engine(run: _EngineRun, bound: float | None, as_json: bool) -> None:
    """Compare with a run on a real engine here."""
    from kvsim.engines.validation import validate as check

    loaded = _fitted_to_engine(load_with(run.scenario, run.seed), run.engine, run.model, run.library)
    with RunProgress("calibrating", 100, lines=True) as progress:
        if run.profile is not None:
            fitted = _given_profile(run.profile, run.threads)
        else:
            fitted = _measured_profile(
                loaded, run.engine, run.calibration_seconds, run.threads or 1, run.library, progress
            )
        total = min(run.requests, loaded.build_workload().n_requests)
        validation = check(
            loaded,
            fitted,
            run.policy,
            requests=run.requests,
            repeats=run.repeat,
            engine=run.engine,
            library=run.library,
            progress=progress,
            announce=lambda name: progress.begin(f"running {name}", total),
        )
    if as_json:
        print_json(validation.to_dict())
    else:
        from kvsim.cli.tables.validation import show_validation

        show_validation(console(), validation)
    warn(validation.warnings)
    if validation.busy:
        warn(["the machine was busy during a real run; these figures cannot be trusted"])
    _end_by(bound, validation.worst)


def _fitted_to_engine(loaded: Scenario, engine: str, model: str | None, library: Path | None) -> Scenario:
    """The scenario with another model, and as the engine can run it."""
    from kvsim.calibration.llamacpp_session import absolute_model_path, adapt_scenario
    from kvsim.costs.profile import is_llamacpp
    from kvsim.scenario.scenario import load_scenario
    from real_engine.llama_library import Library

    if is_llamacpp(engine):
        return adapt_scenario(loaded, Library(library).era, model)
    return loaded if model is None else load_scenario(loaded, model__name=absolute_model_path(model))


def _given_profile(name: str, threads: int | None) -> Profile:
    from kvsim.costs.profile import load_profile

    given = load_profile(name)
    if threads not in (None, given.measured_on.threads):
        raise UserError(f"--threads: {name} was measured with {given.measured_on.threads}, not with {threads}")
    return given


def _measured_profile(
    loaded: Scenario, engine: str, seconds: float, threads: int, library: Path | None, progress: RunProgress
) -> Profile:
    from kvsim.calibration.run import calibrate

    done = calibrate(
        loaded.model.name,
        engine=engine,
        seconds=seconds,
        type_k=loaded.cache.type_k,
        type_v=loaded.cache.type_v,
        threads=threads,
        library=library,
        report=progress.share,
    )
    return done.profile.model_copy(update={"refused": done.refusal()})
