"""``kvsim sweep``: many settings under several policies, resumable, with intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvsim.cli.console import console, print_json, warn
from kvsim.cli.progress import SweepBar
from kvsim.experiments.measures import LATENCIES
from kvsim.experiments.store import written_names
from kvsim.experiments.sweep_result import SweepResult

_MOST_ROWS = 60
"""Points that a table on the terminal shows; all are in the table that is saved."""

_SHOWN = ("e2e_mean", "ttft_p95", "e2e_p95", "throughput_tokens_per_s")


def sweep(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A sweep's TOML file, or a built-in sweep.")],
    out: Annotated[Path | None, typer.Option(help="The store; by default results/NAME/sweep.sqlite.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.", min=1)] = None,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A dask scheduler, to run there instead.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the scenario's seed.")] = None,
    requests: Annotated[int | None, typer.Option(help="Run this many requests (of sessions: conversations).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run many settings under several policies. Cut short, it goes on where it was when called again.

    Runs that fail are listed and stop nothing; the exit code is 0 all the same.
    """
    from kvsim.experiments.sweep import sweep as run

    try:
        with SweepBar(file) as progress:
            result = run(file, out=out, workers=workers, dask=dask, progress=progress, seed=seed, requests=requests)
    except KeyboardInterrupt:
        finished = f"{progress.done:,} of {progress.total:,} runs are kept"
        typer.echo(f"kvsim: stopped; {finished}; the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    written = result.save()
    if as_json:
        print_json(result.to_dict())
    else:
        _show(console(), result)
        typer.echo(f"\nSaved {', '.join(path.name for path in (result.store, *written))} in {written[0].parent}/")
    failures, listed_in = result.failures, written_names(result.store)["failures"]
    if len(failures):
        warn(
            [
                *(_failed(row) for row in failures.head(5).to_dict("records")),
                *([f"and {len(failures) - 5:,} more failed runs, see {listed_in}"] if len(failures) > 5 else []),
            ]
        )


def _failed(row: dict[Any, Any]) -> str:
    return f"point {row['number']} under {row['policy']}, replication {row['replication']}: {row['error']}"


def _show(console: Console, result: SweepResult) -> None:
    table, plan = result.table, result.plan
    shown = tuple(dict.fromkeys((result.measure, *_SHOWN)))
    heads = ["point", *plan.axes, "policy", "runs", *(_head(measure) for measure in shown), ""]
    printed = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        printed.add_column(head, justify="left" if head in ("policy", "") else "right")
    before = None
    for row in table.head(_MOST_ROWS).to_dict("records"):
        new = row["number"] != before
        before = row["number"]
        point = [str(row["number"]), *(_value(row[key]) for key in plan.axes)] if new else [""] * (1 + len(plan.axes))
        runs = f"{row['replications']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        figures = [_figure(row, measure) for measure in shown]
        printed.add_row(*point, str(row["policy"]), runs, *figures, _brief(str(row["verdict"])))
    console.print(printed)
    if len(table) > _MOST_ROWS:
        file = written_names(result.store)["csv"]
        console.print(f"and {len(table) - _MOST_ROWS:,} more rows, see {file}", style="dim")
    n_failed = len(result.failures)
    console.print(
        f"{len(result.rows):,} runs, {n_failed:,} failed; latencies in milliseconds, ± half of the "
        f"{result.level:.0%} interval over replications; without the warm-up ({plan.file.warmup})",
        style="dim",
        highlight=False,
    )
    console.print(f"[bold]{result.name}[/]: {result.conclusion()}", highlight=False)


def _head(measure: str) -> str:
    return {"throughput_tokens_per_s": "tokens/s"}.get(measure, measure.replace("_", " "))


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _brief(verdict: str) -> str:
    """A verdict without its details."""
    return "; ".join(part.split(":")[0] for part in verdict.split("; "))


def _figure(row: dict[Any, Any], measure: str) -> str:
    value = row[measure]
    # An end may have been cut off at a bound, so the wider side is told; a flag has no interval.
    half = max(row.get(f"{measure}_high", math.inf) - value, value - row.get(f"{measure}_low", -math.inf))
    if value != value:
        return "–"
    scale = 1000 if measure.split("_")[0] in LATENCIES else 1
    said = f"{scale * value:,.4g}" if abs(scale * value) < 1e4 else f"{scale * value:,.0f}"
    return f"{said} ±{scale * half:.2g}" if half < float("inf") else said
