"""``kvsim validate``: prediction against measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, fail, print_json, warn
from kvsim.cli.options import (
    EngineName,
    Json,
    LibraryFolder,
    Plugins,
    Policies,
    ProfileName,
    ScenarioName,
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


@app.command()
def validate(
    scenario: ScenarioName = "chat",
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
        typer.Option(help="Exit with 1 if the error of end-to-end latency at P50 or P99 is larger.", min=0),
    ] = None,
    profile: ProfileName = None,
    calibration_seconds: Annotated[float, typer.Option(help="How long to calibrate.", min=1, max=86400)] = 60.0,
    threads: Annotated[
        int | None, typer.Option(help="llama.cpp: threads; by default the profile's.", min=1, max=512)
    ] = None,
    library: LibraryFolder = None,
    as_json: Json = False,
) -> None:
    """Run a scenario on a real engine and compare the prediction with what was measured.

    Calibrates first, unless a profile of this machine is given.
    """
    from kvsim.engines.validation import validate as check

    load_plugins(plugin)
    loaded = _fitted_to_engine(load_with(scenario, seed), engine, model, library)
    with RunProgress("calibrating", 100, lines=True) as progress:
        if profile is not None:
            fitted = _given_profile(profile, threads)
        else:
            fitted = _measured_profile(loaded, engine, calibration_seconds, threads or 1, library, progress)
        total = min(requests, loaded.build_workload().n_requests)
        validation = check(
            loaded,
            fitted,
            policy,
            requests=requests,
            repeats=repeat,
            engine=engine,
            library=library,
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
    if bound is not None and not validation.worst <= bound:
        raise typer.Exit(fail(f"the largest error, {validation.worst:.1%}, is over the bound of {bound:.1%}", 1))


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
