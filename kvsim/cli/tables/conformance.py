"""What ``kvsim conform`` prints: agreement, and both cell maps where a recording and a policy disagree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsim.cli.tables.formats import new_table
from kvsim.engines.recordings.conformance import Agreement, Disagreement

_ROW = 32
"""Cells in a row of a printed cell map."""

_NAMED = 4
"""Cells whose difference is put into words; the others are only counted."""

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

_Held = tuple[tuple[int, ...], int]
"""Sequences of a used cell, and its position."""


def show_agreements(console: Console, found: Sequence[Agreement]) -> None:
    """Print how far each recording agrees, and both cell maps at its first disagreement."""
    table = new_table("recording", "era", "agree/total")
    for a in found:
        colour = "green" if a.first is None else "red"
        table.add_row(a.file, a.era, f"[{colour}]{a.agree}/{a.total}[/]")
    total, agree = sum(a.total for a in found), sum(a.agree for a in found)
    if len(found) > 1:
        table.add_row("in all", "", f"{agree}/{total}")
    console.print(table)
    for a in found:
        for line in a.excused:
            console.print(f"{a.file}: {line}", highlight=False)
    for a in found:
        if a.first is not None:
            _show_disagreement(console, a.file, a.first)


def _show_disagreement(console: Console, file: str, d: Disagreement) -> None:
    console.print(f"\n[bold]{file}[/], record {d.record}: {json.dumps(d.operation)}", highlight=False)
    table = new_table("field", "recorded", "ours")
    for name in d.fields:
        if not name.endswith("map"):
            table.add_row(name, _shown(d.recorded[name]), _shown(d.ours.get(name)))
    if table.row_count:
        console.print(table)
    for name in d.fields:
        if name.endswith("map"):
            _show_both_maps(console, name, _cells(d.recorded[name]), _cells(d.ours.get(name) or []))


def _shown(value: Any) -> str:
    """A field's value; decisions and answers of a server as words rather than as JSON."""
    if not isinstance(value, dict):
        return "nothing" if value is None else str(value)
    parts = [f"{key} {part}" for key, part in value.items() if key != "decision"]
    return ", ".join([*([value["decision"]] if "decision" in value else []), *parts])


def _show_both_maps(console: Console, name: str, recorded: dict[int, _Held], ours: dict[int, _Held]) -> None:
    """The recorded cells left and ours right, a digit or letter for each sequence, red where they differ."""
    end = max([*recorded, *ours], default=0) + 1
    different = [cell for cell in range(end) if recorded.get(cell) != ours.get(cell)]
    table = new_table(name, "recorded", "ours")
    for start in range(0, end, _ROW):
        cells = range(start, min(start + _ROW, end))
        if any(recorded.get(cell) != ours.get(cell) for cell in cells):
            table.add_row(str(start), _cell_row(cells, recorded, ours), _cell_row(cells, ours, recorded))
    console.print(table)
    for cell in different[:_NAMED]:
        console.print(
            f"  cell {cell}: recorded {_in_words(recorded.get(cell))}, ours {_in_words(ours.get(cell))}",
            highlight=False,
        )
    if len(different) > _NAMED:
        console.print(f"  and {len(different) - _NAMED} more cells", highlight=False)


def _cell_row(cells: range, own: dict[int, _Held], other: dict[int, _Held]) -> Text:
    text = Text()
    for cell in cells:
        held = own.get(cell)
        symbol = "·" if held is None else _SYMBOLS[held[0][0] % len(_SYMBOLS)]
        text.append(symbol, style="bold white on red" if held != other.get(cell) else _style(held))
    return text


def _cells(runs: list[list[Any]]) -> dict[int, _Held]:
    """Sequences and position of each used cell."""
    return {first + i: (tuple(seqs), position + i) for first, length, seqs, position in runs for i in range(length)}


def _style(held: _Held | None) -> str:
    return "dim" if held is None else f"color({1 + held[0][0] % 6})"


def _in_words(held: _Held | None) -> str:
    if held is None:
        return "nothing"
    return f"position {held[1]} of sequence {', '.join(map(str, held[0]))}"
