"""``kvsim sweep``: many settings under several policies, resumable, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli import completion
from kvsim.cli.console import answer, fail, print_saved, warn
from kvsim.cli.option_groups import ServedOptions, takes_groups
from kvsim.cli.options import Check, Json, MaxFailedOrOwn, Plots, Plugins, Requests, Seed, load_plugins
from kvsim.cli.progress import SweepBar

if TYPE_CHECKING:
    from kvsim.experiments.sweep_result import SweepResult

_NAMED_FAILURES = 5
"""Failed runs that are named in warnings; the others are only counted."""

app = typer.Typer(add_completion=False)


@app.command()
@takes_groups
def sweep(
    of: ServedOptions,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A sweep's TOML file, or a built-in sweep.", autocompletion=completion.sweeps
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The store; by default results/NAME/sweep.sqlite.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.", min=1)] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the workers of this dask scheduler instead.")
    ] = None,
    seed: Seed = None,
    requests: Requests = None,
    show: Annotated[
        str | None,
        typer.Option(
            metavar="MEASURES",
            help="Measures to print and draw, such as ttft_p99,tpot_p99,goodput (which needs a table slo).",
        ),
    ] = None,
    max_failed: MaxFailedOrOwn = None,
    plots: Plots = False,
    check: Check = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Run many settings under several policies; an interrupted sweep continues when run again.

    Runs that fail are listed and do not stop the others; the exit code is still 0.
    """
    from kvsim.experiments.sweep import sweep as run
    from kvsim.experiments.sweep_file import left_of

    load_plugins(plugin)
    warn(filter(None, [of.device and left_of(file, of.device, of.engine)]))
    try:
        with SweepBar(file) as progress:
            result = run(
                file,
                out=out,
                workers=workers,
                dask=dask,
                progress=progress,
                seed=seed,
                requests=requests,
                show=show,
                max_failed=max_failed,
                check=check,
                **of.served,
            )
    except KeyboardInterrupt:
        # Before the first count, runs of an earlier call may be there.
        finished = f"{progress.done:,} of {progress.total:,} runs" if progress.total else "finished runs"
        raise typer.Exit(fail(f"stopped; {finished} are kept; the same command goes on from there", 130)) from None
    written = result.save(plots=plots)
    warn((*result.warnings, *_failures(result)))
    answer(result, as_json)
    if not as_json:
        print_saved((result.store, *written), written[0].parent)


def _failures(result: SweepResult) -> list[str]:
    """A line for each of the first failed runs, and one for the rest."""
    from kvsim.experiments.store import written_names

    failures = result.failures
    lines = [
        f"point {row['number']} under {row['policy']}, replication {row['replication']}: {row['error']}"
        for row in failures.head(_NAMED_FAILURES).to_dict("records")
    ]
    if len(failures) > _NAMED_FAILURES:
        listed_in = written_names(result.store)["failures"]
        lines.append(f"and {len(failures) - _NAMED_FAILURES:,} more failed runs, see {listed_in}")
    return lines
