"""``kvsim record``: a scenario's run on a real engine, to be compared with ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import fail, print_json, warn
from kvsim.cli.option_groups import ScenarioOptions
from kvsim.cli.options import AllowRemote, Json, KeyEnv, LibraryFolder, LlamaThreads, Seed, Silence
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked, refuse_options
from kvsim.errors import UserError, counted, no_such

if TYPE_CHECKING:
    from kvsim.engines.live.engine_recording import Recording
    from kvsim.engines.live.server_recording import LiveRecording
    from kvsim.scenario.scenario import Scenario

RECORDED = ("llamacpp",)
"""The engines that can be recorded without a server."""

app = typer.Typer(add_completion=False)


def _recorded(incomplete: str) -> list[str]:
    return completion.starting(incomplete, RECORDED)


_Engine = Annotated[
    str,
    typer.Argument(
        metavar="[ENGINE]",
        help=f"{' or '.join(RECORDED)}; left out with --url.",
        autocompletion=_recorded,
        show_default=False,
    ),
]
_Scenario = Annotated[
    str | None,
    typer.Argument(metavar="SCENARIO", help="A built-in scenario or a TOML file.", autocompletion=completion.scenarios),
]
_Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        "-p",
        help="The policy that describes this version, if there are several.",
        autocompletion=completion.policies,
    ),
]
_Out = Annotated[Path | None, typer.Option(help="The file to write; by default SCENARIO.jsonl.gz.")]
_Model = Annotated[str | None, typer.Option(help="Replace the scenario's model: smollm2, or a GGUF file.")]
_Url = Annotated[
    str | None,
    typer.Option(help="Send the scenario's traffic to this server instead: llama-server, vLLM or OpenAI's protocol."),
]
_Flags = Annotated[
    str | None,
    typer.Option(
        metavar='"-np 4 -c 4096"',
        help="With --url: what the server was started with; servers do not say all of it.",
    ),
]
_Log = Annotated[
    Path | None,
    typer.Option(
        help="With --url: llama-server's log, for its steps and decisions; start it with "
        "--log-file FILE --log-timestamps --log-prefix -lv 5."
    ),
]
_Resume = Annotated[
    bool,
    typer.Option("--resume", help="With --url: continue a recording that ended early, and send what is missing."),
]
_Limit = Annotated[float, typer.Option(help="With --url: the longest time for all of it, s.", min=0.1)]


@app.command()
def record(
    engine: _Engine,
    scenario: _Scenario = None,
    policy: _Policy = None,
    out: _Out = None,
    model: _Model = None,
    seed: Seed = None,
    requests: Annotated[int | None, typer.Option(help="Run at most this many requests.", min=1)] = None,
    threads: LlamaThreads = 1,
    library: LibraryFolder = None,
    url: _Url = None,
    flags: _Flags = None,
    log: _Log = None,
    resume: _Resume = False,
    key_env: KeyEnv = None,
    allow_remote: AllowRemote = False,
    timeout: Silence = 300.0,
    limit: _Limit = 3600.0,
    as_json: Json = False,
) -> None:
    """Run a scenario on llama.cpp and record every operation and every cell, for kvsim conform.

    With --url, send its traffic to a running server and record what it was asked, when each token came and, with the
    log of a llama-server, every step and every decision: kvsim record --url http://127.0.0.1:8080 chat

    Prompts are random token ids (words, where a server takes no ids), so that they begin alike only where the scenario
    says so; prompts that quote an answer quote what came back. llama-server is made to repeat one token in its answers.

    Meanwhile, FILE.part has all requests that have ended. Sending stops if the server cannot be reached, wants
    a key, fails the first three requests, or is silent for three in a row; FILE then has what was gathered, and
    --resume sends the rest. Later failures are recorded as failures.
    """
    if url is not None:
        if scenario is not None:
            raise UserError(f"--url: the server says what it is; give the scenario alone, without {engine!r:.60}")
        own = {"--policy": policy is not None, "--model": model is not None}
        refuse_options(own | {"--threads": threads != 1}, "a server is recorded as it runs")
        asked = ServerAsked(url, flags, key_env, allow_remote, log=log, resume=resume, timeout_s=timeout, limit_s=limit)
        _record_url(ScenarioOptions(engine, seed=seed, requests=requests).load(), asked, out, as_json=as_json)
        return
    given = {"--flags": flags is not None, "--log": log is not None, "--resume": resume}
    given |= {"--key-env": key_env is not None, "--allow-remote": allow_remote}
    refuse_options(given, "only with --url, for a server that runs")
    if engine not in RECORDED:
        raise UserError(f"{no_such('recordable engine', engine, RECORDED)}; or record a server with --url")
    if scenario is None:
        raise UserError(f"{engine}: which scenario? kvsim record {engine} SCENARIO is expected")
    loaded = ScenarioOptions(scenario, seed=seed, requests=requests).load()
    from kvsim.engines.live.engine_recording import record as record_run

    with RunProgress(f"recording {loaded.name}", loaded.build_workload().n_requests) as progress:
        path = out or Path(f"{loaded.name}.jsonl.gz")
        done = record_run(loaded, path, policy, model=model, threads=threads, library=library, progress=progress)
    _tell(done, engine, as_json=as_json)


def _tell(done: Recording, engine: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done.to_dict())
    else:
        typer.echo(
            f"Saved {done.path}: {done.records:,} operations of {done.engine}, with its cells after "
            f"{done.seen:,} of them.\nCompare {done.policy} with it: kvsim conform {engine} {done.path}"
        )
    if done.divergence is not None:
        warn([f"the recording ends where llama.cpp and {done.policy} diverge: {done.divergence}"])


def _record_url(scenario: Scenario, server: ServerAsked, out: Path | None, *, as_json: bool) -> None:
    """Send a scenario's traffic to a server, and say what was recorded. Raises ``UserError``."""
    asked = server.asked()
    from kvsim.engines.live.server_recording import record_server

    with RunProgress(f"recording {scenario.name} at {asked.address}", 100) as progress:
        path = out or Path(f"{scenario.name}.jsonl.gz")
        done = record_server(scenario, path, asked, progress=progress.share)
    if as_json:
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
    if done.failed:
        typer.echo(f"{counted(done.failed, 'request')} failed; {done.first_failure}")
    if done.steps is not None:
        typer.echo(f"Compare our scheduler with it: kvsim conform llama-server {done.path}")
