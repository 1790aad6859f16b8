"""The page of a sweep: what ``kvsim sweep`` saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from kvsim.reports.page import Cell, Figure, Page, Section, Table, milliseconds, number, words
from kvsim.reports.parts import footer, reproduce

_SHOWN = ("e2e_mean", "e2e_p95", "ttft_p95", "tpot_p95", "throughput_tokens_per_s", "failed_share", "preemptions")
_FAILURES = 200
"""Failed runs that are listed."""


def sweep_page(folder: Path, told: dict[str, Any], picture: str = "sweep.png") -> Page:
    """The page of a sweep in a folder, whose ``sweep.json`` is ``told``."""
    sweep, points = told["sweep"], told["points"]
    axes = list(sweep.get("axes", {}))
    numbers = {row["number"] for row in points}
    policies = list(dict.fromkeys(row["policy"] for row in points))
    asked = [
        f"What do {', '.join(axes) or 'policies'} change?",
        f"{len(numbers)} points under {', '.join(policies)}: {told['runs']:,} runs, {told['failed']:,} of them failed; "
        f"{sweep.get('replications', 1)} replications with the same requests under every policy.",
    ]
    figures = []
    if (folder / picture).is_file():
        title = f"{told['measure']} over the axes"
        figures.append(Figure.of_png(title, (folder / picture).read_bytes(), title, wide=True))
    sections = [
        Section("The best of each point", tables=[_best_table(told, axes)], figures=figures),
        Section("Every point", tables=[_points_table(told, axes)]),
    ]
    if told["failures"]:
        sections.append(Section("What failed", tables=[_failures_table(told)]))
    sections.append(reproduce("kvsim sweep sweep.toml", [("Sweep", tomli_w.dumps(sweep))]))
    return Page(f"Sweep: {told['name']}", asked, [str(told["conclusion"])], sections, footer())


def _best_table(told: dict[str, Any], axes: list[str]) -> Table:
    measure = told["measure"]
    heads = ["point", *axes, "best", measure, "second", "behind by", "more than chance", "left out"]
    rows = [
        [
            number(row["number"]),
            *(_setting(row[axis]) for axis in axes),
            words(_called(told, row)),
            _value(measure, row["value"]),
            words(row["second"] or "–"),
            _value("share" if row["behind"] is not None else measure, row["behind"]),
            words("yes" if row["holds"] else "no"),
            words(row.get("left_out") or "–"),
        ]
        for row in told["best"]
    ]
    note = "Behind by: the second over the best, less 1. Policies that failed requests, and the oracle, are left out; "
    note += "who is then alone has not won."
    return Table("The best policy of each point", heads, rows, note)


def _called(told: dict[str, Any], row: dict[str, Any]) -> str:
    forgets = " (forgets tokens)" if row["best"] in told.get("forgetful", ()) else ""
    return f"{row['best']}{forgets}{'' if row['rivals'] else ', alone'}"


def _points_table(told: dict[str, Any], axes: list[str]) -> Table:
    shown = list(dict.fromkeys((told["measure"], *_SHOWN)))
    heads = ["point", *axes, "policy", "runs"]
    for measure in shown:
        heads += [_head(measure), "±"]
    heads.append("verdict")
    rows = []
    for row in told["points"]:
        figures = []
        for measure in shown:
            value, low, high = (row.get(f"{measure}{end}") for end in ("", "_low", "_high"))
            half = None if value is None or low is None or high is None else max(high - value, value - low)
            figures += [_value(measure, row[measure]), _value(measure, half)]
        settings = [_setting(row[axis]) for axis in axes]
        rows.append([number(row["number"]), *settings, words(row["policy"]), number(row["replications"]), *figures])
        rows[-1].append(words(row.get("verdict") or "–"))
    note = f"Latencies in milliseconds; ± is half of the {told['level']:.0%} interval over replications."
    return Table("All points", heads, rows, note)


def _failures_table(told: dict[str, Any]) -> Table:
    failures = told["failures"]
    rows = [
        [number(row["number"]), words(row["policy"]), number(row["replication"]), words(row["error"])]
        for row in failures[:_FAILURES]
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


def _head(measure: str) -> str:
    return f"{measure.replace('_', ' ')}, ms" if _is_latency(measure) else measure.replace("_", " ")


def _is_latency(measure: str) -> bool:
    return measure.split("_")[0] in ("ttft", "tpot", "e2e")
