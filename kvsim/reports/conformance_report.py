"""The report of ``kvsim conform``: agreement, and both cell maps where a recording and a policy disagree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvsim.reports.report import Cell, Column, Report, Section, Table

if TYPE_CHECKING:
    from kvsim.engines.recordings.conformance import Agreement, Disagreement

_ROW = 32
"""Cells in a row of a printed cell map."""
_NAMED = 4
"""Cells whose difference is put into words; the others are only counted."""
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

_Held = tuple[tuple[int, ...], int]
"""Sequences of a used cell, and its position."""


def conformance_report(found: Sequence[Agreement]) -> Report:
    """How far each recording agrees, and both cell maps at its first disagreement."""
    rows = [(a.file, a.era, a.agree, a.total, a.first is None) for a in found]
    if len(rows) > 1:
        agree, total = sum(a.agree for a in found), sum(a.total for a in found)
        rows.append(("in all", "", agree, total, agree == total))
    columns = [Column("recording", 0), Column("era", 1), Column("agree/total", _agreement)]
    excused = [f"{a.file}: {line}" for a in found for line in a.excused]
    differing = [section for a in found if a.first is not None for section in _disagreement(a.file, a.first)]
    return Report(sections=[Section(tables=[Table("Agreement", columns, rows)]), Section(text=excused), *differing])


def _agreement(row: tuple[str, str, int, int, bool]) -> Cell:
    text = f"{row[2]}/{row[3]}"
    return Cell(text, float(row[2]), [(text, "green" if row[4] else "red")])


def _disagreement(file: str, d: Disagreement) -> list[Section]:
    title = f"{file}, record {d.record}: {json.dumps(d.operation)}"
    fields = [name for name in d.fields if not name.endswith("map")]
    columns = [
        Column("field", str),
        Column("recorded", lambda name: _shown(d.recorded[name])),
        Column("ours", lambda name: _shown(d.ours.get(name))),
    ]
    tables = [Table("Fields", columns, fields)] if fields else []
    maps = [
        _both_maps(name, _cells(d.recorded[name]), _cells(d.ours.get(name) or []))
        for name in d.fields
        if name.endswith("map")
    ]
    return [Section(title, ["", title], tables), *maps]


def _shown(value: Any) -> str:
    """A field's value; decisions and answers of a server as words rather than as JSON."""
    if not isinstance(value, dict):
        return "nothing" if value is None else str(value)
    parts = [f"{key} {part}" for key, part in value.items() if key != "decision"]
    return ", ".join([*([value["decision"]] if "decision" in value else []), *parts])


def _both_maps(name: str, recorded: dict[int, _Held], ours: dict[int, _Held]) -> Section:
    """The recorded cells left and ours right, a digit or letter for each sequence, red where they differ."""
    end = max([*recorded, *ours], default=0) + 1
    different = [cell for cell in range(end) if recorded.get(cell) != ours.get(cell)]
    rows = [range(start, min(start + _ROW, end)) for start in range(0, end, _ROW)]
    columns = [
        Column(name, lambda cells: str(cells.start)),
        Column("recorded", lambda cells: _cell_row(cells, recorded, ours)),
        Column("ours", lambda cells: _cell_row(cells, ours, recorded)),
    ]
    lines = [
        f"  cell {cell}: recorded {_in_words(recorded.get(cell))}, ours {_in_words(ours.get(cell))}"
        for cell in different[:_NAMED]
    ]
    if len(different) > _NAMED:
        lines.append(f"  and {len(different) - _NAMED} more cells")
    unlike = [cells for cells in rows if any(recorded.get(cell) != ours.get(cell) for cell in cells)]
    return Section("", [], [Table(name, columns, unlike)], lines)


def _cell_row(cells: range, own: dict[int, _Held], other: dict[int, _Held]) -> Cell:
    pieces = []
    for cell in cells:
        held = own.get(cell)
        symbol = "·" if held is None else _SYMBOLS[held[0][0] % len(_SYMBOLS)]
        style = "dim" if held is None else f"color({1 + held[0][0] % 6})"
        pieces.append((symbol, "bold white on red" if held != other.get(cell) else style))
    text = "".join(symbol for symbol, _ in pieces)
    return Cell(text, text, pieces)


def _cells(runs: list[list[Any]]) -> dict[int, _Held]:
    """Sequences and position of each used cell."""
    return {first + i: (tuple(seqs), position + i) for first, length, seqs, position in runs for i in range(length)}


def _in_words(held: _Held | None) -> str:
    if held is None:
        return "nothing"
    return f"position {held[1]} of sequence {', '.join(map(str, held[0]))}"
