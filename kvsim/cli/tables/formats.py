"""How tables and figures are written: columns, durations, sizes, shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
"""The latencies of a summary, and their names."""


def new_table(*columns: str, left: Sequence[str] = ()) -> Table:
    """An empty table without lines; the first column and those in ``left`` are flush left, the others flush right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, head in enumerate(columns):
        table.add_column(head, justify="left" if i == 0 or head in left else "right")
    return table


def print_rows(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], repeated: int = 1, left: Sequence[str] = ()
) -> None:
    """Print a table; one too wide for the console is cut into several, each beginning with the ``repeated`` columns.

    The first column and those in ``left`` are flush left.
    """
    widths = [max(map(len, (*head.split("\n"), *(row[i] for row in rows)))) for i, head in enumerate(heads)]
    at, taken = repeated, sum(widths[:repeated]) + 2 * (repeated - 1)
    while at < len(heads):
        end, room = at, console.width - taken
        while end < len(heads) and (room >= widths[end] + 2 or end == at):
            room -= widths[end] + 2
            end += 1
        table = new_table(*heads[:repeated], *heads[at:end], left=left)
        for row in rows:
            table.add_row(*row[:repeated], *row[at:end])
        console.print(table)
        console.print()
        at = end


def milliseconds(value: Any) -> str:
    """Seconds as a number of milliseconds."""
    if value is None:
        return "–"
    return f"{1000 * value:,.0f}" if value >= 0.1 else f"{1000 * value:.3g}"


def seconds(value: Any) -> str:
    """Seconds with three digits and the unit that suits them."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def whole(value: Any) -> str:
    """A number without decimals."""
    return "–" if value is None else f"{value:,.0f}"


def share(value: Any) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value:.1%}"


def size(value: float) -> str:
    """Bytes in decimal units (1 kB is 1000 bytes)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"


def show_basis(console: Console, basis: str | None) -> None:
    """Print what the times of a result rest on; nothing if it has no predicted times."""
    if basis is not None:
        console.print(basis, highlight=False, markup=False, soft_wrap=True)


def show_assumed(console: Console, lines: Iterable[str]) -> None:
    """Print what the runs assumed of engines because the scenario does not say."""
    for line in lines:
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
