"""What a column of a trace can hold, and how its values are read, whatever the format of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from workloads.generators.lengths import MAX_TOKENS
from workloads.traces.bad_rows import BadRowLog, FlawError
from workloads.traces.clock import MAX_SECONDS, parse_datetime, parse_seconds
from workloads.traces.csv_rows import CsvRows, parse_whole
from workloads.traces.files import open_text
from workloads.traces.jsonl import MAX_LINE, Object, json_lines, parse, shown
from workloads.traces.jsonl import whole as whole_value
from workloads.traces.table_row import Time

Good = TypeVar("Good")

_DECIMALS = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Digits behind the point down to nanoseconds, by unit."""


WHOLE, NUMBERS, STAMPS, NAMES = HELD = ("whole numbers", "numbers", "time stamps", "text or whole numbers")
"""What columns hold, in words."""


class Column(NamedTuple):
    """How the values of a column are read. Both functions raise ``FlawError``."""

    of_text: Callable[[str, str], Any]
    """From the name of the column, and a field of CSV."""
    of_value: Callable[[Object, str], Any]
    """From a row of JSON or Parquet, and the name of the column."""
    holds: str = "values"
    """What it holds, in words: one of ``HELD`` where Parquet has to have its type."""


Schema = Mapping[str, Column]
"""What each column holds, by name."""


def whole(low: int, high: int, of: str = "") -> Column:
    """Whole numbers from ``low`` to ``high``; ``of`` is added to messages about text."""

    def of_value(row: Object, name: str) -> int:
        value = row[name]
        if type(value) is int and low <= value <= high:
            return value
        return whole_value(row, name, low, high)  # Says what is wrong.

    return Column(lambda name, text: parse_whole(name, text, low, high, of), of_value, WHOLE)


def time_in(unit: Time) -> Column:
    """Times, as whole nanoseconds: numbers in this unit, or dates with times."""
    if unit == "datetime":
        return Column(parse_datetime, lambda row, name: _number_or_date(name, row[name], unit), STAMPS)
    decimals = _DECIMALS[unit]
    return Column(
        lambda name, text: parse_seconds(name, text, decimals),
        lambda row, name: _number_or_date(name, row[name], unit),
        NUMBERS,
    )


TOKENS = whole(1, MAX_TOKENS, " of tokens")
"""Numbers of tokens, at least 1."""
ANY = Column(lambda name, text: text, getitem)
"""Values that the reader checks itself."""
NAME = Column(lambda name, text: text or None, lambda row, name: _name(name, row[name]), NAMES)
"""Names or numbers; None where there is none."""


def read_csv(
    path: Path,
    columns: Schema,
    bad_rows: BadRowLog,
    use: Callable[[int, list[Any]], Good],
    delimiter: str = ",",
) -> Iterator[Good]:
    """What ``use`` makes of each good row of a CSV file: of its number, from 1, and of the values of these columns.

    ``use`` raises ``FlawError`` for a bad row. Raises ``WorkloadError``.
    """
    with open_text(path) as text:
        table = CsvRows(path, text, tuple(columns), delimiter)
        places = [(place, name, columns[name].of_text) for place, name in zip(table.columns, columns, strict=True)]

        def read(number: int, row: list[str]) -> Good:
            table.check(row)
            return use(number, [of_text(name, row[place]) for place, name, of_text in places])

        yield from bad_rows.sift(table.numbered(), read)


def read_jsonl(
    path: Path,
    columns: Schema,
    bad_rows: BadRowLog,
    use: Callable[[int, list[Any]], Good],
    longest: int = MAX_LINE,
) -> Iterator[Good]:
    """Read a file with one JSON object in each line, of at most ``longest`` characters, as ``read_csv`` reads a CSV."""
    keys = tuple(columns)
    places = [(name, column.of_value) for name, column in columns.items()]

    def read(number: int, line: str) -> Good:
        row = parse(line, keys)
        return use(number, [of_value(row, name) for name, of_value in places])

    with open_text(path) as text:
        yield from bad_rows.sift(json_lines(path, text, longest), read)


def _number_or_date(name: str, value: Any, unit: Time) -> int:
    """Convert a time from JSON or Parquet to nanoseconds. Raises ``FlawError``."""
    if unit == "datetime":
        if not isinstance(value, str):
            raise FlawError(f"{name} {shown(value)} is not text; expected YYYY-MM-DD HH:MM:SS.fffffff")
        return parse_datetime(name, value)
    if type(value) is not int and type(value) is not float:
        raise FlawError(f"{name} {shown(value)} is not a number; expected {unit}")
    scale: int = 10 ** _DECIMALS[unit]
    if not 0 <= value <= MAX_SECONDS * 10**9 // scale:  # also refuses NaN and infinity
        raise FlawError(f"{name} {shown(value)} is out of range; expected 0 to {MAX_SECONDS * 10**9 // scale}")
    return value * scale if isinstance(value, int) else round(value * scale)


def _name(name: str, value: Any) -> str | int | None:
    if value is None or value == "":
        return None
    if type(value) is not int and type(value) is not str:
        raise FlawError(f"{name} {shown(value)} is not a name; expected text or a whole number")
    return value
