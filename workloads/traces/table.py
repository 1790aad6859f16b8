"""Tables of requests as anybody may keep them: CSV, JSONL or Parquet, with columns named in the scenario.

A row says when a request arrived and how many tokens its prompt and its answer have, and perhaps its session and its
priority. No source and no licence but the user's own.
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
from workloads.traces.table_cells import DECIMALS, MAX_PRIORITY, Cells, Columns, Time, parse_session, parse_value
from workloads.traces.trace import Page, Row, Trace, paged

Format = Literal["csv", "jsonl", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
PARQUET = b"PAR1"
"""How Parquet begins."""
_PACKED = (".gz", ".bz2", ".xz")
_PLAIN = Columns()


@dataclass(frozen=True, slots=True)
class TableTrace(Trace):
    """The requests of a table, in order of their arrival.

    The rows of a session follow one another, and sessions are in order of their first rows. The first row comes at its
    arrival; each further one comes as long after the answer to the one before as their arrivals lie apart, since a
    table does not say how long answers took. Where the session is empty, a row stands alone.

    While the table is checked, the names of all sessions are held. Of Parquet, a row group's columns may be.
    """

    format: Format | None = None
    """None: Parquet where the file begins so, else as the name says."""
    columns: Columns = _PLAIN
    time: Time = "s"
    """The unit of arrivals; or they are dates with a time (UTC, where they name no offset)."""
    delimiter: str = ","
    """CSV: what stands between fields."""

    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        return paged(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        self._check_columns()
        kind = self._format()
        talks = _Talks(self.columns, remembers=check_all)
        if kind == "parquet":
            rows, cells = parquet_rows(self.path, self.columns, self.time)
            yield from self._ledger.sift(rows, lambda row: talks.row(cells(row)))
            return
        with open_text(self.path) as text:
            if kind == "csv":
                table = CsvRows(self.path, text, self.columns.named, self.delimiter)
                places = dict(zip(self.columns.named, table.columns, strict=True))
                yield from self._ledger.sift(
                    table.numbered(), lambda row: talks.row(self._csv(table.check(row), places))
                )
            else:
                yield from self._ledger.sift(
                    json_lines(self.path, text), lambda line: talks.row(self._json(parse(line, self.columns.named)))
                )

    def _has_header(self) -> bool:
        return self._format() == "csv"

    def _format(self) -> Format:
        if self.format is not None:
            return self.format
        with open_bytes(self.path) as raw:
            return "parquet" if raw.read(len(PARQUET)) == PARQUET else format_of(self.path)

    def _check_columns(self) -> None:
        """Raises ``WorkloadError`` where one column is to be two things."""
        meanings: dict[str, str] = {}
        for meaning, name in self.columns._asdict().items():
            if name is not None and (other := meanings.setdefault(name, meaning)) != meaning:
                raise WorkloadError(
                    f"{shown_path(self.path)}: column {quoted(name)} is named twice, for {other} and {meaning}"
                )

    def _csv(self, row: list[str], places: dict[str, int]) -> Cells:
        arrival, prompt, output, session, priority = self.columns
        told = row[places[arrival]]
        if self.time == "datetime":
            now = parse_datetime(arrival, told)
        else:
            now = parse_seconds(arrival, told, DECIMALS[self.time])
        talk, rank = session and row[places[session]], 0
        if priority is not None:
            rank = parse_whole(priority, row[places[priority]], -MAX_PRIORITY, MAX_PRIORITY)
        lengths = parse_tokens(prompt, row[places[prompt]]), parse_tokens(output, row[places[output]])
        return Cells(now, quoted(told), *lengths, talk or None, rank)

    def _json(self, row: dict[str, Any]) -> Cells:
        arrival, prompt, output, session, priority = self.columns
        now = parse_value(arrival, row[arrival], self.time)
        talk = None if session is None else parse_session(session, row[session])
        rank = 0 if priority is None else whole(row, priority, -MAX_PRIORITY, MAX_PRIORITY)
        return Cells(now, shown(row[arrival]), tokens(row, prompt), tokens(row, output), talk, rank)


class _Talks:
    """The clock of a table, and which session its rows are in."""

    __slots__ = ("_before", "_clock", "_column", "_key", "_number", "_seen", "_start_s")

    def __init__(self, columns: Columns, *, remembers: bool):
        self._clock, self._column = Clock(columns.arrival), columns.session
        self._seen: set[str | int] | None = set() if remembers else None
        self._key: str | int | None = None
        self._number = 0
        self._start_s = 0.0
        self._before = 0
        """When the row before arrived, in nanoseconds."""

    def row(self, cells: Cells) -> Row:
        """The row as a request. Raises ``FlawError`` where it is out of order."""
        now, told, prompt, output, key, priority = cells
        if key is None or key != self._key:
            self._clock.check(now, told)
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
                raise FlawError(f"{self._clock.column} {told} is earlier than the row before")
            think_s = (now - self._before) / 1e9
        self._key, self._before = key, now
        session = None if key is None else self._number - 1
        return Row(self._start_s, prompt, output, (), think_s, session, priority)


def format_of(path: Path) -> Format:
    """What a file's name says of its format. Raises ``WorkloadError``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        raise WorkloadError(
            f'{shown_path(path)}: its name does not say what it is; give format = "csv", "jsonl" or "parquet"'
        )
    return _SUFFIXES[suffixes[-1]]
