"""The report of a server that was tuned: what to change, what it brings, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvsim.errors import counted
from kvsim.reports.formats import seconds, share
from kvsim.reports.held_report import explained
from kvsim.reports.recommendation_report import command_of
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.engines.live.tuning import Tuned

_SHOWN = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p50", "e2e_p95")


def tuning_report(done: Tuned) -> Report:
    """What to type, what that changes, and how sure it is."""
    return Report(
        f"{done.server}: settings for its traffic, so that {done.slo.text}",
        conclusions=[_headline(done), *_sureness(done)],
        about=[_level(done)] if done.slowdown else [],
        assumed=[f"assumed: {line}" for line in done.assumed],
        sections=[
            Section("What changes", tables=[_changes(done)] if done.changes else []),
            Section("Predicted and measured", tables=[_times(done)] if done.tried else [], text=_explained(done)),
            Section("To type", listings=[] if done.best is None else [command_of(done.best, done.folder)]),
            Section("What this rests on", text=[f"times: {done.profile}", *done.advice["limits"]]),
        ],
    )


def _level(done: Tuned) -> str:
    from kvsim.engines.live.tuning import SLOWDOWN

    return (
        f"No service level was asked for (--slo): 95 of 100 requests may take {SLOWDOWN} times as long as they do "
        "alone on the server that runs."
    )


def _headline(done: Tuned) -> str:
    if done.best is None:
        return str(done.advice["conclusion"])
    if not done.changes:
        return "Keep what runs: it is the best that was found."
    changed = ", ".join(f"{name} {now} → {then}" for name, now, then in done.changes)
    if done.better:
        return f"Change {changed}."
    if done.better is not None:
        return f"Keep what runs: nothing that was found is surely better. The nearest would be {changed}."
    why = f"the server's times could not be measured well ({done.refused})"
    if done.measured_better is not None:
        predicted, tried = ("better", "were not") if done.predicted_better else ("no better", "were better")
        why = f"the recommended settings should be {predicted}, and {tried} when they were tried"
    return f"No verdict: {why}. They would be {changed}."


def _sureness(done: Tuned) -> list[str]:
    lines = list(done.advice["gains"])
    if "then" not in done.tried:
        return [*lines, "These settings were not tried: --verify COMMAND starts a server with them beside the other."]
    if done.starved:
        lines.append("Other work kept a server from its processors when both were tried, so the trial tells nothing.")
    bound, _ = done.slo.worst(done.tried["now"].held.measured)
    now, then = (_figure(done.tried[name].held.measured, bound.measure) for name in ("now", "then"))
    level = "missed" if done.missed else "met"
    sent = counted(done.tried["then"].requests, "request")
    name = bound.measure.replace("_", " ")
    return [*lines, f"Tried with {sent}: {name} {now} now, {then} as recommended, which {level} the service level."]


def _explained(done: Tuned) -> list[str]:
    """What the machine's pace explains, of each server that was tried."""
    titles = {"now": "The server that runs", "then": "The recommended one"}
    return [f"{titles[name]}: {line}" for name, each in done.tried.items() for line in explained(each.held)]


def _changes(done: Tuned) -> Table:
    columns = [Column("option", 0), Column("now", 1), Column("then", 2)]
    return Table("What changes", columns, done.changes)


def _times(done: Tuned) -> Table:
    asked = {bound.measure: bound.text for bound in done.slo.asked}
    columns = [Column("", lambda name: asked.get(name, name.replace("_", " ")))]
    titles = {"now": "now", "then": "recommended"}
    for key, each in done.tried.items():
        for heading, values in ((f"{titles[key]}: predicted", each.held.predicted), ("measured", each.held.measured)):
            columns.append(Column(heading, partial(_figure, values)))
    return Table("Predicted and measured, of the same requests", columns, [*dict.fromkeys([*asked, *_SHOWN])])


def _figure(values: Mapping[str, float | None], name: str) -> str | None:
    value = values.get(name)
    return None if value is None else share(value) if name.endswith("_share") else seconds(value)
