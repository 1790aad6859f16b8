"""The command line. Exit codes: 0 done, 1 a check failed, 2 the user's input is wrong."""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli import tables as show
from kvsim.cli.commands.plan import plan
from kvsim.cli.commands.recommend import recommend
from kvsim.cli.commands.record import LibraryFolder, Threads, record
from kvsim.cli.commands.report import report
from kvsim.cli.commands.sweep import sweep
from kvsim.cli.commands.why import why
from kvsim.cli.commands.workload import app as workload_app
from kvsim.cli.console import console, print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.cli.verdict_table import show_verdict
from kvsim.costs.profile import USUAL_MODEL, is_llamacpp, is_shipped, load_profile
from kvsim.engines.conformance import ENGINES
from kvsim.errors import Divergence, UserError
from kvsim.experiments.comparison import compare as compare_policies
from kvsim.experiments.prefix_cache import prefix_cache as study_prefixes
from kvsim.model.engine_shapes import STORAGES, Storage
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario, builtin_names, load_scenario, mooncake
from kvsim.scenario.trace_sections import TRACES, TraceWorkload
from kvsim.simulation.run import run as run_scenario
from policies import EVICTIONS, Eviction, PolicyFactory, Preset, available, current_name
from workloads import WorkloadError

app = typer.Typer(
    name="kvsim",
    help="Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(report)
app.command()(record)
app.add_typer(workload_app, name="workload")
app.command()(sweep)
app.command()(why)
app.command()(recommend)
scenario_app = typer.Typer(help="Look at scenarios.", no_args_is_help=True)
app.add_typer(scenario_app, name="scenario")

ScenarioName = Annotated[str, typer.Argument(metavar="SCENARIO", help="A built-in scenario or a TOML file.")]
Seed = Annotated[int | None, typer.Option(help="Replace the scenario's seed.")]
Requests = Annotated[int | None, typer.Option(help="Run this many requests (of sessions: conversations) at most.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="A shipped machine profile or a profile file.")]
Policies = Annotated[list[str] | None, typer.Option("--policy", "-p", help="May be given several times.")]
NoLeap = Annotated[
    bool,
    typer.Option(
        "--no-fast-forward", "--no-leap", help="Take every step in an event of its own; the result is the same."
    ),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Of a trace: leave out rows that are wrong, and say which.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


EngineName = Annotated[str, typer.Option(help="numpy (our own engine) or llamacpp (the real llama.cpp).")]


class RunDetail(StrEnum):
    """What ``run`` records, as far as it can be shown: ``metrics.Detail``."""

    requests = "requests"
    cache = "cache"


@app.command()
def run(
    scenario: ScenarioName = "chat",
    policy: Annotated[str | None, typer.Option("--policy", "-p", help="Replace the scenario's policy.")] = None,
    seed: Seed = None,
    requests: Requests = None,
    profile: ProfileName = None,
    detail: Annotated[
        RunDetail, typer.Option(help="Watch the cache as well, or just how requests fare: much faster for long runs.")
    ] = RunDetail.cache,
    no_fast_forward: NoLeap = False,
    skip_bad_rows: SkipBadRows = False,
    as_json: Json = False,
) -> None:
    """Run one scenario under one policy."""
    loaded = _load(scenario, seed, requests, profile, skip_bad_rows)
    with RunProgress(policy or loaded.cache.policy, loaded.build_workload().n_requests) as progress:
        result = run_scenario(loaded, policy, progress=progress, detail=detail.value, fast_forward=not no_fast_forward)
    if as_json:
        print_json(result.summary)
    else:
        described = load_profile(loaded.machine.profile, loaded.folder).describe()
        show.run(console(), result, described)
    warn(result.warnings)


@app.command()
def compare(
    scenario: ScenarioName = "chat",
    policy: Policies = None,
    seed: Seed = None,
    requests: Requests = None,
    profile: ProfileName = None,
    out: Annotated[Path, typer.Option(help="Where the picture and the tables go.")] = Path("results"),
    replications: Annotated[
        int, typer.Option(help="Run all so often, with other seeds, for intervals.", min=1, max=1000)
    ] = 1,
    no_fast_forward: NoLeap = False,
    skip_bad_rows: SkipBadRows = False,
    as_json: Json = False,
) -> None:
    """Run one scenario under several policies (all of them by default) and compare."""
    loaded = _load(scenario, seed, requests, profile, skip_bad_rows)
    total = (len(policy) if policy else len(available())) * loaded.build_workload().n_requests * replications
    if not as_json:
        writable(out / loaded.name)
    with RunProgress(loaded.name, total) as progress:
        comparison = compare_policies(
            loaded,
            policy,
            progress=progress,
            snapshots=not as_json,
            fast_forward=not no_fast_forward,
            replications=replications,
        )
    if as_json:
        print_json(comparison.to_dict())
    else:
        show.comparison(console(), comparison)
        show_verdict(console(), comparison.verdict)
        written = comparison.save(out / loaded.name)
        pictures = [path.name for path in written if path.name in ("comparison.png", "cells.png")]
        others = len(written) - len(pictures)
        typer.echo(f"\nSaved {', '.join(pictures)} and {others} more files in {written[0].parent}/")
    warn(comparison.warnings)


@app.command("prefix-cache")
def prefix_cache(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO|TRACE", help="A scenario, or a Mooncake trace.")],
    eviction: Annotated[
        list[str] | None, typer.Option("--eviction", "-e", help="May be given several times; by default all.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="Cache sizes in blocks, with commas between them.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block, if not the scenario's.", min=1)] = None,
    requests: Requests = None,
    out: Annotated[Path, typer.Option(help="Where the picture and the table go.")] = Path("results"),
    skip_bad_rows: SkipBadRows = False,
    as_json: Json = False,
) -> None:
    """How often a prefix cache would hit, by its size and by what it forgets first."""
    trace = scenario.endswith((".jsonl", ".jsonl.gz"))
    loaded = _load(mooncake(scenario) if trace else scenario, None, requests, None, skip_bad_rows)
    sizes = None if blocks is None else _numbers("--blocks", blocks)
    chosen = [_eviction(name) for name in eviction] if eviction else None
    with RunProgress(loaded.name, 100) as progress:
        study = study_prefixes(loaded, chosen, sizes, block_size=block_size, progress=progress.share)
    if as_json:
        print_json(study.to_dict())
    else:
        show.prefixes(console(), study)
        written = study.save(out / loaded.name)
        typer.echo(f"\nSaved {' and '.join(path.name for path in written)} in {written[0].parent}/")
    warn(study.notes)


def _storage(option: str, name: str) -> Storage:
    if name not in STORAGES:
        raise UserError(f"{option}: there is no {name!r}; there are {', '.join(STORAGES)}")
    return name


def _storage_or_none(option: str, name: str | None) -> Storage | None:
    return None if name is None else _storage(option, name)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n <= 2**28 for n in numbers):
        raise UserError(f"{option}: {text!r}: whole numbers from 1 to 2**28 with commas between them are accepted")
    return numbers


def _eviction(name: str) -> Eviction:
    if name not in EVICTIONS:
        raise UserError(f"--eviction: there is no {name!r}; there are {', '.join(EVICTIONS)}")
    return name


@app.command()
def calibrate(
    model: Annotated[
        str | None,
        typer.Option(help="The model to measure: tiny (the default), small, smollm2 (llama.cpp's), or a GGUF file."),
    ] = None,
    engine: EngineName = "numpy",
    seconds: Annotated[float, typer.Option(help="How long to measure at most.", min=1, max=86400)] = 60.0,
    out: Annotated[Path | None, typer.Option(help="The profile file to write; by default MODEL.profile.json.")] = None,
    cache_type_k: Annotated[
        str | None, typer.Option(help=f"How keys are kept: {', '.join(STORAGES)}; f32, for llama.cpp f16.")
    ] = None,
    cache_type_v: Annotated[str | None, typer.Option(help="How values are kept.")] = None,
    threads: Threads = 1,
    library: LibraryFolder = None,
    bound: Annotated[float | None, typer.Option(help="The largest median held-out error to save.", min=0)] = None,
    force: Annotated[bool, typer.Option(help="Save whatever the error, and on a busy machine too.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the real engine, or llama.cpp, on this machine and write a machine profile.

    Measures until the intervals are tight or the time is over. Cut short, it goes on where it was when called again.
    """
    from kvsim.calibration.run import HELD_OUT_BOUND
    from kvsim.calibration.run import calibrate as measure

    llama = is_llamacpp(engine)
    model = model or USUAL_MODEL[engine]
    # Two engines' profiles of one model, and what was measured for them so far, are not to be in each other's way.
    target = out or Path(f"{Path(model).stem}{'.llamacpp' if llama else ''}.profile.json")
    journal = writable(target.parent) / f"{target.name}.part"
    name = target.name.split(".")[0]
    try:
        with RunProgress(f"measuring {model}", 100) as progress:
            done = measure(
                model,
                engine=engine,
                seconds=seconds,
                name=name,
                type_k=_storage_or_none("--cache-type-k", cache_type_k),
                type_v=_storage_or_none("--cache-type-v", cache_type_v),
                threads=threads,
                library=library,
                report=progress.share,
                journal=journal,
            )
    except KeyboardInterrupt:
        raise typer.Exit(_fail(f"stopped; what is in {journal} counts when you calibrate again", 130)) from None
    refusal = None if force else done.refusal(HELD_OUT_BOUND if bound is None else bound)
    if refusal is not None:
        if not done.busy:
            refusal += f"; measure longer (what is in {journal} counts), or give --force"
        else:
            journal.unlink(missing_ok=True)  # Of no use to anyone.
        raise typer.Exit(_fail(f"not saved: {refusal}", 1))
    picture = target.with_name(f"{name}.calibration.png")
    try:
        done.profile.save(target)
        done.plot().savefig(picture, dpi=120)
    except OSError as e:
        raise UserError(f"{target}: cannot write: {e.strerror}") from None
    journal.unlink(missing_ok=True)
    if as_json:
        print_json(done.profile.model_dump(mode="json"))
    else:
        show.calibration(console(), done)
        use = "validate SCENARIO --engine llamacpp" if llama else "compare"
        typer.echo(f"\nSaved {target} and {picture.name}. Use it with: kvsim {use} --profile {target}")


@app.command()
def validate(
    scenario: ScenarioName = "chat",
    model: Annotated[str | None, typer.Option(help="Replace the scenario's model.")] = None,
    engine: EngineName = "numpy",
    policy: Policies = None,
    seed: Seed = None,
    requests: Annotated[int, typer.Option(help="Shorten the scenario to this many requests.", min=1)] = 60,
    repeat: Annotated[int, typer.Option(help="Run each policy this often, by turns.", min=1, max=1000)] = 1,
    bound: Annotated[
        float | None, typer.Option(help="Exit with 1 where end-to-end latency at P50 or P99 errs by more.", min=0)
    ] = None,
    profile: ProfileName = None,
    calibration_seconds: Annotated[float, typer.Option(help="How long to calibrate.", min=1, max=86400)] = 60.0,
    threads: Annotated[
        int | None, typer.Option(help="llama.cpp: threads; by default the profile's.", min=1, max=512)
    ] = None,
    library: LibraryFolder = None,
    as_json: Json = False,
) -> None:
    """Run a scenario on the real engine, or on llama.cpp, and hold the prediction against what was measured.

    Calibrates first, unless a profile of this machine is given.
    """
    from kvsim.calibration.llamacpp_session import absolute_model_path
    from kvsim.calibration.llamacpp_session import adapt_scenario as fitted_to
    from kvsim.calibration.run import calibrate as measure
    from kvsim.engines.validation import validate as check
    from real_engine.llama_library import Library

    loaded = _load(scenario, seed, None, None)
    if is_llamacpp(engine):
        loaded = fitted_to(loaded, Library(library).era, model)
    elif model is not None:
        loaded = load_scenario(loaded, model__name=absolute_model_path(model))
    with RunProgress("calibrating", 100) as progress:
        if profile is not None:
            fitted = load_profile(profile)
            if threads not in (None, fitted.machine.threads):
                raise UserError(f"--threads: {profile} was measured with {fitted.machine.threads}, not with {threads}")
        else:
            fitted = measure(
                loaded.model.name,
                engine=engine,
                seconds=calibration_seconds,
                type_k=loaded.cache.type_k,
                type_v=loaded.cache.type_v,
                threads=threads or 1,
                library=library,
                report=progress.share,
            ).profile
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
        show.validation(console(), validation)
    warn(validation.warnings)
    if validation.busy:
        warn(["the machine was busy during a real run; these figures cannot be trusted"])
    if bound is not None and not validation.worst <= bound:
        raise typer.Exit(_fail(f"the largest error, {validation.worst:.1%}, is over the bound of {bound:.1%}", 1))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the text begins with.")],
    model: Annotated[str, typer.Option(help="A model with a vocabulary: smollm2, or a GGUF file.")] = "smollm2",
    policy: Annotated[str, typer.Option("--policy", "-p", help="Who hands out the cells.")] = "paged",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to say at most.", min=1)] = 64,
    chat: Annotated[bool, typer.Option(help="Put the prompt as a question to an assistant.")] = False,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws, where the temperature is above 0.", min=0)] = 0,
    weights: Annotated[str, typer.Option(help="How weights are kept: f32, f16, int8, mapped.")] = "f32",
    cells: Annotated[int | None, typer.Option(help="Cells in the cache; by default as many as needed.", min=2)] = None,
    cache_type_k: Annotated[str, typer.Option(help=f"How keys are kept: {', '.join(STORAGES)}.")] = "f32",
    cache_type_v: Annotated[str, typer.Option(help="How values are kept.")] = "f32",
    threads: Annotated[int, typer.Option(help="Threads of the matrix products.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Let the real engine write, on a cache under any policy."""
    from real_engine.generate import answer

    told = answer(
        prompt,
        model,
        policy=policy,
        n=tokens,
        chat=chat,
        temperature=temperature,
        seed=seed,
        weights=weights,
        cells=cells,
        type_k=_storage("--cache-type-k", cache_type_k),
        type_v=_storage("--cache-type-v", cache_type_v),
        threads=threads,
        write=(lambda piece: None) if as_json else partial(typer.echo, nl=False),
    )
    if as_json:
        print_json(told.summary())
    else:
        typer.echo(f"\n\n{told.describe()}")


@app.command()
def accuracy(
    model: Annotated[str, typer.Option(help="The model: smollm2, tiny, small, or a GGUF file.")] = "smollm2",
    cache_type_k: Annotated[
        list[str] | None, typer.Option(help=f"Keys as {', '.join(STORAGES)}; may be given several times.")
    ] = None,
    cache_type_v: Annotated[list[str] | None, typer.Option(help="Values likewise.")] = None,
    weights: Annotated[str, typer.Option(help="How weights are kept: f32, f16, int8, mapped.")] = "f32",
    tokens: Annotated[int | None, typer.Option(help="Read this much of the text at most.", min=2)] = None,
    threads: Annotated[int, typer.Option(help="Threads of the matrix products.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """What narrower K and V cost in accuracy: logits, likeliest tokens and perplexity beside f32.

    Where types are given, every combination of them is tried.
    """
    from real_engine.accuracy import accuracy as measure

    types_k = [_storage("--cache-type-k", name) for name in cache_type_k or ()]
    types_v = [_storage("--cache-type-v", name) for name in cache_type_v or ()]
    with RunProgress(f"reading with {model}", 100) as progress:
        found = measure(
            model, types_k, types_v, weights=weights, tokens=tokens, threads=threads, progress=progress.share
        )
    if as_json:
        print_json(found.to_dict())
    else:
        show.accuracy(console(), found)


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="The model to load: small, tiny, smollm2, or a GGUF file.")] = "small",
    remedy: Annotated[
        list[str] | None, typer.Option("--remedy", "-r", help="May be given several times; by default all that suit.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Sequences at a time.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens that a slot could hold.")] = 2048,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens that each slot holds in the end.")] = 256,
    ubatch: Annotated[int, typer.Option(help="Tokens in a forward pass at most.")] = 128,
    cache_type_k: Annotated[str, typer.Option(help=f"How keys are kept: {', '.join(STORAGES)}.")] = "f32",
    cache_type_v: Annotated[str, typer.Option(help="How values are kept.")] = "f32",
    out: Annotated[Path, typer.Option(help="Where the picture and the tables go.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Where an engine's memory goes: a naive set-up, then one remedy on top of another, measured."""
    from kvsim.advice.memory import memory as measure

    type_k, type_v = _storage("--cache-type-k", cache_type_k), _storage("--cache-type-v", cache_type_v)
    target = out / f"memory-{Path(model).stem}"
    with RunProgress(f"measuring {model}", 100) as progress:
        report = measure(
            model,
            remedy,
            slots=slots,
            context=context,
            tokens=tokens,
            n_ubatch=ubatch,
            type_k=type_k,
            type_v=type_v,
            ready=None if as_json else partial(writable, target),
            progress=progress.share,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        show.memory(console(), report)
        written = report.save(target)
        typer.echo(f"\nSaved {', '.join(path.name for path in written)} in {target}/")


app.command()(plan)


@app.command()
def conform(
    engine: Annotated[str, typer.Argument(help=f"Whose recordings they are: {' or '.join(ENGINES)}.")],
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Recordings, JSONL, plain or gzip.")],
    as_json: Json = False,
) -> None:
    """Replay recorded runs of a real engine on our policies, and compare the whole state after every operation."""
    if engine not in ENGINES:
        raise UserError(f"no recordings of {engine!r} can be read; there are {', '.join(ENGINES)}")
    found = [ENGINES[engine](file) for file in files]
    agreed = all(a.first is None for a in found)
    if as_json:
        print_json({"engine": engine, "agree": agreed, "files": [a.to_dict() for a in found]})
    else:
        show.agreements(console(), found)
    if not agreed:
        raise typer.Exit(1)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None,
    as_json: Json = False,
) -> None:
    """List the policies that are installed, or explain one."""
    known = available()
    if name is None:
        lines = {key: _summary(factory) for key, factory in known.items()}
        if as_json:
            print_json(lines)
        else:
            show.names(console(), lines)
        return
    name = current_name(name)
    if name not in known:
        raise UserError(f"no policy called {name!r}; there are {', '.join(known)}")
    preset = known[name]
    if not isinstance(preset, Preset):
        build, unsaid = preset, "not said"
        preset = Preset(
            name=name,
            summary=_summary(build),
            layout=unsaid,
            compactor=unsaid,
            trigger=unsaid,
            kernel=unsaid,
            parameters=(),
            source=f"plug-in {build!r}",
            build=lambda _, config: build(config),
        )
    if as_json:
        fields = ("name", "summary", "layout", "compactor", "trigger", "kernel", "parameters", "source")
        print_json({field: getattr(preset, field) for field in fields})
    else:
        show.preset(console(), preset)


def _summary(factory: PolicyFactory) -> str:
    if isinstance(factory, Preset):
        return factory.summary
    return next(iter((factory.__doc__ or "a plug-in that says nothing of itself").strip().splitlines()))


@scenario_app.command("show")
def scenario_show(scenario: ScenarioName, as_json: Json = False) -> None:
    """Print a scenario whole, with every default filled in."""
    loaded = load_scenario(scenario)
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        typer.echo(loaded.to_toml(), nl=False)


@scenario_app.command("list")
def scenario_list() -> None:
    """List the built-in scenarios."""
    for name in builtin_names():
        typer.echo(name)


def main() -> None:
    """Run the command line; a user's mistake ends in one line and exit code 2."""
    try:
        app()
    except (UserError, WorkloadError) as e:
        sys.exit(_fail(str(e), 2))
    except Divergence as e:
        sys.exit(_fail(str(e), 1))


def _load(
    scenario: str | Scenario,
    seed: int | None,
    requests: int | None,
    profile: str | None,
    skip_bad_rows: bool = False,
) -> Scenario:
    changes: dict[str, Any] = {}
    loaded = load_scenario(scenario)
    if seed is not None:
        changes["seed"] = seed
    if requests is not None:
        changes[f"workload__{loaded.workload.count_key}"] = requests
    if skip_bad_rows:
        if not isinstance(loaded.workload, TraceWorkload):
            kind, kinds = loaded.workload.kind, ", ".join(TRACES)
            raise UserError(f"{loaded.name}: --skip-bad-rows: workload.kind is {kind!r}; accepted: {kinds}")
        changes["workload__skip_bad_rows"] = True
    if profile is not None:
        # A path on the command line starts here, not at the scenario's folder.
        own_file = not is_shipped(profile) and "\0" not in profile and Path(profile).is_file()
        changes["machine__profile"] = str(Path(profile).resolve()) if own_file else profile
    return load_scenario(loaded, **changes)


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        typer.echo(f"kvsim: {line}", err=True)
    return code
