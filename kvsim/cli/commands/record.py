"""``kvsim record``: a scenario's run on a real engine, to be compared with ours."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import fail, print_json, warn
from kvsim.cli.option_groups import ScenarioOptions, refuse, takes_groups
from kvsim.cli.options import AllowRemote, Json, KeyEnv, LibraryFolder, LlamaThreads, Seed, Silence
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked
from kvsim.errors import UserError, counted, no_such

if TYPE_CHECKING:
    from kvsim.engines.live.server_recording import LiveRecording
    from kvsim.scenario.scenario import Scenario

RECORDED = ("llamacpp", "router")
"""What can be recorded without a server of the user's."""

app = typer.Typer(add_completion=False)


def _recorded(incomplete: str) -> list[str]:
    return completion.starting(incomplete, RECORDED)


@dataclass(frozen=True)
class Options:
    """The options of both uses."""

    engine: Annotated[
        str,
        typer.Argument(
            metavar="[ENGINE]",
            help=f"{' or '.join(RECORDED)}; left out with --url.",
            autocompletion=_recorded,
            show_default=False,
        ),
    ]
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO", help="A built-in scenario or a TOML file.", autocompletion=completion.scenarios
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help="The policy that describes this version, if there are several; of a router, its own policy.",
            autocompletion=completion.policies,
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="The file to write; by default SCENARIO.jsonl.gz.")] = None
    model: Annotated[str | None, typer.Option(help="Replace the scenario's model: smollm2, or a GGUF file.")] = None
    seed: Seed = None
    requests: Annotated[int | None, typer.Option(help="Run at most this many requests.", min=1)] = None
    threads: LlamaThreads = 1
    library: LibraryFolder = None
    url: Annotated[
        str | None,
        typer.Option(
            help="Send the scenario's traffic to this server instead: llama-server, vLLM or OpenAI's protocol."
        ),
    ] = None
    flags: Annotated[
        str | None,
        typer.Option(
            metavar='"-np 4 -c 4096"',
            help="With --url: what the server was started with; servers do not say all of it. "
            "Of a router: what it is started with besides.",
        ),
    ] = None
    log: Annotated[
        Path | None,
        typer.Option(
            help="With --url: llama-server's log, for its steps and decisions; start it with "
            "--log-file FILE --log-timestamps --log-prefix -lv 5."
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="With --url: continue a recording that ended early, and send what is missing."),
    ] = False
    key_env: KeyEnv = None
    allow_remote: AllowRemote = False
    timeout: Silence = 300.0
    limit: Annotated[float, typer.Option(help="With --url: the longest time for all of it, s.", min=0.1)] = 3600.0
    package: Annotated[
        str | None,
        typer.Option(
            help="Of a router: vllm-router, smg or sglang-router, installed in .venv/routers or KVSIM_ROUTERS.",
            autocompletion=completion.router_packages,
        ),
    ] = None
    workers: Annotated[int | None, typer.Option(help="Of a router: how many it has; 3.", min=1, max=64)] = None
    loads: Annotated[
        bool, typer.Option("--loads", help="Of a router: its workers report loads, as vLLM does; smg asks for them.")
    ] = False
    as_json: Json = False

    def scenario_called(self, name: str) -> Scenario:
        """The scenario that is run. Raises ``UserError``."""
        return ScenarioOptions(scenario=name, seed=self.seed, requests=self.requests).load()


@app.command()
@takes_groups
def record(options: Options) -> None:
    """Run a scenario on llama.cpp and record every operation and every cell, for kvsim conform.

    With --url, send its traffic to a running server and record what it was asked, when each token came and, with the
    log of a llama-server, every step and every decision: kvsim record --url http://127.0.0.1:8080 chat

    Prompts are random token ids (words, where a server takes no ids), so that they begin alike only where the scenario
    says so; prompts that quote an answer quote what came back. llama-server is made to repeat one token in its answers.

    Meanwhile, FILE.part has all requests that have ended. Sending stops if the server cannot be reached, wants
    a key, fails the first three requests, or is silent for three in a row; FILE then has what was gathered, and
    --resume sends the rest. Later failures are recorded as failures, and the command ends with 1. A server that asks by
    Retry-After to be asked again is, within --limit.

    A router is started before workers of our own and is sent requests that begin alike, and it is recorded which worker
    got each: kvsim record router --package smg --policy cache_aware
    """
    if options.url is not None:
        refuse(options, "only of a router", "package", "workers", "loads")
        _record_server(options)
        return
    if options.engine == "router":
        _record_router(options)
        return
    refuse(options, "only of a router", "package", "workers", "loads")
    refuse(
        options,
        "only with --url, for a server that runs",
        *("flags", "log", "resume", "key_env", "allow_remote"),
    )
    engine = options.engine
    if engine not in RECORDED:
        raise UserError(f"{no_such('recordable engine', engine, RECORDED)}; or record a server with --url")
    if options.scenario is None:
        raise UserError(f"{engine}: which scenario? kvsim record {engine} SCENARIO is expected")
    loaded = options.scenario_called(options.scenario)
    from kvsim.engines.live.engine_recording import record as record_run

    with RunProgress(f"recording {loaded.name}", loaded.build_workload().n_requests) as progress:
        done = record_run(
            loaded,
            options.out or Path(f"{loaded.name}.jsonl.gz"),
            options.policy,
            model=options.model,
            threads=options.threads,
            library=options.library,
            progress=progress,
        )
    if options.as_json:
        print_json(done.to_dict())
    else:
        typer.echo(
            f"Saved {done.path}: {done.records:,} operations of {done.engine}, with its cells after "
            f"{done.seen:,} of them.\nCompare {done.policy} with it: kvsim conform {engine} {done.path}"
        )
    if done.divergence is not None:
        warn([f"the recording ends where llama.cpp and {done.policy} diverge: {done.divergence}"])


