"""What ``kvsim prefix-cache`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import new_table, share
from kvsim.experiments.prefix_cache import PrefixStudy


def show_prefixes(console: Console, study: PrefixStudy) -> None:
    """Print hit rates, a row for each cache size and a column for each eviction policy; or why there are none."""
    reuse = study.reuse
    if reuse is None:
        console.print(f"[bold]{study.scenario}[/]: {study.reason}", highlight=False, soft_wrap=True)
        return
    names = list(dict.fromkeys(study.table["eviction"]))
    rates = study.table.pivot(index="blocks", columns="eviction", values="hit_rate")[names]
    both = {"lru", "belady"} <= set(names)
    table = new_table("blocks", "tokens", *names, *(["lru / belady"] if both else []))
    for blocks, row in rates.iterrows():
        n = int(str(blocks))
        cells = [f"{n:,}", f"{n * study.block_size:,}", *(f"{row[name]:.1%}" for name in names)]
        if both:
            cells.append(f"{row['lru'] / row['belady']:.0%}" if row["belady"] > 0 else "–")
        table.add_row(*cells)
    console.print(table)
    knees = ", ".join(f"{eviction} {n:,}" for eviction, n in study.knees.items())
    console.print(
        f"{study.requests:,} requests ask for {reuse.blocks:,} blocks of {study.block_size} tokens, "
        f"{reuse.distinct:,} of them distinct; infinite cache {share(study.infinite)}",
        highlight=False,
    )
    if knees:
        console.print(f"working set, where the curve flattens, in blocks: {knees}", highlight=False)
    console.print(
        f"{study.lookups_per_s:,.0f} blocks looked up per second of processor time", style="dim", highlight=False
    )
