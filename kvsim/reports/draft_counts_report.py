"""The report of drafts of several lengths: what to draft, and what it gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.reports.formats import milliseconds, share, whole
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.experiments.draft_counts import DraftCounts


def draft_counts_report(found: DraftCounts) -> Report:
    """With drafts or without, and how many."""
    columns = [
        Column("drafted", "tokens", whole, "tokens that are drafted for a sequence in each step"),
        Column("cells", "cells", whole, "what is left beside what drafts, on a device"),
        Column("TPOT mean ms", lambda row: row["tpot_s"]["mean"], milliseconds),
        Column("TPOT P95 ms", lambda row: row["tpot_s"]["p95"], milliseconds),
        Column("TTFT P95 ms", lambda row: row["ttft_s"]["p95"], milliseconds),
        Column("tokens/s", "throughput_tokens_per_s", whole),
        Column("tokens a draft", "tokens_per_draft", "{:.2f}".format, "with the model's own"),
        Column("wasted", lambda row: row["wasted_tokens"] / (row["drafted_tokens"] or 1), share, "of what is drafted"),
        Column(
            "drafting", lambda row: row["drafting_s"] / row["makespan_s"], share, "share of the time, drafter alone"
        ),
    ]
    if len(found.loads) > 1:
        columns.insert(0, Column("load", "load", "{:g}".format, "multiple of the scenario's own"))
    method = found.scenario.speculation.method
    return Report(
        f"{found.scenario.name} under {found.policy}, drafts by {method}: with or without, and how many",
        [found.basis] if found.basis else [],
        sections=[Section(text=found.sentences, tables=[Table("Drafts", columns, found.rows, keys=2)])],
    )