def _record_router(options: Options) -> None:
    """Record a router, and say what was recorded. Raises ``UserError``."""
    refuse(
        options,
        "a router is recorded with requests of our own",
        *("scenario", "model", "threads", "library", "log", "resume", "key_env", "allow_remote"),
    )
    if options.package is None or options.policy is None:
        raise UserError("router: which one? kvsim record router --package vllm-router --policy cache_aware is expected")
    from kvsim.engines.live.router_recording import record_router

    path = options.out or Path(f"{options.package}-{options.policy}.jsonl.gz")
    asked = {"workers": options.workers, "requests": options.requests, "seed": options.seed}
    given = {name: value for name, value in asked.items() if value is not None}
    done = record_router(
        options.package, options.policy, path, flags=shlex.split(options.flags or ""), loads=options.loads, **given
    )
    if options.as_json:
        print_json(asdict(done))
    else:
        sent = f"{counted(done.requests, 'request')} that {done.package} {done.version} ({done.policy})"
        typer.echo(f"Saved {done.file}: {sent} sent to {counted(done.workers, 'worker')}.")
        typer.echo(f"Compare our router with it: kvsim conform router {done.file}")


def _record_server(options: Options) -> None:
    """Send a scenario's traffic to a server, and say what was recorded. Raises ``UserError``."""
    assert options.url is not None
    if options.scenario is not None:
        raise UserError(f"--url: the server says what it is; give the scenario alone, without {options.engine!r:.60}")
    refuse(options, "a server is recorded as it runs", "policy", "model", "threads")
    asked = ServerAsked(
        options.url,
        options.flags,
        options.key_env,
        options.allow_remote,
        log=options.log,
        resume=options.resume,
        timeout_s=options.timeout,
        limit_s=options.limit,
    ).asked()
    scenario = options.scenario_called(options.engine)
    from kvsim.engines.live.server_recording import record_server

    with RunProgress(f"recording {scenario.name} at {asked.address}", 100) as progress:
        path = options.out or Path(f"{scenario.name}.jsonl.gz")
        done = record_server(scenario, path, asked, progress=progress.share)
    if options.as_json:
        print_json(done.to_dict())
    elif done.stopped is None:
        _show_server(done)
    warn(done.warnings)
    if done.stopped is not None:
        answered = f"the {done.ended - done.failed:,} of {counted(done.requests, 'request')} that were answered"
        kept = f"{answered} are in {done.path}"
        message = f"{done.stopped}; {kept}; the same command with --resume sends the others"
        if done.interrupted:
            raise typer.Exit(fail(message, 130))
        raise UserError(message)
    if done.failed:
        failed = f"{done.failed:,} of {counted(done.requests, 'request')} failed: {done.why_failed}"
        raise typer.Exit(fail(f"{failed}; the others are in {done.path}", 1))


def _show_server(done: LiveRecording) -> None:
    """Print what was recorded."""
    steps = "" if done.steps is None else f", and {counted(done.steps, 'step')} of its log"
    typer.echo(f"Saved {done.path}: {counted(done.ended, 'request')} to {done.engine}{steps}.")
    times = [f"{name[:4].upper()} {ms['p50']:,.1f} ms" for name, ms in done.latencies.items()]
    if times:
        typer.echo(f"{' and '.join(times)} at the median.")
    if done.text:
        typer.echo("Prompts were sent as text: this server takes no token ids.")
    for line in done.assumed:
        typer.echo(f"Assumed: {line}.")
    if done.steps is not None:
        typer.echo(f"Compare our scheduler with it: kvsim conform llama-server {done.path}")
