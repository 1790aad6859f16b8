"""The report of ``kvsim why``: what requests spend their time on, and what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.advice.why.contrast import CAUSES, seconds
from kvsim.errors import counted
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.advice.why.contrast import Contrast
    from kvsim.advice.why.diagnosis import Diagnosis


def diagnosis_report(found: Diagnosis) -> Report:
    """The diagnosis in words, both contrasts, and what to try."""
    kind = "measured" if found.measured else "simulated"
    counts = f"{counted(len(found.completed), 'completed request')} ({kind})"
    if found.failed:
        counts += f"; {found.failed:,} failed and are not in the table"
    tried = []
    for remedy in found.remedies:
        engine = remedy.engine(found.policy)
        lines = [f"here:   {remedy.kvsim}", *([f"engine: {engine}"] if engine else [])]
        tried.append((f"- {remedy.what}", "\n".join(lines)))
    return Report(
        f"{found.scenario} under {found.policy}, {f'scheduler {found.scheduler}, ' if found.scheduler else ''}{counts}",
        [found.basis] if found.basis else [],
        [line for line in (found.note, found.sentence, found.router, found.checkpoints) if line],
        sections=[
            Section("Late against early", tables=[contrast_table(found.over_time)]),
            Section("Slow against fast", tables=[contrast_table(found.across)]),
            Section("To try", ["To try"] if tried else [], listings=tried),
        ],
    )


def contrast_table(contrast: Contrast) -> Table:
    """The causes that took any time, and their sum."""
    first, second = contrast.names
    rows = [
        (
            CAUSES[cause],
            *(row[name] for name in (first, second, "difference")),
            _share(contrast, row["share"], row["difference"]),
        )
        for cause, row in contrast.rows()
        if row[first] or row[second]
    ]
    whole = "100%" if contrast.slower and contrast.adds_up else None
    rows.append(("in all", *contrast.means_s, contrast.difference_s, whole))
    note = ""
    if contrast.slower and not contrast.adds_up:
        added = seconds(contrast.difference_s + contrast.given_back_s)
        note = f"share: of the {added} that causes add; other causes give back {seconds(contrast.given_back_s)}"
    heads = ["mean seconds spent on", first, second, "difference"]
    columns = [Column(head, i, seconds if i else str) for i, head in enumerate(heads)]
    return Table(f"{second} against {first}", [*columns, Column("share", 4)], rows, note)


def _share(contrast: Contrast, share: float, difference: float) -> str | None:
    return f"{share:.0%}" if contrast.slower and difference > 0 else None
