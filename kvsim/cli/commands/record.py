"""``kvsim record``: a scenario's run on a real engine, to be compared with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import print_json, warn
from kvsim.cli.options import Json, LibraryFolder, LlamaThreads, ScenarioName, Seed, load_with
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError, no_such

RECORDED = ("llamacpp",)
"""The engines that can be recorded."""

app = typer.Typer(add_completion=False)


def _recorded(incomplete: str) -> list[str]:
    return completion.starting(incomplete, RECORDED)


@app.command()
def record(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help=f"{' or '.join(RECORDED)}.", autocompletion=_recorded)
    ],
    scenario: ScenarioName,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            help="The policy that describes this version, if there are several.",
            autocompletion=completion.policies,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default SCENARIO.jsonl.gz.")] = None,
    model: Annotated[str | None, typer.Option(help="Replace the scenario's model: smollm2, or a GGUF file.")] = None,
    seed: Seed = None,
    requests: Annotated[int | None, typer.Option(help="Run at most this many requests.", min=1)] = None,
    threads: LlamaThreads = 1,
    library: LibraryFolder = None,
    as_json: Json = False,
) -> None:
    """Run a scenario on llama.cpp and record every operation and every cell, for kvsim conform."""
    if engine not in RECORDED:
        raise UserError(no_such("recordable engine", engine, RECORDED))
    from kvsim.engines.recording import record as record_run

    loaded = load_with(scenario, seed, requests)
    with RunProgress(f"recording {loaded.name}", loaded.build_workload().n_requests) as progress:
        path = out or Path(f"{loaded.name}.jsonl.gz")
        done = record_run(loaded, path, policy, model=model, threads=threads, library=library, progress=progress)
    if as_json:
        print_json(done.to_dict())
    else:
        typer.echo(
            f"Saved {done.path}: {done.records:,} operations of {done.engine}, with its cells after "
            f"{done.seen:,} of them.\nCompare {done.policy} with it: kvsim conform {engine} {done.path}"
        )
    if done.divergence is not None:
        warn([f"the recording ends where llama.cpp and {done.policy} diverge: {done.divergence}"])
