"""Strict CSV for all readers: columns are found by their names, and the length of a row is bounded."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from workloads.request import WorkloadError
from workloads.traces.bad_rows import FlawError, check_text, quoted
from workloads.traces.files import not_utf8, shown_path

MAX_ROW = 1 << 20
"""The most characters in a row, all its lines together."""


class MalformedLine(list[str]):
    """A line that is not valid CSV, with its fault, in place of a row."""

    def __init__(self, line: str, fault: str):
        super().__init__([line])
        self.fault = fault


class CsvRows:
    """The rows of a CSV text; the first line that is not blank is the header.

    Raises ``WorkloadError`` for a wrong header and, during iteration, for text that is not CSV.
    """

    def __init__(self, path: Path, text: TextIO, columns: Sequence[str], delimiter: str = ","):
        """``columns``: names that the header must have, each once."""
        self._lines = _Lines(path, text)
        self._rows = csv.reader(self._lines, strict=True, delimiter=delimiter)
        self._path = path
        self.header = next((row for row in self._taken() if any(map(str.strip, row)) or len(row) > 1), None)
        """Fields of the header; None for an empty file."""
        self._lines.row = 1
        self.columns = find_columns(path, self.header, columns)
        """Indices of the columns, in the order of the names asked for."""

    def numbered(self) -> Iterator[tuple[int, list[str]]]:
        """The rows that are not blank, numbered from 1; their fields are not checked yet."""
        for number, row in enumerate((row for row in self._taken() if row), 1):
            self._lines.row = number + 1
            yield number, row

    def check(self, row: list[str]) -> list[str]:
        """Return the row. Raises ``FlawError`` unless it has a field for each column and is not the header again."""
        return check_fields(row, self.header or [])

    def _taken(self) -> Iterator[list[str]]:
        while True:
            self._lines.begin()
            try:
                row = next(self._rows, None)
            except csv.Error as e:
                if self._lines.row == 0 or not self._lines.is_one_line:
                    where = f"{shown_path(self._path)}: {self._lines.where}"
                    raise WorkloadError(f"{where}: not CSV ({e})") from None
                # The fault ends with the line; the next row begins with the next line.
                row = MalformedLine(self._lines.last, f"line {self._lines.number}: not CSV ({e})")
            if row is None:
                return
            yield row


class _Lines:
    """The lines of a text; refuses a row that never ends, because of a long line or an open quote."""

    def __init__(self, path: Path, text: TextIO):
        self._path, self._text = path, text
        self.number = 0
        """Number of the last line, from 1."""
        self.last = ""
        self._n = 0
        """Lines since the last row ended; the end of the text counts as one."""
        self.row = 0
        """Number of the row that is being read; 0 for the header."""
        self.taken = 0
        """Characters since the last row ended."""

    @property
    def is_one_line(self) -> bool:
        """Whether the current row is a single line."""
        return self._n == 1

    def begin(self) -> None:
        """Start a new row."""
        self.taken = self._n = 0

    @property
    def where(self) -> str:
        """The current row and line, for messages."""
        return f"row {self.row}, line {self.number}" if self.row else f"line {self.number}"

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_ROW + 1)
        self._n += 1
        if not line:
            raise StopIteration
        self.number += 1
        self.taken += len(line)
        self.last = line
        if self.taken > MAX_ROW:
            raise WorkloadError(
                f"{shown_path(self._path)}: {self.where}: longer than {MAX_ROW} characters; CSV is expected"
            )
        return line


def find_columns(path: Path | str, header: list[str] | None, wanted: Sequence[str]) -> tuple[int, ...]:
    """Indices of the wanted columns. Raises ``WorkloadError`` unless each is there exactly once."""
    names, path = ",".join(wanted), shown_path(path)
    if header is None:
        raise WorkloadError(f"{path}: empty file; expected the header {names}")
    if fault := not_utf8("".join(header)):
        raise WorkloadError(f"{path}: {fault}; a trace is expected, CSV or JSONL")
    if any("\0" in field for field in header):
        raise WorkloadError(f"{path}: header: zero bytes; expected {names} in UTF-8 (is this UTF-16, or an archive?)")
    for name in wanted:
        if header.count(name) != 1:
            what = "no column" if name not in header else f"{header.count(name)} columns"
            shown = ",".join(header)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise WorkloadError(f"{path}: header: {what} {name!r}; expected {names}, got {shown!r}")
    return tuple(header.index(name) for name in wanted)


def check_fields(row: list[str], header: list[str]) -> list[str]:
    """Return the row. Raises ``FlawError`` unless it has a field for each column and is not the header again."""
    if isinstance(row, MalformedLine):
        raise FlawError(row.fault)
    for field in row:
        check_text(field)
    if row == header:
        raise FlawError("the header again; two files joined?")
    if len(row) != len(header):
        raise FlawError(f"{len(row)} field{'' if len(row) == 1 else 's'}, the header has {len(header)}")
    if any("\0" in field for field in row):
        column = next(name for name, field in zip(header, row, strict=True) if "\0" in field)
        raise FlawError(f"{quoted(column)}: a zero byte; text is expected")
    return row


def parse_whole(column: str, text: str, low: int, high: int, of: str = "") -> int:
    """Parse a whole number from ``low`` to ``high``; ``of`` is added to messages. Raises ``FlawError``."""
    digits = text.strip(" \t")
    if not re.fullmatch(r"-?[0-9]+", digits):
        raise FlawError(f"{column} {quoted(text)} is not a whole number{of}")
    # Longer than any accepted number: refused unconverted, since converting huge strings is slow.
    number = int(digits) if len(digits) <= 20 else high + 1
    if not low <= number <= high:
        raise FlawError(f"{column} {digits[:24]} is out of range; expected {low} to {high}")
    return number
