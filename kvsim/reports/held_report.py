"""Did it hold? What was predicted of servers, what was measured, and what their machine explains of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.errors import counted
from kvsim.reports.formats import LATENCIES, error, seconds, share
from kvsim.reports.report import Column, Report, Section, Table
from kvsim.reports.validation_report import ranking_section

if TYPE_CHECKING:
    from kvsim.engines.live.held import CheckedBound, Held
    from kvsim.engines.live.processor_share import ProcessorShare
    from kvsim.engines.live.server_validation import LiveValidation, ServerHeld
    from kvsim.engines.live.verification import Verification

_ALWAYS_SHOWN = ("ttft_p95", "tpot_p95", "e2e_p95")
"""What is told of a prediction at the machine's pace where there is no service level."""


def verification_report(done: Verification) -> Report:
    """What the recommended server did with the traffic, beside what was predicted."""
    failed = [] if done.first_error is None else [f"the first that failed: {done.first_error}"]
    return Report(
        f"Verified place {done.place} on {done.engine} at {done.url}: {counted(done.requests, 'request')} "
        f"in {done.seconds:,.1f} s",
        conclusions=_verdict(done.held),
        sections=[Section(tables=_tables(done.held), text=failed), Section(text=explained(done.held))],
    )


def live_validation_report(done: LiveValidation) -> Report:
    """For each server what was predicted before beside what was measured, and what its machine explains of it."""
    sections = [section for server in done.servers for section in _server(server)]
    return Report(sections=[*sections, *(ranking_section(ranking) for ranking in done.compared.rankings)])


def _server(server: ServerHeld) -> list[Section]:
    title = (
        f"{server.url}: {server.engine}, {server.settings}, {counted(server.requests, 'request')} in "
        f"{counted(len(server.runs), 'turn')}, predicted by profile {server.profile}"
    )
    assumed = dict.fromkeys(line for run in server.runs for line in run.assumed)
    lines = [*explained(server.held), *assumed, ""]
    return [Section(title, [title, *_verdict(server.held)], _tables(server.held)), Section("", lines)]


def _verdict(held: Held) -> list[str]:
    """Whether the service level was met, and whether that was predicted; nothing without a service level."""
    if not held.bounds:
        return []
    if held.met is None:
        return [
            "No verdict: other work kept the server from its processors, so that it was slower than its settings make "
            "it. Try again when the machine is quiet."
        ]
    met = "met" if held.met else "not met"
    if held.met == held.predicted_met:
        return [f"The service level was {met}, as predicted."]
    return [f"The service level was {met}, although the prediction was that it would{' not' * held.met} be."]


def _tables(held: Held) -> list[Table]:
    known = [each for each in held.latencies if each.predicted is not None or each.measured is not None]
    columns = [
        Column("", lambda each: _named(each.measure)),
        Column("predicted before", lambda each: each.predicted, seconds),
        Column("measured", lambda each: each.measured, seconds),
        Column("error", lambda each: each.error, error),
    ]
    if held.spread:
        columns.append(Column("run to run", lambda each: each.spread, "±{:.1%}".format))
    bounds = [
        Column(
            "bound",
            lambda each: each.bound.text or f"{each.bound.measure.removesuffix('_share')}≤{each.bound.limit:.0%}",
        ),
        Column("predicted before", lambda each: _figure(each, each.predicted)),
        Column("measured", lambda each: _figure(each, each.measured)),
        Column("met", lambda each: "yes" if each.met else "no"),
    ]
    checked = [Table("Bounds", bounds, held.checked)] if held.bounds else []
    return [*checked, Table("Predicted before, and measured", columns, known)]


def _named(measure: str) -> str:
    latency, statistic = measure.split("_")
    return f"{LATENCIES[latency + '_s']} {statistic if statistic == 'mean' else statistic.upper()}"


def _figure(each: CheckedBound, value: float | None) -> str | None:
    return share(value) if each.bound.is_share and value is not None else None if value is None else seconds(value)


def explained(held: Held) -> list[str]:
    """What the machine's pace explains of the difference, in words."""
    if held.pace is None:
        return []
    took = f"The server's steps took {held.pace:.2f} times as long as the profile says"
    took += "." if held.per_token is None else f", and its tokens {held.per_token:.2f} times as long as predicted."
    told = _of_processors(held.processors)
    if not held.slow:
        return [f"{took} {told}".strip()]
    asked = [each.measure for each in held.bounds if not each.is_share] or _ALWAYS_SHOWN
    again = ", ".join(
        f"{_named(each.measure)} {seconds(each.at_pace)} for {seconds(each.measured)} measured"
        for each in held.latencies
        if each.measure in asked and each.at_pace is not None and each.measured is not None
    )
    lines = [f"{took} At the pace of its steps the prediction is: {again}."]
    if held.starved:
        return [*lines, f"Other work had the processors, and that made it slow. {told}"]
    if held.processors is None or not held.processors.is_known:
        return [*lines, "Whether other work had its processors cannot be seen from here."]
    return [
        *lines,
        f"Other work does not explain it. {told} Either the machine is slower than when the profile was measured, or "
        "the profile is not of this server as it was started; kvsim calibrate --url measures it again.",
    ]


def _of_processors(known: ProcessorShare | None) -> str:
    """What a server had of the processors, as a sentence; empty if nothing is known."""
    if known is None or not known.is_known:
        return ""
    said: list[str] = []
    if known.waited is not None:
        said.append(f"it waited for a processor in {known.waited:.0%} of the time in which it had work")
    if known.others is not None:
        said.append(f"other programs used {known.others:.1f} of {counted(known.cores, 'processor')}")
    if known.stolen:
        said.append(f"other virtual machines took {known.stolen:.0%}")
    said.append(f"the load was {known.load:.1f}")
    return _sentence(said)


def _sentence(parts: Sequence[str]) -> str:
    *first, last = parts
    text = f"{', '.join(first)} and {last}" if first else last
    return f"{text[0].upper()}{text[1:]}."
