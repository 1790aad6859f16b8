"""The page of a sweep that ``kvsim sweep`` saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import plus_minus
from kvsim.experiments.sweep_result import MOST_DRAWN
from kvsim.reports.page import Cell, Page, Section, Table, milliseconds, number, words
from kvsim.reports.parts import footer, picture, plugin_options, plugins, reproduce

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_SHOWN = ("e2e_mean", "e2e_p95", "ttft_p95", "tpot_p95", "throughput_tokens_per_s", "failed_share", "preemptions")
_MOST_FAILURES = 200
"""Maximum number of failed runs listed."""


def sweep_page(folder: Path, saved: dict[str, Any], name: str = "sweep.png") -> Page:
    """Make the page of a sweep in a folder; ``saved`` is the content of its JSON file, ``name`` that of its picture."""
    import tomli_w

    sweep, points = saved["sweep"], saved["points"]
    axes = list(sweep.get("axes", {}))
    numbers = {row["number"] for row in points}
    policies = list(dict.fromkeys(row["policy"] for row in points))
    asked = [
        f"What is the effect of {', '.join(axes) or 'the policy'}?",
        f"{counted(len(numbers), 'point')} under {', '.join(policies)}: {counted(saved['runs'], 'run')}, "
        f"{saved['failed']:,} failed; {counted(sweep.get('replications', 1), 'replication')} with the same "
        "requests under every policy.",
        *saved.get("assumed", ()),
    ]
    asked += plugins(saved)
    figures = []
    if points:
        drawn = sweep.get("show", [saved["measure"]])[:MOST_DRAWN]
        title = f"{', '.join(drawn)} over the axes"
        figures.append(picture(folder / name, title, lambda: _drawn(sweep, points, drawn)))
    sections = [
        Section("The best policy at each point", tables=[_best_table(saved, axes)], figures=figures),
        Section("All points", tables=[_points_table(saved, axes)]),
    ]
    if saved.get("warnings"):
        sections.append(Section("Warnings", list(saved["warnings"])))
    if saved["failures"]:
        sections.append(Section("Failures", tables=[_failures_table(saved)]))
    sections.append(reproduce(f"kvsim sweep sweep.toml{plugin_options(saved)}", [("Sweep", tomli_w.dumps(sweep))]))
    return Page(
        f"Sweep: {saved['name']}", asked, [*saved.get("basis", ()), str(saved["conclusion"])], sections, footer()
    )


def _drawn(sweep: dict[str, Any], points: list[dict[str, Any]], measures: list[str]) -> Drawing:
    """The figure of a sweep, from the rows of its table."""
    import pandas as pd

    from kvsim.experiments.sweep_file import SweepFile
    from kvsim.reports.sweep_plots import sweep_figure

    return sweep_figure(pd.DataFrame(points), SweepFile.model_validate(sweep), measures)


def _best_table(saved: dict[str, Any], axes: list[str]) -> Table:
    measure = saved["measure"]
    heads = ["point", *axes, "best", measure, "second", "behind by", "more than chance", "left out"]
    rows = [
        [
            number(row["number"]),
            *(_setting(row[axis]) for axis in axes),
            words(_winner(saved, row)),
            _value(measure, row["value"]),
            words(row["second"] or "–"),
            _value("share" if row["behind"] is not None else measure, row["behind"]),
            words("yes" if row["holds"] else "no"),
            words(row.get("left_out") or "–"),
        ]
        for row in saved["best"]
    ]
    note = (
        "Behind by: how much worse the second is than the best, as a share. The oracle and "
        "policies that were left out are not compared; a policy without a competitor has not won."
    )
    return Table("The best policy at each point", heads, rows, note)


def _winner(saved: dict[str, Any], row: dict[str, Any]) -> str:
    drops = " (drops tokens)" if row["best"] in saved.get("forgetful", ()) else ""
    alike = f" (identical: {row['identical']})" if row.get("identical") else ""
    return f"{row['best']}{drops}{alike}{'' if row['rivals'] else ', no competitor'}"


def _points_table(saved: dict[str, Any], axes: list[str]) -> Table:
    shown = list(dict.fromkeys((saved["measure"], *saved.get("shown", ()), *_SHOWN)))
    heads = ["point", *axes, "policy", "runs", *(_head(measure) for measure in shown), "verdict"]
    rows = []
    for row in saved["points"]:
        figures = [_estimate(row, measure) for measure in shown]
        settings = [_setting(row[axis]) for axis in axes]
        rows.append([number(row["number"]), *settings, words(row["policy"]), number(row["replications"]), *figures])
        rows[-1].append(words(row.get("verdict") or "–"))
    note = f"Latencies in milliseconds; ± half the {saved['level']:.0%} interval over replications."
    return Table("All points", heads, rows, note)


def _failures_table(saved: dict[str, Any]) -> Table:
    failures = saved["failures"]
    rows = [
        [number(row["number"]), words(row["policy"]), number(row["replication"]), words(row["error"])]
        for row in failures[:_MOST_FAILURES]
    ]
    more = len(failures) - len(rows)
    note = f"And {more:,} more." if more else ""
    return Table("Failed runs", ["point", "policy", "replication", "reason"], rows, note)


def _setting(value: Any) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return words(str(value))
    return Cell(f"{value:g}" if isinstance(value, float) else f"{value}", float(value))


def _value(measure: str, value: float | None) -> Cell:
    return milliseconds(value) if _is_latency(measure) else number(value)


def _estimate(row: dict[str, Any], measure: str) -> Cell:
    """A measure with its interval, sorted by the measure."""
    value, low, high = (row.get(f"{measure}{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return _value(measure, value)
    interval = Interval(value, low, high)
    return Cell(plus_minus(interval, 1e3 if _is_latency(measure) else 1.0), value)


def _head(measure: str) -> str:
    return f"{measure.replace('_', ' ')}, ms" if _is_latency(measure) else measure.replace("_", " ")


def _is_latency(measure: str) -> bool:
    return measure.split("_")[0] in ("ttft", "tpot", "e2e")
