"""``kvsim record --url``: record a server that runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvsim.cli.console import fail, print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.cli.servers import ServerAsked
from kvsim.errors import UserError, counted

if TYPE_CHECKING:
    from kvsim.engines.live.server_recording import LiveRecording
    from kvsim.scenario.scenario import Scenario

_INTERRUPTED = 130
_PERCENT = 100


def record_url(scenario: Scenario, server: ServerAsked, out: Path | None, *, as_json: bool) -> None:
    """Send a scenario's traffic to a server, and say what was recorded. Raises ``UserError``."""
    asked = server.asked()
    address = asked.address
    from kvsim.engines.live.server_recording import record_server

    with RunProgress(f"recording {scenario.name} at {address}", _PERCENT) as progress:
        path = out or Path(f"{scenario.name}.jsonl.gz")
        done = record_server(scenario, address, path, asked.asking, progress=progress.share)
    if as_json:
        print_json(done.to_dict())
    elif done.stopped is None:
        _show(done)
    warn(done.warnings)
    if done.stopped is not None:
        answered = f"the {done.ended - done.failed:,} of {counted(done.requests, 'request')} that were answered"
        kept = f"{answered} are in {done.path}"
        message = f"{done.stopped}; {kept}; the same command with --resume sends the others"
        if done.interrupted:
            raise typer.Exit(fail(message, _INTERRUPTED))
        raise UserError(message)


def _show(done: LiveRecording) -> None:
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
