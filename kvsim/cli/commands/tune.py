"""``kvsim tune``: from a server that runs to what to type for a better one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import completion
from kvsim.cli.commands.observe import serve
from kvsim.cli.console import answer, fail, note
from kvsim.cli.option_groups import TraceOptions, UsersOptions, takes_groups
from kvsim.cli.options import AllowRemote, Json, KeyEnv
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked
from kvsim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsim.engines.live.served import LiveServer

app = typer.Typer(add_completion=False)

_INTERRUPTED = 130


@dataclass(frozen=True)
class Asked:
    """The traffic, and what is wanted for it."""

    slo: Annotated[
        str | None,
        typer.Option(
            help='The service level, such as "ttft_p95<1s,tpot_p95<80ms"; by default, 95 of 100 requests take at most '
            "5 times as long as alone."
        ),
    ] = None
    trace: Annotated[Path | None, typer.Option(help="Your traffic as a trace file; by default it is observed.")] = None
    scenario: Annotated[
        str | None, typer.Option(help="Your traffic as a scenario.", autocompletion=completion.scenarios)
    ] = None

    def traffic(self, users: dict[str, Any] | None, options: TraceOptions) -> dict[str, Any] | None:
        """The traffic that is named, as arguments of ``recommend``; None: it is observed. Raises ``UserError``."""
        named = {"trace": self.trace, "source": self.scenario, "users": users}
        given = {key: value for key, value in named.items() if value is not None}
        if len(given) > 1:
            raise UserError(f"--trace, --scenario, --users: {len(given)} of them; one is expected, or none to observe")
        if self.trace is None and options != TraceOptions():
            raise UserError("--columns, --time and others about traces: for a trace given by --trace only")
        if self.trace is not None:
            given |= {**options.table, "trace_keys": options.keys}
        return given or None


@dataclass(frozen=True)
class Stages:
    """What each stage may take."""

    observe: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long traffic is observed; Ctrl-C goes on before.", min=1)
    ] = 600.0
    port: Annotated[int, typer.Option(help="The port that clients connect to meanwhile; 0: any.", min=0, max=65535)] = (
        8090
    )
    calibrate: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the server is measured.", min=1, max=86400)
    ] = 120.0
    search: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long settings are searched, at most.", min=1)
    ] = 300.0
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Start the recommended server beside the one that runs, and send both the same traffic: "
            '"llama-server -m FILE.gguf --port 8081"; the flags go to the end, or where {flags} stands.',
        ),
    ] = None
    verify_requests: Annotated[int, typer.Option(help="Requests that are sent to each server, at most.", min=1)] = 40


@dataclass(frozen=True)
class Running:
    """The server that runs."""

    url: Annotated[str, typer.Option(help="The server that runs, such as http://127.0.0.1:8080.")]
    model: Annotated[
        str | None, typer.Option(help="What it serves, if that cannot be read.", autocompletion=completion.models)
    ] = None
    flags: Annotated[
        str | None,
        typer.Option(help='What it was started with, such as "-np 4 -c 4096"; servers do not say all of it.'),
    ] = None
    key_env: KeyEnv = None
    allow_remote: AllowRemote = False


@app.command()
@takes_groups
def tune(
    running: Running,
    asked: Asked,
    users: UsersOptions,
    options: TraceOptions,
    stages: Stages,
    out: Annotated[Path | None, typer.Option(help="The folder for what is found; by default results/tune-URL.")] = None,
    as_json: Json = False,
) -> None:
    """Look at a server, observe its traffic, measure it, search its settings, try them, and say what to type.

    kvsim tune --url http://127.0.0.1:8080 --users 8 --prompt 1500 --output 200 --think 20s

    The server is put under load while it is measured and tried. Each stage has its time, and keeps what it found: the
    same command goes on where it ended, also after Ctrl-C. Without --verify COMMAND, only the server that runs is
    tried. The exit code is 1 if the recommended server was tried and did not meet the service level.
    """
    traffic = asked.traffic(users.of_users, options)
    found_at = ServerAsked(running.url, running.flags, running.key_env, running.allow_remote, running.model)
    server = found_at.found()
    from kvsim.engines.live.started_server import check_free, read_command
    from kvsim.engines.live.tuning import Budgets, Tuning
    from kvsim.engines.live.tuning import tune as go_through

    name = re.sub(r"[^\w.-]+", "-", server.address.url.split("//")[-1])
    folder = out or Path("results") / f"tune-{name}"
    command = None if stages.verify is None else read_command(stages.verify)
    if command is not None:
        check_free(command.address)
    if not as_json:
        note(f"{server.engine} at {server.address}, {server.model}; assumed:")
        for line in server.served.assumed or ("nothing",):
            note(f"  {line}")
    tuning = Tuning(
        server,
        traffic,
        asked.slo,
        command,
        folder,
        Budgets(stages.calibrate, stages.search, stages.verify_requests),
        _observing(server, stages, running.allow_remote),
    )
    try:
        with RunProgress(f"asking {running.url}", 100) as progress:
            found = go_through(tuning, progress, note)
    except KeyboardInterrupt:
        raise typer.Exit(fail(f"stopped; the same command goes on with what is in {folder}", _INTERRUPTED)) from None
    answer(found, as_json)
    if found.missed:
        raise typer.Exit(1)


def _observing(server: LiveServer, stages: Stages, allow_remote: bool) -> Callable[[Path], int]:
    """What observes a server's traffic into a file, and returns how many requests were answered."""

    def observe(path: Path) -> int:
        url, seconds = server.address.url, stages.observe
        return serve(url, path, port=stages.port, seconds=seconds, allow_remote=allow_remote).ends["completed"]

    return observe
