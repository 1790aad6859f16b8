"""What ``kvsim accuracy`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from kvsim.cli.tables.formats import new_table
from kvsim.experiments.estimates import Interval, replication_interval
from real_engine.accuracy import Accuracy
from real_engine.eviction_cost import EvictionCost


def show_accuracy(console: Console, found: Accuracy) -> None:
    """Print a row for each pair of storage types."""
    heads = ("bytes\nper cell", "logits\nRMSE", "top-1\nagreement", "perplexity", "perplexity\n/ f32")
    table = new_table("K", "V", *heads)
    for row in found.table.to_dict("records"):
        table.add_row(
            row["k"],
            row["v"],
            f"{row['cell_bytes']:,.0f}",
            f"{row['logits_rmse']:.3g}",
            f"{row['top1_agreement']:.1%}",
            f"{row['perplexity']:,.3f}",
            f"{row['perplexity_over_f32']:.4f}",
        )
    console.print(table)
    console.print(
        f"{found.model}, weights as {found.weights}, reads {found.tokens:,} tokens ({found.text}); "
        f"perplexity with f32 {found.reference_perplexity:,.3f}",
        style="dim",
        highlight=False,
    )


def show_eviction(console: Console, found: EvictionCost) -> None:
    """Print a row for each policy, budget and number of groups."""
    heads = ("budget", "groups", "perplexity", "perplexity\n/ full", "95 %\ninterval", "tokens\nheld", "blocks\nheld")
    table = new_table("policy", *heads)
    for row in found.table.to_dict("records"):
        interval = ratio_interval(row["by_passage"])
        table.add_row(
            row["policy"],
            f"{row['budget']:,}",
            f"{row['groups']}",
            f"{row['perplexity']:,.2f}",
            f"{row['perplexity_over_full']:.3f}",
            "–" if interval is None else f"{interval.low:.3f}–{interval.high:.3f}",
            f"{row['held']:.0%}",
            f"{row['blocks']:.0%}",
        )
    console.print(table)
    of = f"{found.passages} passages of {found.tokens:,} tokens" if found.passages > 1 else f"{found.tokens:,} tokens"
    console.print(
        f"{found.model}, weights as {found.weights}, reads {of} ({found.text}), the first {found.prompt:,} at once; "
        f"perplexity of the others with all tokens kept {found.reference_perplexity:,.2f}",
        style="dim",
        highlight=False,
    )


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
