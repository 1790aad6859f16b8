"""What ``kvsim validate --recorded`` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvsim.cli.tables.formats import LATENCIES, new_table, seconds, show_assumed, show_basis, whole
from kvsim.engines.recordings.error_tables import WITHIN
from kvsim.engines.recordings.settings_ranking import Ranking
from kvsim.engines.recordings.validation import RecordedValidation, ServerRun
from kvsim.errors import counted

_RATES = {"output_tokens_per_s": "output tokens/s", "requests_per_s": "requests/s"}


def show_recorded(console: Console, validation: RecordedValidation) -> None:
    """Print a table for each recording, and what its prediction rests on."""
    for run in validation.runs:
        _show_run(console, run)
    for ranking in validation.rankings:
        _show_ranking(console, ranking)


def _show_run(console: Console, run: ServerRun) -> None:
    meta = run.recording.meta
    cards = f"{meta.tensor_parallel_size} x " if meta.tensor_parallel_size > 1 else ""
    console.print(
        f"{run.name}: {meta.engine} {meta.version}, {meta.model} on {cards}{meta.device}, "
        f"{counted(len(run.requests), 'request')}, times by the {meta.clock}",
        style="bold",
        highlight=False,
    )
    console.print(_latencies(run))
    if not run.steps.empty:
        _show_steps(console, run)
    _show_counts(console, run)
    if run.network_s is not None:
        console.print(
            f"The network and the front end take {seconds(run.network_s) if run.network_s else '0 s'} of each TTFT and "
            "end-to-end latency: one constant, fitted to the requests that waited least",
            highlight=False,
        )
    worst = "–" if run.worst != run.worst else f"{run.worst:.1%}"
    console.print(f"Largest error of a latency at mean, P50 or P99: {worst}", highlight=False)
    _show_verdict(console, run)
    show_assumed(console, run.assumed)
    if run.fitted_to is not None:
        console.print(f"The profile is fitted to {run.fitted_to}.", highlight=False)
    show_basis(console, run.profile.basis)
    console.print()


def _latencies(run: ServerRun) -> Table:
    """Latencies and rates, measured beside predicted."""
    errors = {"unfitted": "error without the constant", "unpaced": "at the profile's pace", "spread": "run to run"}
    shown = {key: name for key, name in errors.items() if run.table[key].notna().any()}
    table = new_table("", "measured", "predicted", "error", *shown.values())
    rows = run.table.to_dict("records")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        latency = row["measure"] in LATENCIES
        show = seconds if latency else _rate
        name = f"{LATENCIES[row['measure']]} {row['statistic']}" if latency else _RATES[row["measure"]]
        cells = [name, *(show(_known(row[side])) for side in ("measured", "predicted")), _error(row["error"])]
        cells += [f"±{row[key]:.1%}" if key == "spread" and row[key] == row[key] else _error(row[key]) for key in shown]
        ends = following is None or following["measure"] != row["measure"]
        table.add_row(*cells, end_section=ends and latency)
    return table


def _show_steps(console: Console, run: ServerRun) -> None:
    """How well single steps are predicted."""
    table = new_table("steps", "compared", "median error", "at the profile's pace", "median size of an error")
    for row in run.steps.to_dict("records"):
        table.add_row(
            str(row["kind"]),
            whole(row["steps"]),
            _error(row["at_pace"]),
            _error(row["error"]),
            f"{row['spread_at_pace']:.1%}",
        )
    console.print(table)
    if run.pace is not None:
        low, high = run.pace
        console.print(
            f"Every other step tells the machine's pace: they take {low:.2f} to {high:.2f} times what the profile "
            "says. The steps between are compared, and requests are predicted at this pace",
            highlight=False,
        )


def _show_verdict(console: Console, run: ServerRun) -> None:
    """Whether the errors are within their bounds."""
    if run.within is None:
        if not run.steps.empty:
            console.print("No verdict: its steps are much larger than those that the profile was fitted to")
        return
    bounds = " and ".join(f"{bound:.0%} at {statistic.upper()}" for statistic, bound in WITHIN.items())
    if run.spread is None:
        wider = "no requests were sent twice, so how much the server itself strays is not known"
    else:
        wider = f"or within what {' and '.join(run.spread.runs)}, the same requests again, differ by"
    outside = run.table[run.table["within"].eq(False)]
    named = ", ".join(f"{LATENCIES[m]} {s}" for m, s in zip(outside["measure"], outside["statistic"], strict=True))
    found = "all are" if run.within else f"not {named}"
    console.print(f"Within {bounds} ({wider}): {found}", highlight=False)


def _show_ranking(console: Console, ranking: Ranking) -> None:
    """Settings in the measured order, with what was predicted."""
    table = new_table("settings", "runs", f"{LATENCIES[ranking.measure]} measured", "predicted", "run to run")
    for row in ranking.table.to_dict("records"):
        spread = f"±{row['spread']:.1%}" if row["runs"] > 1 else "–"
        table.add_row(
            str(row["settings"]), whole(row["runs"]), seconds(row["measured"]), seconds(row["predicted"]), spread
        )
    console.print(table)
    tau = "not defined" if ranking.tau is None else f"{ranking.tau:.2f}"
    wrong = ranking.wrong
    verdict = (
        "no two that differ by more than the runs do are ranked wrong"
        if not wrong
        else f"{counted(wrong, 'pair')} ranked wrong"
    )
    console.print(f"Predicted and measured order: Kendall's tau {tau}; {verdict}", highlight=False)
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
