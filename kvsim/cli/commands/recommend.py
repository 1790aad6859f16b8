"""``kvsim recommend``: which policy and settings serve given traffic on a given machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, print_json, print_saved, warn
from kvsim.cli.option_groups import TraceOptions, takes_groups
from kvsim.cli.options import DeviceCacheType, Json, Plots, Plugins, ProfileName, load_plugins
from kvsim.cli.progress import RunProgress, SweepBar
from kvsim.errors import UserError
from kvsim.model.storage_types import decimal_hint
from kvsim.results import writable

if TYPE_CHECKING:
    from kvsim.advice.recommend.device_comparison import DeviceComparison
    from kvsim.advice.recommend.memory_answer import MemoryAnswer
    from kvsim.advice.recommend.recommendation import Recommendation
    from kvsim.engines.live.started_server import ServerCommand

    Answer = Recommendation | MemoryAnswer | DeviceComparison

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Asked:
    """What is asked: arguments of ``kvsim.recommend``."""

    slo: Annotated[str | None, typer.Option(help='The service level, such as "ttft_p95<1s,tpot_p95<80ms".')] = None
    trace: Annotated[Path | None, typer.Option(help="A trace file; its kind is detected.")] = None
    scenario: Annotated[
        str | None, typer.Option(help="A built-in scenario or a TOML file.", autocompletion=completion.scenarios)
    ] = None
    profile: ProfileName = None
    memory: Annotated[str | None, typer.Option(help="Memory for weights, cache and buffers: 8GB, 8GiB.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to fit into that memory (kvsim plan --list, a config.json, FILE.gguf).",
            autocompletion=completion.models,
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(help="Storage type of its weights, such as q4_K_M.", autocompletion=completion.weight_types),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            help="llamacpp, vllm, both, or any; by default the profile's engine, or both if that is kvsim's own.",
            autocompletion=completion.recommended_engines,
        ),
    ] = None
    kv: DeviceCacheType = None
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="The GPU that serves, such as rtx4090, in place of --memory; several are compared.",
            autocompletion=completion.devices,
        ),
    ] = None
    tp: Annotated[int | None, typer.Option("--tp", help="GPUs over which each layer is divided.", min=1)] = None
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=PRICE,...", help="Price of an hour of each device; can be given several times."),
    ] = None
    load: Annotated[float, typer.Option(help="Multiply the workload's arrival rate by this.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.", min=0)] = None
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests (or conversations) in the longest runs; by default at most 400, on a device 2,000."
        ),
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None

    def arguments(self, options: TraceOptions) -> dict[str, Any]:
        """All of them, with how the trace is read. Raises ``UserError`` for what cannot be asked."""
        if self.slo is None:
            raise UserError('--slo: missing; a service level such as --slo "ttft_p95<1s,tpot_p95<80ms" is expected')
        if (self.trace is None) == (self.scenario is None):
            both = "not both" if self.trace is not None else "one of them is needed"
            raise UserError(f"--trace, --scenario: {both}; a trace file or a scenario is accepted")
        if self.trace is None and options != TraceOptions():
            given = "--columns, --time, --skip-bad-rows, --drop-failed, --continue-clock"
            raise UserError(f"{given}: for a trace given by --trace only; a scenario has them in [workload]")
        asked = {**vars(self), "source": self.scenario, "price": ",".join(self.price) if self.price else None}
        del asked["scenario"]
        return {**asked, **options.table, "trace_keys": options.keys}


@dataclass(frozen=True)
class Verified:
    """The server that is started to see what was recommended."""

    verify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Start the recommended server, send it the traffic and see whether the level is met: "
            '"llama-server -m FILE.gguf --port 8080"; the flags go to the end, or where {flags} stands.',
        ),
    ] = None
    verify_url: Annotated[
        str | None, typer.Option(help="Where that server listens; by default what its --host and --port say.")
    ] = None
    verify_requests: Annotated[int, typer.Option(help="Requests that are sent to it, at most.", min=1)] = 60

    def command(self) -> ServerCommand | None:
        """How it is started; None if it is not. Raises ``UserError`` if that cannot be."""
        if self.verify is None:
            if self.verify_url is not None:
                raise UserError("--verify-url: of the server that --verify COMMAND starts; give that too")
            return None
        from kvsim.engines.live.started_server import check_free, read_command

        server = read_command(self.verify, self.verify_url)
        check_free(server.address)
        return server


@app.command()
@takes_groups
def recommend(
    asked: Asked,
    options: TraceOptions,
    verified: Verified,
    plots: Plots = False,
    plugin: Plugins = None,
    out: Annotated[Path | None, typer.Option(help="The folder for results; by default results/recommend-NAME.")] = None,
    as_json: Json = False,
) -> None:
    """Recommend a policy and its settings for your traffic, service level and memory, and what to type.

    With --json, files are written only if --out is given. The exit code is 0 even if nothing meets the service level;
    the output says so. For a model that the machine profile was not measured on, it answers by memory alone. With
    several devices, it says which meet the service level, up to which load and, with --price, at what cost. Ctrl-C ends
    the search with the answer known by then and exit code 130. With --verify, the exit code is 1 if the server that was
    started does not meet the service level.
    """
    from kvsim.advice.recommend.recommend import recommend as search

    arguments = asked.arguments(options)
    if out is not None:
        writable(out)
    load_plugins(plugin)
    server = verified.command()
    with SweepBar(str(asked.scenario or asked.trace)) as bar:
        found = search(**arguments, progress=bar)
    interrupted = bool(getattr(found, "interrupted", ""))
    _show_and_save(found, out, as_json and (server is None or interrupted), quiet=as_json, plots=plots)
    if asked.memory is not None:
        warn(filter(None, [decimal_hint(asked.memory)]))
    if interrupted:
        raise typer.Exit(130)
    if server is not None:
        _verify(found, server, verified.verify_requests, as_json)


def _verify(found: Answer, server: ServerCommand, requests: int, as_json: bool) -> None:
    """Start the server, send it the traffic and print what it did; exit code 1 if the service level was not met."""
    from kvsim.advice.recommend.recommendation import Recommendation
    from kvsim.engines.live.traffic import SendingStopped
    from kvsim.engines.live.verification import verify

    done = None
    try:
        if not isinstance(found, Recommendation):
            raise UserError("--verify: no setting is recommended here, so that there is nothing to start")
        with RunProgress("verifying", 100) as bar:
            done = verify(found, server, requests=requests, progress=bar.share)
    except SendingStopped as e:
        if e.interrupted:
            raise typer.Exit(130) from None
        raise
    finally:
        if as_json:
            print_json({**found.to_dict(), "verification": None if done is None else done.to_dict()})
    if not as_json:
        answer(done, as_json)
    if not done.met:
        raise typer.Exit(1)


def _show_and_save(found: Answer, out: Path | None, as_json: bool, *, quiet: bool, plots: bool) -> None:
    """Print the answer and save it; ``quiet``: print no more than the object, if that."""
    target = out or Path("results") / f"recommend-{found.scenario.name}"
    if as_json or not quiet:
        answer(found, as_json, target)
    if out is not None or not quiet:
        written = found.save(target, plots=plots)
        if not quiet:
            print_saved(written, target)
