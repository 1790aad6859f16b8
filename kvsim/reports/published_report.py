"""The report of measured points of others: errors by model, device and load, the worst, and where memory decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvsim.engines.published.servers import FRONT_END, REQUESTS
from kvsim.engines.published.validation import APART, GROUPS
from kvsim.errors import counted
from kvsim.reports.formats import error, seconds, share, whole
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.engines.published.validation import PublishedValidation

_ON_CONSOLE = 24
"""Rows of the table of points in which memory decides; the file has all."""
_SUMMARY = "median error {}, P90 {}"


def published_report(validation: PublishedValidation) -> Report:
    """What was replayed and how far it is off, by what matters."""
    n, chosen = len(validation.table), validation.chosen
    drawn = f", drawn with seed {validation.seed}" if n + _failed(validation) < chosen else ""
    title = f"Measured points of real servers: {n:,} of {chosen:,} replayed{drawn}"
    sections = [Section("Not replayed", tables=[_reasons(validation)])] if validation.reasons else []
    if not n:
        return Report(title, sections=sections)
    conclusions = [
        f"{name}: {_SUMMARY.format(*(share(validation.error(key, part)) for part in ('median', 'p90')))}"
        for key, name in (("tpot", "TPOT"), ("ttft", "TTFT"), ("throughput", "Throughput"))
    ]
    if len(validation.pressed):
        of_memory = (validation.error(key, "median", "memory", "decides") for key in ("tpot", "ttft"))
        conclusions.append(
            "Where memory decides: median error {} of TPOT, {} of TTFT".format(*(share(each) for each in of_memory))
        )
    around, token = FRONT_END
    about = [
        f"Each point is a closed loop: as many clients as its concurrency, each with {REQUESTS} requests, one after "
        "another. TTFT and TPOT are means, which the points do not say; throughput is clients x output tokens over the "
        "time of an answer, of both sides.",
        f"Front end: {1e3 * around:g} ms around each request, and a tokenizer that takes prompt after prompt, "
        f"{1e6 * token:g} µs for each token; fitted to the third of InferenceMAX's points that may be looked at. "
        "Elsewhere clients, HTTP and tokenizer are not simulated.",
        *(f"Taken to be the server's: {line}" for line in validation.assumed),
    ]
    tables = [_errors(validation), _points("The worst", validation.worst, _WORST)]
    if len(validation.pressed):
        tables.append(_points("Where memory decides", validation.pressed, _PRESSED, _ON_CONSOLE))
    return Report(
        title,
        validation.bases[:1],
        about,
        conclusions,
        [Section("Errors", [], tables), *sections],
        _warnings(validation),
    )


_WORST = "The worst: by the factor that TTFT or TPOT is off"
_PRESSED = (
    "Where memory decides: the longest requests of all clients need more blocks than there are; with those of the same "
    "server that need half of the blocks"
)


def _failed(validation: PublishedValidation) -> int:
    """Points that were to be replayed and could not."""
    return sum(each.prediction is None and each.tried for each in validation.outcomes)


def _warnings(validation: PublishedValidation) -> list[str]:
    others = len(validation.bases) - 1
    return [f"{counted(others, 'more profile')}: --json has what each says of itself"] if others > 0 else []


def _errors(validation: PublishedValidation) -> Table:
    """Errors of all points and by each of the groups."""
    titles = {"tp": "TP", "concurrency": "clients up to", "isl": "prompt tokens up to"}
    columns = [
        Column("by", lambda row: titles.get(row["by"], row["by"])),
        Column("", "value", str),
        Column("points", "points", whole),
    ]
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("throughput", "tokens/s")):
        columns += [
            Column(f"{name} signed", f"{key}_bias", error),
            Column(f"{name} median", f"{key}_median", share),
            Column(f"{name} P90", f"{key}_p90", share),
        ]
    order = {name: i for i, name in enumerate(("all", *GROUPS, APART))}
    rows = sorted(validation.groups.to_dict("records"), key=lambda row: order[row["by"]])
    return Table(
        "Errors",
        columns,
        rows,
        "Errors: predicted over measured, less 1; median and P90 of their size",
        keys=2,
    )


def _points(title: str, points: Any, note: str, at_most: int | None = None) -> Table:
    """Points one by one."""
    columns = [
        Column("model", "model"),
        Column("device", lambda row: f"{row['servers']}, {row['device']}"),
        Column("weights", "precision"),
        Column("vLLM", "version"),
        Column("tokens", lambda row: f"{row['isl']}/{row['osl']}"),
        Column("clients", "concurrency", whole),
        Column("blocks", "blocks", whole),
        Column("needed", "needed_blocks", whole),
        Column("preempted", "preemptions", whole),
        Column("TTFT measured", "measured_ttft", seconds),
        Column("predicted", "predicted_ttft", seconds),
        Column("TPOT measured", "measured_tpot", seconds),
        Column("predicted", "predicted_tpot", seconds),
    ]
    return Table(title, columns, points.to_dict("records"), note, keys=1, at_most=at_most, all_in="published.csv")


def _reasons(validation: PublishedValidation) -> Table:
    """How many points were not replayed, and why."""
    rows: Sequence[Any] = [{"reason": reason, "points": n} for reason, n in validation.reasons.items()]
    return Table("Not replayed", [Column("points", "points", whole), Column("not replayed, since", "reason")], rows)
