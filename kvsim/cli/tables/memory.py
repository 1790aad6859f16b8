"""What ``kvsim memory`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.advice.memory.set_ups import MemoryReport
from kvsim.cli.tables.formats import new_table, size


def show_memory(console: Console, report: MemoryReport) -> None:
    """Print what each part of each set-up takes beside what it needs; then what the columns mean."""
    heads = ("weights\n/ needed", "cache\n/ needed", "work\n/ needed", "runtime", "resident", "peak")
    table = new_table("set-up", *heads, "measured\n/ needed", "with\nruntime")
    for row in report.table.reset_index().to_dict("records"):
        parts = [f"{size(row[part])} / {size(row[f'needed_{part}'])}" for part in ("weights", "cache", "work")]
        sizes = [size(row[key]) for key in ("runtime", "resident", "peak")]
        table.add_row(row["setup"], *parts, *sizes, f"{row['ratio']:.2f}x", f"{row['ratio_with_runtime']:.2f}x")
    console.print(table)
    first, *_, last = report.table["ratio"]
    one = report.setups["naive"]
    console.print(
        f"{report.model}: {one.slots} slots of {one.context:,} tokens, {one.tokens:,} held in each; "
        f"from {first:.2f}x to {last:.2f}x of what is needed",
        highlight=False,
    )
    console.print(
        "needed: weights once, K and V of the tokens held, activations of the largest pass. measured / needed leaves "
        "the runtime out;\nwith runtime: all resident memory over the same need. resident: at the peak of the run. "
        "peak: loading included.",
        style="dim",
        highlight=False,
    )
