"""``kvsim record``: a scenario's run on a real engine, to be held against ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.console import print_json, warn
from kvsim.cli.progress import RunProgress
from kvsim.errors import UserError
from kvsim.scenario.scenario import load_scenario

LibraryFolder = Annotated[
    Path | None,
    typer.Option(
        envvar="KVSIM_LLAMA_CPP",
        help="llama.cpp: a folder with another llama-cpp-python (pip install --target) than the installed one.",
    ),
]
Threads = Annotated[int, typer.Option(help="llama.cpp: threads that it computes with.", min=1, max=512)]
RECORDED = ("llamacpp",)


def record(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="llamacpp.")],
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="A built-in scenario or a TOML file.")],
    policy: Annotated[
        str | None, typer.Option("--policy", "-p", help="The policy that describes it, where there are several.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default SCENARIO.jsonl.gz.")] = None,
    model: Annotated[str | None, typer.Option(help="Replace the scenario's model: smollm2, or a GGUF file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.")] = None,
    requests: Annotated[int | None, typer.Option(help="Run this many requests at most.", min=1)] = None,
    threads: Threads = 1,
    library: LibraryFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run a scenario on the real llama.cpp and write down every operation and every cell, for kvsim conform."""
    if engine not in RECORDED:
        raise UserError(f"no engine called {engine!r} can be recorded; there is {', '.join(RECORDED)}")
    from kvsim.engines.recording import record as record_run

    loaded = load_scenario(scenario)
    if seed is not None:
        loaded = load_scenario(loaded, seed=seed)
    if requests is not None:
        loaded = load_scenario(loaded, **{f"workload__{loaded.workload.count_key}": requests})
    with RunProgress(f"recording {loaded.name}", loaded.build_workload().n_requests) as progress:
        path = out or Path(f"{loaded.name}.jsonl.gz")
        done = record_run(loaded, path, policy, model=model, threads=threads, library=library, progress=progress)
    if as_json:
        print_json(done.to_dict())
    else:
        typer.echo(
            f"Saved {done.path}: {done.records:,} operations of {done.engine}, its cells after {done.seen:,} of them.\n"
            f"Hold {done.policy} against it with: kvsim conform {engine} {done.path}"
        )
    if done.divergence is not None:
        warn([f"the recording ends where llama.cpp and {done.policy} part: {done.divergence}"])
