"""Tables of requests in CSV, JSONL or Parquet, with columns that the scenario names.

A row has the arrival of a request, the tokens of its prompt and its answer, and perhaps its session and its priority.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workloads.request import WorkloadError
from workloads.traces.bad_rows import FlawError, quoted
from workloads.traces.clock import Clock, parse_datetime, parse_seconds
from workloads.traces.csv_rows import CsvRows, parse_tokens, parse_whole
from workloads.traces.files import open_bytes, open_text, shown_path
from workloads.traces.jsonl import json_lines, parse, shown, tokens, whole
from workloads.traces.parquet import parquet_rows
from workloads.traces.table_row import DECIMALS, MAX_PRIORITY, Columns, TableRow, Time, parse_session, parse_value
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

Format = Literal["csv", "jsonl", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""
_PACKED = (".gz", ".bz2", ".xz")
_PLAIN = Columns()


@dataclass(frozen=True, slots=True)
class TableTrace(Trace):
    """The requests of a table, in order of arrival.

    The rows of a session are adjacent, and sessions are in order of their first rows. The think time of a later turn
    is the time between the arrivals of two rows, since a table does not have the time that answers took. A row with an
    empty session is a request of its own.

    While the table is checked, the names of all sessions are held. For Parquet, one page of each column is held.
    """

    format: Format | None = None
    """None: Parquet if the file begins so, else by the suffix of its name."""
    columns: Columns = _PLAIN
    time: Time = "s"
    """The unit of arrivals; ``datetime``: date and time, in UTC unless there is an offset."""
    delimiter: str = ","
    """The character between fields, in CSV."""

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        self._check_columns()
        kind = self._format()
        clock = _SessionClock(self.columns, finds_repeated=check_all)
        if kind == "parquet":
            rows, parse_row = parquet_rows(self.path, self.columns, self.time)
            yield from self._bad_rows.sift(rows, lambda row: clock.row(parse_row(row)))
            return
        with open_text(self.path) as text:
            if kind == "csv":
                table = CsvRows(self.path, text, self.columns.named, self.delimiter)
                places = dict(zip(self.columns.named, table.columns, strict=True))
                yield from self._bad_rows.sift(
                    table.numbered(), lambda row: clock.row(self._csv(table.check(row), places))
                )
            else:
                yield from self._bad_rows.sift(
                    json_lines(self.path, text), lambda line: clock.row(self._json(parse(line, self.columns.named)))
                )

    def _has_header(self) -> bool:
        return self._format() == "csv"

    def _format(self) -> Format:
        if self.format is not None:
            return self.format
        with open_bytes(self.path) as raw:
            return "parquet" if raw.read(len(PARQUET)) == PARQUET else format_of(self.path)

    def _check_columns(self) -> None:
        """Raise ``WorkloadError`` if one column has two meanings."""
        meanings: dict[str, str] = {}
        for meaning, name in self.columns._asdict().items():
            if name is not None and (other := meanings.setdefault(name, meaning)) != meaning:
                raise WorkloadError(
                    f"{shown_path(self.path)}: column {quoted(name)} is named twice, for {other} and {meaning}"
                )

    def _csv(self, row: list[str], places: dict[str, int]) -> TableRow:
        arrival, prompt, output, session, priority = self.columns
        text = row[places[arrival]]
        if self.time == "datetime":
            now = parse_datetime(arrival, text)
        else:
            now = parse_seconds(arrival, text, DECIMALS[self.time])
        name, rank = session and row[places[session]], 0
        if priority is not None:
            rank = parse_whole(priority, row[places[priority]], -MAX_PRIORITY, MAX_PRIORITY)
        lengths = parse_tokens(prompt, row[places[prompt]]), parse_tokens(output, row[places[output]])
        return TableRow(now, quoted(text), *lengths, name or None, rank)

    def _json(self, row: dict[str, Any]) -> TableRow:
        arrival, prompt, output, session, priority = self.columns
        now = parse_value(arrival, row[arrival], self.time)
        name = None if session is None else parse_session(session, row[session])
        rank = 0 if priority is None else whole(row, priority, -MAX_PRIORITY, MAX_PRIORITY)
        return TableRow(now, shown(row[arrival]), tokens(row, prompt), tokens(row, output), name, rank)


class _SessionClock:
    """Turns the rows of a table into requests: checks their times and numbers their sessions."""

    __slots__ = ("_before", "_clock", "_column", "_key", "_number", "_seen", "_start_s")

    def __init__(self, columns: Columns, *, finds_repeated: bool):
        self._clock, self._column = Clock(columns.arrival), columns.session
        self._seen: set[str | int] | None = set() if finds_repeated else None
        self._key: str | int | None = None
        self._number = 0
        self._start_s = 0.0
        self._before = 0
        """Arrival of the previous row, in nanoseconds."""

    def row(self, row: TableRow) -> Row:
        """The row as a request. Raises ``FlawError`` if it is out of order."""
        now, text, prompt, output, key, priority = row
        if key is None or key != self._key:
            self._clock.check(now, text)
            if key is not None and self._seen is not None:
                if key in self._seen:
                    raise FlawError(
                        f"{self._column} {shown(key)} was there before; the rows of a session must follow one another"
                    )
                self._seen.add(key)
            self._start_s = self._clock.move(now) / 1e9
            self._number += key is not None
            think_s = 0.0
        else:
            if now < self._before:
                raise FlawError(f"{self._clock.column} {text} is earlier than the row before")
            think_s = (now - self._before) / 1e9
        self._key, self._before = key, now
        session = None if key is None else self._number - 1
        return Row(self._start_s, prompt, output, (), think_s, session, priority)


def format_of(path: Path) -> Format:
    """The format by the suffix of a file's name. Raises ``WorkloadError``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        raise WorkloadError(
            f'{shown_path(path)}: its name does not say what it is; give format = "csv", "jsonl" or "parquet"'
        )
    return _SUFFIXES[suffixes[-1]]
