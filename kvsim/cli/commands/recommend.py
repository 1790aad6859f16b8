"""``kvsim recommend``: which policy and settings serve given traffic on a given machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import console, print_json, print_saved, warn
from kvsim.cli.options import (
    Columns,
    ContinueClock,
    DropFailed,
    Json,
    Plugins,
    ProfileName,
    SkipBadRows,
    TimeUnit,
    load_plugins,
    read_columns,
    read_time,
    trace_keys,
)
from kvsim.cli.progress import SweepBar
from kvsim.errors import UserError
from kvsim.model.storage_types import decimal_hint
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.advice.device_comparison import DeviceComparison
    from kvsim.advice.memory_answer import MemoryAnswer
    from kvsim.advice.recommendation import Recommendation

app = typer.Typer(add_completion=False)


@app.command()
def recommend(
    slo: Annotated[str | None, typer.Option(help='The service level, such as "ttft_p95<1s,tpot_p95<80ms".')] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file; its kind is detected.")] = None,
    columns: Columns = None,
    time: TimeUnit = None,
    skip_bad_rows: SkipBadRows = False,
    drop_failed: DropFailed = False,
    continue_clock: ContinueClock = False,
    scenario: Annotated[
        str | None, typer.Option(help="A built-in scenario or a TOML file.", autocompletion=completion.scenarios)
    ] = None,
    profile: ProfileName = None,
    memory: Annotated[str | None, typer.Option(help="Memory for weights, cache and buffers: 8GB, 8GiB.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to fit into that memory (kvsim plan --list, a config.json, FILE.gguf).",
            autocompletion=completion.models,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Storage type of its weights, such as q4_K_M.", autocompletion=completion.weight_types),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="llamacpp, vllm, both, or any; by default the profile's, both for kvsim's own engine.",
            autocompletion=completion.recommended_engines,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="The GPU that serves, such as rtx4090, in place of --memory; several are compared.",
            autocompletion=completion.devices,
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="GPUs over which each layer is divided.", min=1)] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=PRICE,...", help="Price of an hour of each device; can be given several times."),
    ] = None,
    load: Annotated[float, typer.Option(help="Multiply the workload's arrival rate by this.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.", min=0)] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests (or conversations) in the longest runs; by default at most 400, on a device 2,000."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None,
    plugin: Plugins = None,
    out: Annotated[Path | None, typer.Option(help="The folder for results; by default results/recommend-NAME.")] = None,
    as_json: Json = False,
) -> None:
    """Recommend a policy and its settings for your traffic, service level and memory, and what to type.

    With --json, files are written only if --out is given. The exit code is 0 even if nothing meets the service level;
    the output says so. For a model that the machine profile was not measured on, only memory is told. Of several
    devices it says which meets the service level, up to which load and, with --price, at what cost. An interrupt
    (Ctrl-C) ends the search with what is known by then, and exit code 130.
    """
    from kvsim.advice.recommend import recommend as search

    if slo is None:
        raise UserError('--slo: missing; a service level such as --slo "ttft_p95<1s,tpot_p95<80ms" is expected')
    if (trace is None) == (scenario is None):
        both = "not both" if trace is not None else "one of them is needed"
        raise UserError(f"--trace, --scenario: {both}; a trace file or a scenario is accepted")
    keys = trace_keys(skip_bad_rows, drop_failed, continue_clock)
    if trace is None and (columns or time or keys):
        given = "--columns, --time, --skip-bad-rows, --drop-failed, --continue-clock"
        raise UserError(f"{given}: for a trace given by --trace only; a scenario has them in [workload]")
    if out is not None:
        writable(out)
    load_plugins(plugin)
    with SweepBar(str(scenario or trace)) as bar:
        found = search(
            scenario,
            slo=slo,
            trace=trace,
            columns=read_columns(columns),
            time=read_time(time),
            trace_keys=keys,
            profile=profile,
            memory=memory,
            model=model,
            weights=weights,
            engine=engine,
            load=load,
            seed=seed,
            requests=requests,
            workers=workers,
            device=device,
            tp=tp,
            price=",".join(price) if price else None,
            progress=bar,
        )
    _show_and_save(found, out, as_json)
    if memory is not None:
        warn(filter(None, [decimal_hint(memory)]))
    if getattr(found, "interrupted", ""):
        raise typer.Exit(130)


def _show_and_save(found: Recommendation | MemoryAnswer | DeviceComparison, out: Path | None, as_json: bool) -> None:
    target = out or Path("results") / f"recommend-{found.scenario.name}"
    if as_json:
        print_json(found.to_dict())
    else:
        from kvsim.advice.device_comparison import DeviceComparison
        from kvsim.advice.memory_answer import MemoryAnswer
        from kvsim.cli.tables.device_comparison import show_device_comparison
        from kvsim.cli.tables.recommendation import show_memory_answer, show_recommendation

        if isinstance(found, MemoryAnswer):
            show_memory_answer(console(), found)
        elif isinstance(found, DeviceComparison):
            show_device_comparison(console(), found, target)
        else:
            show_recommendation(console(), found, target)
    if out is not None or not as_json:
        written = found.save(target)
        if not as_json:
            print_saved(written, target)
