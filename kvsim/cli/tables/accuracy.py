"""What ``kvsim accuracy`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import new_table
from real_engine.accuracy import Accuracy


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
