"""``kvsim recommend``: which policy and settings serve given traffic on a given machine."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli import options as declared
from kvsim.cli.console import answer, note, print_json, print_saved, warn
from kvsim.cli.option_groups import TraceOptions, UsersOptions, takes_groups
from kvsim.cli.progress import RunProgress, SweepBar
from kvsim.errors import UserError
from kvsim.model.engine_shapes import STORED
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
    profile: declared.ProfileName = None
    memory: Annotated[str | None, typer.Option(help="Memory for weights, cache and buffers: 8GB, 8GiB.")] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="The model that is served (kvsim plan --list, a config.json, FILE.gguf); on devices, several.",
            autocompletion=completion.models,
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Storage type of its weights, such as q4_K_M; on devices, several.",
            autocompletion=completion.weight_types,
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            help="llamacpp, vllm, both, or any; by default the profile's engine, or both if that is kvsim's own.",
            autocompletion=completion.recommended_engines,
        ),
    ] = None
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Storage type of K and V on a device: {', '.join(STORED)}; several are compared. By default 16 bits, "
            "and narrower ones where they help.",
            autocompletion=completion.scenario_storages,
        ),
    ] = None
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="The GPU that serves, such as rtx4090, in place of --memory; several are compared.",
            autocompletion=completion.devices,
        ),
    ] = None
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="GPUs over which each layer is divided; several are compared.")
    ] = None
    ngl: declared.GpuLayers = None
    n_cpu_moe: declared.CpuExperts = None
    cpu_gb_s: declared.CpuBandwidth = None
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=PRICE,...", help="Price of an hour of one of each; can be given several times."),
    ] = None
    now: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help='What runs now, "llama-server -m FILE.gguf -c 8192", "vllm serve ..." or "ollama serve": judged too.',
        ),
    ] = None
    url: Annotated[str | None, typer.Option(help="The server that runs now, asked for its model and settings.")] = None
    load: Annotated[float, typer.Option(help="Multiply the workload's arrival rate by this.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.", min=0)] = None
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests (or conversations) in the longest runs; by default at most 400, on a device 2,000."
        ),
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None

    def arguments(self, options: TraceOptions, users: dict[str, Any] | None) -> dict[str, Any]:
        """All of them, with how the trace is read. Raises ``UserError`` for what cannot be asked."""
        if self.slo is None:
            raise UserError('--slo: missing; a service level such as --slo "ttft_p95<1s,tpot_p95<80ms" is expected')
        if (sources := sum(source is not None for source in (self.trace, self.scenario, users))) != 1:
            raise UserError(
                f"--trace, --scenario, --users: {sources} of them; one is expected: a trace file, a scenario, or users"
            )
        if self.trace is None and options != TraceOptions():
            given = "--columns, --time, --skip-bad-rows, --drop-failed, --continue-clock"
            raise UserError(f"{given}: for a trace given by --trace only; a scenario has them in [workload]")
        price = ",".join(self.price) if self.price else None
        asked = {**vars(self), "source": self.scenario, "users": users, "price": price}
        asked |= self._running()
        del asked["scenario"], asked["url"]
        return {**asked, **options.table, "trace_keys": options.keys}

    def _running(self) -> dict[str, Any]:
        """The settings of the server that runs now and, unless it was named, what it serves. Raises ``UserError``."""
        if self.now is not None and self.url is not None:
            raise UserError("--now, --url: both say what runs now; give one of them")
        if self.now is not None:
            return self._typed(self.now)
        if self.url is None:
            return {}
        from kvsim.cli.servers import ServerAsked

        served = ServerAsked(self.url, None, None, False, self.model[0] if self.model else None).found().served
        # Times and memory are asked about for the threads that were measured.
        items = [item for line in served.assumed if "--threads" not in line for item in [line.partition(" (")[0]]]
        assumed = (
            f"--url: the server does not say all; assumed: {', '.join(items)}; --now COMMAND, in its place, says it"
        )
        warn([assumed] if items else [])
        return {"now": served.keys, "model": self.model or [served.scenario.model.name]}

    def typed_again(self, found: Answer) -> Answer:
        """The answer, whose command also says what runs now; a server that can be asked can be measured too."""
        from kvsim.advice.recommend.memory_answer import MemoryAnswer

        typed = [word for name in ("now", "url") if (said := getattr(self, name)) for word in (f"--{name}", said)]
        found = replace(found, command=" ".join([found.command, *map(shlex.quote, typed)]))
        if self.url is None or not isinstance(found, MemoryAnswer):
            return found
        why = found.no_times.partition(";")[0]
        how = (
            f"measure the server with: kvsim calibrate --url {self.url} --out mine.json; then give --profile mine.json"
        )
        return replace(found, no_times=f"{why}; {how}")

    def _typed(self, command: str) -> dict[str, Any]:
        """What the command of ``--now`` says. Raises ``UserError``."""
        from kvsim.advice.memory.command_line import read_command, titled_model, whole
        from kvsim.costs.devices import device_named
        from kvsim.model.memory_shapes import memory_shape
        from kvsim.model.storage_types import parse_size

        line = read_command(command)
        warn(f"--now: {remark}" for remark in line.remarks)
        named, kind = titled_model(line.title) if line.title else (None, None)
        model = self.model or ([] if named is None else [named])
        context = memory_shape(model[0]).context if model else None
        memory = device_named(self.device[0]).memory_bytes if self.device else self.memory and parse_size(self.memory)
        said: dict[str, Any] = {"now": line.scenario_keys(context, memory or None), "model": model}
        if kind is not None and model and not self.weights:
            said["weights"] = [kind]
            warn([f"--now: weights in {kind}, as its model's name says"])
        if self.device and not self.tp and "--tensor-parallel-size" in line.flags:
            said["tp"] = [whole(line.flags, "--tensor-parallel-size", 1)]
        return said


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
    users: UsersOptions,
    options: TraceOptions,
    verified: Verified,
    plots: declared.Plots = False,
    plugin: declared.Plugins = None,
    out: Annotated[Path | None, typer.Option(help="The folder for results; by default results/recommend-NAME.")] = None,
    as_json: declared.Json = False,
) -> None:
    """Recommend a policy and its settings for your traffic, service level and memory, and what to type.

    With --json, files are written only if --out is given. The exit code is 0 even if nothing meets the service level;
    the output says so. For a model that the machine profile was not measured on, it answers by memory alone. With
    several devices, it says which meet the service level, up to which load and, with --price, at what cost. Ctrl-C ends
    the search with the answer known by then and exit code 130. With --verify, the exit code is 1 unless the server that
    was started meets the service level.
    """
    from kvsim.advice.recommend.recommend import recommend as search

    arguments = asked.arguments(options, users.of_users)
    if out is not None:
        writable(out)
    declared.load_plugins(plugin)
    server = verified.command()
    with SweepBar(str(asked.scenario or asked.trace or "users")) as bar:
        found = search(**arguments, progress=bar, told=lambda line: warn([line]))
    found = asked.typed_again(found)
    interrupted = bool(getattr(found, "interrupted", ""))
    _show_and_save(found, out, as_json and (server is None or interrupted), quiet=as_json, plots=plots)
    if asked.memory is not None:
        warn(filter(None, [decimal_hint(asked.memory)]))
    if interrupted:
        raise typer.Exit(130)
    if server is not None:
        _verify(found, server, verified.verify_requests, as_json)


def _verify(found: Answer, server: ServerCommand, requests: int, as_json: bool) -> None:
    """Start the server, send it the traffic and print what it did; exit code 1 unless the service level was met."""
    from kvsim.advice.recommend.recommendation import Recommendation
    from kvsim.engines.live.traffic import SendingStopped
    from kvsim.engines.live.verification import verify

    done = None
    try:
        if not isinstance(found, Recommendation):
            raise UserError("--verify: no setting is recommended here, so that there is nothing to start")
        with RunProgress("verifying", 100) as bar:
            done = verify(found, server, requests=requests, told=note, progress=bar.share)
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
    target = out or _free_folder(Path("results") / f"recommend-{found.scenario.name}", found.command)
    replaced = out is not None and _command_in(out) not in (None, found.command)
    if as_json or not quiet:
        answer(found, as_json, target)
    if out is not None or not quiet:
        written = found.save(target, plots=plots)
        if not quiet:
            print_saved(written, target)
        if replaced:
            warn([f"{target}: the answer to another question that was there is replaced"])


def _free_folder(folder: Path, command: str) -> Path:
    """The folder or, where it has the answer to another question, the first with a number that has none."""
    tried, number = folder, 2
    while (folder / "recommendation.json").exists() and _command_in(folder) != command:
        folder, number = Path(f"{tried}-{number}"), number + 1
    return folder


def _command_in(folder: Path) -> str | None:
    """The command that asked what a folder has the answer to; None if there is no answer."""
    try:
        saved = json.loads((folder / "recommendation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(saved.get("command")) if isinstance(saved, dict) else None
