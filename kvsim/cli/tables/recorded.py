"""What ``kvsim validate --recorded`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import LATENCIES, new_table, seconds, show_assumed, show_basis, whole
from kvsim.engines.recorded_validation import RecordedValidation, ServerRun

_RATES = {"output_tokens_per_s": "output tokens/s", "requests_per_s": "requests/s"}


def show_recorded(console: Console, validation: RecordedValidation) -> None:
    """Print a table for each recording, and what its prediction rests on."""
    for run in validation.runs:
        _show_run(console, run)


def _show_run(console: Console, run: ServerRun) -> None:
    meta, fitted = run.recording.meta, run.network_s is not None
    cards = f"{meta.tensor_parallel_size} x " if meta.tensor_parallel_size > 1 else ""
    console.print(
        f"{run.name}: {meta.engine} {meta.version}, {meta.model} on {cards}{meta.device}, "
        f"{len(run.requests):,} requests, times by the {meta.clock}",
        style="bold",
        highlight=False,
    )
    table = new_table("", "measured", "predicted", "error", *(["error without the constant"] if fitted else []))
    rows = run.table.to_dict("records")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        latency = row["measure"] in LATENCIES
        show = seconds if latency else _rate
        name = f"{LATENCIES[row['measure']]} {row['statistic']}" if latency else _RATES[row["measure"]]
        cells = [name, *(show(_known(row[side])) for side in ("measured", "predicted")), _error(row["error"])]
        ends = following is None or following["measure"] != row["measure"]
        table.add_row(*cells, *([_error(row["unfitted"])] if fitted else []), end_section=ends and latency)
    console.print(table)
    _show_counts(console, run)
    if run.network_s is not None:
        console.print(
            f"The network and the front end take {seconds(run.network_s) if run.network_s else '0 s'} of each TTFT and "
            "end-to-end latency: one constant, fitted to the requests that waited least",
            highlight=False,
        )
    worst = "–" if run.worst != run.worst else f"{run.worst:.1%}"
    console.print(f"Largest error of a latency at mean, P50 or P99: {worst}", highlight=False)
    show_assumed(console, run.assumed)
    show_basis(console, run.profile.basis)
    console.print()


def _show_counts(console: Console, run: ServerRun) -> None:
    """Requests running and waiting over time, and preemptions."""
    for name, load in run.loads.items():
        console.print(
            f"Requests {name}, mean: {load['measured']:.1f} measured, {load['predicted']:.1f} predicted; "
            f"second by second they differ by {load['difference']:.1f}",
            highlight=False,
        )
    known = run.recording.preemptions
    measured = "not recorded" if known is None else f"{known:,} measured"
    console.print(f"Preemptions: {measured}, {run.preemptions:,} predicted", highlight=False)


def _known(value: float) -> float | None:
    return None if value != value else value


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else whole(value)


def _error(value: float) -> str:
    return "–" if value != value else f"{value:+.1%}"
