"""The report of a sweep: the best policy at each point, and all points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import plus_minus
from kvsim.experiments.measures import SHARES, is_latency
from kvsim.experiments.policy_code import plugins_line
from kvsim.experiments.store import written_names
from kvsim.reports.formats import interval_of, number, setting, whole
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.experiments.sweep_result import SweepResult

Saved = Mapping[str, Any]

_MOST_ROWS = 60
"""Points in a table on a console; the table that is saved has all of them."""
_MOST_FAILURES = 200
"""Maximum number of failed runs listed."""
_SHOWN = ("e2e_mean", "e2e_p95", "ttft_p95", "tpot_p95", "throughput_tokens_per_s", "failed_share", "preemptions")
"""Measures that a page has of every point, beside those that were asked for."""
_HEADINGS = {"throughput_tokens_per_s": "tokens/s", "goodput_requests_per_s": "goodput, requests/s"}


def sweep_report(result: SweepResult) -> Report:
    """A row for each point and policy with the measures that were asked for, and the conclusion."""
    return sweep_of(result.to_dict() | {"csv": written_names(result.store)["csv"]}, whole_table=False)


def sweep_of(saved: Saved, *, whole_table: bool = True) -> Report:
    """The report of a sweep from the object that ``--json`` prints; ``whole_table``: with all usual measures."""
    sweep, points = saved["sweep"], saved["points"]
    axes = list(sweep.get("axes", {}))
    policies = list(dict.fromkeys(row["policy"] for row in points))
    plugins = plugins_line(saved.get("plugins", ()))
    level = f"{saved['level']:.0%}"
    warmup = f"; without the warm-up ({sweep['warmup']})" if "warmup" in sweep else ""
    about = [
        f"What is the effect of {', '.join(axes) or 'the policy'}?",
        f"{counted(len({row['number'] for row in points}), 'point')} under {', '.join(policies)}: "
        f"{counted(saved['runs'], 'run')}, {saved['failed']:,} of which could not finish; "
        f"{counted(sweep.get('replications', 1), 'replication')} with the same requests under every policy.",
        *(f"scheduler {name}: {', '.join(policies)}" for name, policies in saved.get("schedulers", {}).items()),
        *filter(None, [", ".join(saved.get("servers", ()))]),
        *saved.get("assumed", ()),
        *([plugins] if plugins else []),
    ]
    sections = [
        Section("All points", tables=[_points(saved, axes, whole_table)]),
        Section(
            notes=[
                f"latencies in milliseconds, shares in percent; ± half of the {level} interval over "
                f"replications{warmup}",
                *saved.get("notes", ()),
            ]
        ),
    ]
    if whole_table:
        sections.insert(0, Section("The best policy at each point", tables=[_best(saved, axes)]))
        if saved.get("warnings"):
            sections.append(Section("Warnings", list(saved["warnings"])))
        if saved["failures"]:
            sections.append(Section("Failures", tables=[_failures(saved)]))
    return Report(f"Sweep: {saved['name']}", saved.get("basis", ()), about, [str(saved["conclusion"])], sections)


def _axes(axes: list[str]) -> list[Column]:
    return [Column("point", "number"), *(Column(axis, axis, setting) for axis in axes)]


def _points(saved: Saved, axes: list[str], whole_table: bool) -> Table:
    more = _SHOWN if whole_table else ()
    shown = dict.fromkeys((*(() if not whole_table else (saved["measure"],)), *saved.get("shown", ()), *more))
    columns = [*_axes(axes), Column("policy", "policy"), Column("runs", "replications", whole)]
    if any(row["failed"] for row in saved["points"]):
        columns.append(Column("of these failed", "failed", whole))
    columns += [_measure(measure) for measure in shown]
    columns.append(
        Column("remarks", lambda row: row.get("verdict") or "", lambda text: text if whole_table else _brief(text))
    )
    return Table(
        "All points", columns, saved["points"], keys=2 + len(axes), at_most=_MOST_ROWS, all_in=saved.get("csv", "")
    )


def _measure(measure: str) -> Column:
    """A measure of a point with its interval; a flag has none."""
    scale, unit = (1e3, ", ms") if is_latency(measure) else (100.0, ", %") if measure in SHARES else (1.0, "")

    def show(interval: Interval) -> str:
        return plus_minus(interval, scale)

    heading = _HEADINGS.get(measure, f"{measure.replace('_', ' ')}{unit}")
    return Column(heading, lambda row: interval_of(row, measure), show)


def _brief(verdict: str) -> str:
    """A verdict without its details."""
    return "; ".join(part.split(":")[0] for part in verdict.split("; "))


def _best(saved: Saved, axes: list[str]) -> Table:
    scale, unit = (1e3, ", ms") if is_latency(saved["measure"]) else (1.0, "")
    columns = [
        *_axes(axes),
        Column("best", lambda row: _winner(saved, row)),
        Column(f"{saved['measure'].replace('_', ' ')}{unit}", "value", lambda value: number(scale * value)),
        Column("second", "second"),
        Column("behind by", "behind", number, "how much worse the second is than the best, as a share"),
        Column("more than chance", lambda row: "yes" if row["holds"] else "no"),
        Column("left out", lambda row: row.get("left_out") or None),
    ]
    note = (
        "Behind by: how much worse the second is than the best, as a share. The oracle and "
        "policies that were left out are not compared; a policy without a competitor has not won."
    )
    return Table("The best policy at each point", columns, saved["best"], note)


def _winner(saved: Saved, row: Saved) -> str:
    drops = " (drops tokens)" if row["best"] in saved.get("forgetful", ()) else ""
    alike = f" (identical: {row['identical']})" if row.get("identical") else ""
    return f"{row['best']}{drops}{alike}{'' if row['rivals'] else ', no competitor'}"


def _failures(saved: Saved) -> Table:
    columns = [
        Column("point", "number"),
        Column("policy", "policy"),
        Column("replication", "replication"),
        Column("reason", "error"),
    ]
    more = len(saved["failures"]) - _MOST_FAILURES
    note = f"And {more:,} more." if more > 0 else ""
    return Table("Failed runs", columns, saved["failures"][:_MOST_FAILURES], note)
