"""``kvsim validate``: prediction against measurement, on a real engine here or of recorded servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli import options as declared
from kvsim.cli.console import answer, fail, note, print_saved, warn
from kvsim.cli.option_groups import ScenarioOptions, takes_groups
from kvsim.cli.progress import RunProgress, SweepBar
from kvsim.cli.servers import ServerAsked, servers_asked
from kvsim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvsim.costs.profile import Profile
    from kvsim.scenario.scenario import Scenario

app = typer.Typer(add_completion=False)

_INTERRUPTED = 130

_ONLY_WITH_URL = {"flags", "log", "slo", "key_env", "allow_remote", "timeout", "resume"}
_OF_SERVERS = {
    *_ONLY_WITH_URL,
    *("context", "scenario", "url", "model", "seed", "requests", "repeat", "bound", "profile"),
    *("calibration_seconds", "out", "as_json"),
}
"""Parameters that mean something beside --url."""
_OF_PUBLISHED = {"context", "published", "points", "only", "sample", "workers", "seed", "bound", "out", "as_json"}
"""Parameters that mean something beside --published."""
_ONLY_WITH_PUBLISHED = {"points", "only", "sample", "workers"}
_OF_RECORDED = {"context", "scenario", "recorded", "profile", "bound", "out", "as_json"}
"""Parameters that mean something beside --recorded."""


@dataclass(frozen=True)
class Options:
    """The options of all four uses."""

    scenario: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO]",
            help="A built-in scenario or a TOML file (chat); with --url also a trace.",
            autocompletion=completion.scenarios,
        ),
    ] = None
    recorded: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE...", help="Instead, compare with recorded servers: JSONL, plain or compressed."),
    ] = None
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Instead, replay what others measured on real servers: the points in aiconfigurator-core (extra gpu).",
        ),
    ] = False
    points: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --published: points of your own, in that file's format.")
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="With --published: only points such as model=qwen3-32b,tp=2."),
    ] = None
    sample: Annotated[
        int | None, typer.Option(help="With --published: replay so many, drawn with --seed; by default all.", min=1)
    ] = None
    workers: Annotated[
        int | None, typer.Option(help="With --published: processes; by default one for each processor.", min=1)
    ] = None
    url: Annotated[
        list[str] | None,
        typer.Option(help="Instead, send the traffic to this server and compare; several servers are ranked."),
    ] = None
    flags: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"-np 4 -c 4096"',
            help="With --url: what the server was started with, once for each; servers do not say all of it.",
        ),
    ] = None
    log: Annotated[
        list[Path] | None,
        typer.Option(help="With --url: the log of each llama-server, for its steps (see kvsim record)."),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(help='With --url: the service level, such as "ttft_p95<1s"; was it met, and as predicted?'),
    ] = None
    key_env: declared.KeyEnv = None
    allow_remote: declared.AllowRemote = False
    timeout: declared.Silence = 300.0
    resume: Annotated[bool, typer.Option("--resume", help="With --url: continue where an earlier command ended.")] = (
        False
    )
    model: Annotated[
        str | None, typer.Option(help="Replace the scenario's model.", autocompletion=completion.engine_models)
    ] = None
    engine: declared.EngineName = "numpy"
    policy: declared.Policies = None
    plugin: declared.Plugins = None
    seed: declared.Seed = None
    requests: Annotated[int, typer.Option(help="Shorten the scenario to this many requests.", min=1)] = 60
    repeat: Annotated[
        int | None,
        typer.Option(
            help="Run every policy, or ask every server, this many times, in turns (1; with --url 2).",
            min=1,
            max=1000,
        ),
    ] = None
    bound: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if the error of end-to-end latency at P50 or P99 is larger (of recorded servers: of any "
            "latency at mean, P50 or P99, of running ones also at P95; of published points: the median of TTFT or "
            "TPOT).",
            min=0,
        ),
    ] = None
    profile: declared.ProfileName = None
    calibration_seconds: Annotated[float, typer.Option(help="How long to calibrate.", min=1, max=86400)] = 60.0
    threads: Annotated[
        int | None, typer.Option(help="llama.cpp: threads; by default the profile's.", min=1, max=512)
    ] = None
    library: declared.LibraryFolder = None
    out: declared.Out = Path("results")
    as_json: declared.Json = False

    @property
    def name(self) -> str:
        """The scenario that is run."""
        return (self.scenario or ["chat"])[0]

    def servers(self) -> list[ServerAsked]:
        """The servers that are asked. Raises ``UserError``."""
        return servers_asked(
            self.url or [],
            self.flags or [],
            self.log or [],
            key_env=self.key_env,
            allow_remote=self.allow_remote,
            timeout_s=self.timeout,
            resume=self.resume,
            model=self.model,
        )


@app.command()
@takes_groups
def validate(context: typer.Context, options: Options) -> None:
    """Compare predicted times with those of a real engine here, of recorded servers, or of running ones.

    Calibrates first, unless a profile of this machine or of the server is given. For recorded servers, the profile is
    that of the model on its device; for recordings with steps, it is fitted to the other recordings of that server.
    kvsim validate mine.jsonl --url http://127.0.0.1:8080 --profile mine.profile.json
    """
    if options.published:
        _refuse_others(_given(context), _OF_PUBLISHED, "--published")
        _against_published(options)
    elif files := _recordings(context, options.recorded, options.scenario):
        _against_recorded(files, options)
    elif options.url:
        _against_servers(options)
    else:
        declared.load_plugins(options.plugin)
        _on_engine(options)


def _recordings(context: typer.Context, recorded: list[str] | None, others: list[str] | None) -> list[str]:
    """The recordings that were named; none without --recorded. Raises ``UserError`` for what goes with neither use.

    The shell makes of ``--recorded *.jsonl`` one value of the option, and arguments.
    """
    given = _given(context)
    if only := [option for name, option in given.items() if name in _ONLY_WITH_PUBLISHED]:
        raise UserError(f"{only[0]}: only with --published, for points that others measured")
    if not recorded:
        if len(others or []) > 1:
            raise UserError(f"{len(others or [])} scenarios; one is accepted, or recordings after --recorded")
        if "url" in given:
            _refuse_others(given, _OF_SERVERS, "--url")
        elif "out" in given:
            raise UserError("--out is for the pictures of recorded servers (--recorded) and of those asked (--url)")
        elif only := [option for name, option in given.items() if name in _ONLY_WITH_URL]:
            raise UserError(f"{only[0]}: only with --url, for a server that runs")
        return []
    _refuse_others(given, _OF_RECORDED, "--recorded", "; accepted: --profile, --bound, --out and --json")
    return [*recorded, *(others or [])]


def _given(context: typer.Context) -> dict[str, str]:
    """The parameters on the command line, and the option of each."""
    typed = [parameter for parameter in context.command.params if _is_typed(context, parameter.name or "")]
    return {parameter.name or "": parameter.opts[0] for parameter in typed}


def _refuse_others(given: Mapping[str, str], meant: set[str], beside: str, accepted: str = "") -> None:
    """Raise ``UserError`` for a parameter that was given and means nothing beside another."""
    for name, option in given.items():
        if name not in meant:
            raise UserError(f"{option} means nothing beside {beside}{accepted}")


def _is_typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _against_recorded(files: list[str], options: Options) -> None:
    """Compare with recorded servers, and say whether all errors are within the bound."""
    from kvsim.engines.recordings.validation import validate_recorded

    with RunProgress("recorded servers", 1) as progress:
        done = validate_recorded(files, options.profile, announce=progress.begin, progress=progress)
    answer(done, options.as_json)
    if not options.as_json:
        out = options.out / "recorded-servers"
        print_saved(done.save(out), out)
    warn([*done.left_out, *(line for run in done.runs for line in run.warnings)])
    _end_by(options.bound, done.worst)


def _against_published(options: Options) -> None:
    """Replay points that others measured, and say whether their errors are within the bound."""
    from kvsim.engines.published.validation import validate_published

    with SweepBar("published points") as progress:
        done = validate_published(
            options.points,
            options.only or (),
            sample=options.sample,
            seed=1 if options.seed is None else options.seed,
            workers=options.workers,
            progress=lambda n, total: progress(n, total, 0),
        )
    answer(done, options.as_json)
    if not options.as_json:
        out = options.out / "published"
        print_saved(done.save(out), out)
    _end_by(options.bound, max(done.error(measure, "median") for measure in ("ttft", "tpot")))


def _against_servers(options: Options) -> None:
    """Send traffic to servers, and compare what they took with what is predicted."""
    from kvsim.advice.recommend.slo import read_slo

    slo = None if options.slo is None else read_slo(options.slo)
    servers = options.servers()
    asked = [server.asked() for server in servers]
    from kvsim.cli.server_calibration import profile_for
    from kvsim.engines.live.server_validation import validate_servers
    from kvsim.scenario.builtin import is_trace
    from kvsim.scenario.scenario import shortened
    from kvsim.scenario.trace_files import trace_scenario

    traffic = trace_scenario(options.name) if is_trace(options.name) else None
    loaded = shortened(ScenarioOptions(scenario=options.name, seed=options.seed).load(traffic), options.requests)
    folder = options.out / f"validate-{loaded.name}"
    try:
        with RunProgress(f"asking {servers[0].url}", 100) as progress:
            profile = options.profile or profile_for(servers[0], options.calibration_seconds, progress)
        with RunProgress(f"asking {servers[0].url}", 100) as progress:
            done = validate_servers(
                loaded,
                asked,
                profile,
                folder,
                turns=options.repeat or 2,
                slo=slo,
                told=note,
                announce=progress.begin,
                share=progress.share,
                progress=progress,
            )
    except KeyboardInterrupt:
        kept = f"; what was gathered is in {folder}, and the same command with --resume goes on"
        raise typer.Exit(fail(f"stopped{kept if any(folder.glob('*.part')) else ''}", _INTERRUPTED)) from None
    answer(done, options.as_json)
    if not options.as_json:
        print_saved(done.compared.save(folder), folder)
    warn(done.warnings)
    _end_by(options.bound, done.worst)


def _end_by(bound: float | None, worst: float) -> None:
    """End with 1 if the largest error is over the bound."""
    if bound is not None and not worst <= bound:
        raise typer.Exit(fail(f"the largest error, {worst:.1%}, is over the bound of {bound:.1%}", 1))


def _on_engine(options: Options) -> None:
    """Compare with a run on a real engine here."""
    from kvsim.engines.live.engine_validation import validate as check

    loaded = _fitted_to_engine(options)
    with RunProgress("calibrating", 100) as progress:
        fitted = _measured_profile(loaded, options, progress) if options.profile is None else _given_profile(options)
        total = min(options.requests, loaded.build_workload().n_requests)
        validation = check(
            loaded,
            fitted,
            options.policy,
            requests=options.requests,
            repeats=options.repeat or 1,
            engine=options.engine,
            library=options.library,
            progress=progress,
            announce=lambda name: progress.begin(f"running {name}", total),
        )
    answer(validation, options.as_json)
    warn(validation.warnings)
    if validation.busy:
        warn(["the machine was busy during a real run; these figures cannot be trusted"])
    _end_by(options.bound, validation.worst)


def _fitted_to_engine(options: Options) -> Scenario:
    """The scenario with another model, and as the engine can run it."""
    from kvsim.calibration.llamacpp_session import absolute_model_path, adapt_scenario
    from kvsim.costs.profile import is_llamacpp
    from kvsim.scenario.scenario import load_scenario
    from real_engine.llama_library import Library

    loaded = ScenarioOptions(scenario=options.name, seed=options.seed).load()
    if is_llamacpp(options.engine):
        return adapt_scenario(loaded, Library(options.library).era, options.model)
    return loaded if options.model is None else load_scenario(loaded, model__name=absolute_model_path(options.model))


def _given_profile(options: Options) -> Profile:
    from kvsim.costs.load_profile import load_profile

    assert options.profile is not None
    given, threads = load_profile(options.profile), options.threads
    if threads not in (None, given.measured_on.threads):
        measured = given.measured_on.threads
        raise UserError(f"--threads: {options.profile} was measured with {measured}, not with {threads}")
    return given


def _measured_profile(loaded: Scenario, options: Options, progress: RunProgress) -> Profile:
    from kvsim.calibration.run import calibrate

    done = calibrate(
        loaded.model.name,
        engine=options.engine,
        seconds=options.calibration_seconds,
        type_k=loaded.cache.type_k,
        type_v=loaded.cache.type_v,
        threads=options.threads or 1,
        library=options.library,
        report=progress.share,
    )
    return done.profile.model_copy(update={"refused": done.refusal()})
