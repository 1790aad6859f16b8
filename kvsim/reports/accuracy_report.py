"""The reports of ``kvsim accuracy``: what narrower K and V cost, and what token eviction does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.experiments.estimates import Interval, replication_interval
from kvsim.reports.formats import share, whole
from kvsim.reports.report import Column, Report, Section, Table

if TYPE_CHECKING:
    from real_engine.accuracy import Accuracy
    from real_engine.eviction_cost import EvictionCost


def accuracy_report(found: Accuracy) -> Report:
    """A row for each pair of storage types."""
    columns = [
        Column("K", "k"),
        Column("V", "v"),
        Column("bytes per cell", "cell_bytes", whole),
        Column("logits RMSE", "logits_rmse", "{:.3g}".format, "distance of the logits from those of f32"),
        Column("top-1 agreement", "top1_agreement", share, "share of tokens of which the likeliest is the same"),
        Column("perplexity", "perplexity", "{:,.3f}".format),
        Column("perplexity / f32", "perplexity_over_f32", "{:.4f}".format),
    ]
    note = (
        f"{found.model}, weights as {found.weights}, reads {found.tokens:,} tokens ({found.text}); "
        f"perplexity with f32 {found.reference_perplexity:,.3f}"
    )
    return Report(sections=[Section(tables=[Table("Accuracy", columns, found.table.to_dict("records"), note)])])


def eviction_report(found: EvictionCost) -> Report:
    """A row for each policy, budget and number of groups."""
    columns = [
        Column("policy", "policy"),
        Column("budget", "budget", whole),
        Column("groups", "groups"),
        Column("perplexity", "perplexity", "{:,.2f}".format),
        Column("perplexity / full", "perplexity_over_full", "{:.3f}".format),
        Column("95 % interval", lambda row: ratio_interval(row["by_passage"]), lambda i: f"{i.low:.3f}–{i.high:.3f}"),
        Column("tokens held", "held", "{:.0%}".format),
        Column("blocks held", "blocks", "{:.0%}".format),
    ]
    of = f"{found.passages} passages of {found.tokens:,} tokens" if found.passages > 1 else f"{found.tokens:,} tokens"
    note = (
        f"{found.model}, weights as {found.weights}, reads {of} ({found.text}), the first {found.prompt:,} at once; "
        f"perplexity of the others with all tokens kept {found.reference_perplexity:,.2f}"
    )
    return Report(sections=[Section(tables=[Table("Token eviction", columns, found.table.to_dict("records"), note)])])


def eviction_object(found: EvictionCost) -> dict[str, Any]:
    """The object that ``--json`` prints: with the interval of each ratio, whose ends are None for a single passage."""
    printed = found.to_dict()
    for row in printed["settings"]:
        interval = ratio_interval(row["by_passage"])
        row["low"] = None if interval is None else interval.low
        row["high"] = None if interval is None else interval.high
    return printed


def ratio_interval(by_passage: Sequence[float]) -> Interval | None:
    """The interval of the geometric mean of a ratio over passages; None for a single one."""
    if len(by_passage) < 2:
        return None
    logs = replication_interval(np.log(by_passage))
    value, low, high = np.exp([logs.value, logs.low, logs.high]).tolist()
    return Interval(value, low, high)
