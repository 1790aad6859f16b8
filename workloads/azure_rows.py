"""Rows of an Azure trace, checked one by one: whatever is wrong with a row is found and worded here."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from workloads.lengths import MAX_TOKENS
from workloads.request import WorkloadError
from workloads.traces import Row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")
"""Date and time, fraction, offset."""


class Clock:
    """Nanoseconds from a trace's first row, which never go back."""

    __slots__ = ("first", "last", "nanoseconds")

    def __init__(self) -> None:
        self.first: datetime | None = None
        """The whole second (UTC) of the first row; None before it."""
        self.nanoseconds = 0
        """Of the first row, beyond its whole second."""
        self.last = 0
        """Nanoseconds from the first row to the last one."""

    def read(self, where: str, text: str) -> int:
        """Nanoseconds from the first row to the one of this time. Raises ``WorkloadError``."""
        moment, nanoseconds = parse_time(where, text)
        if self.first is None:
            self.first, self.nanoseconds = moment, nanoseconds
        ticks = round((moment - self.first).total_seconds()) * 10**9 + nanoseconds - self.nanoseconds
        if ticks < self.last:
            raise WorkloadError(f"{where}: TIMESTAMP {text!r} is earlier than the row before")
        self.last = ticks
        return ticks


class RowReader:
    """What the rows of one file are checked against, one after another."""

    def __init__(self, path: Path, header: list[str] | None, clock: Clock):
        """``header``: the fields of the first line; None: there is none. Raises ``WorkloadError``."""
        self._path, self._clock = path, clock
        self._columns = _find_columns(path, header)
        self._header = header or []

    def read(self, number: int, row: list[str]) -> Row:
        """The row of that number, from 1, as a request. Raises ``WorkloadError``."""
        where = f"{self._path}: row {number}"
        if row == self._header:
            raise WorkloadError(f"{where}: the header again; two files joined?")
        if len(row) != len(self._header):
            raise WorkloadError(f"{where}: {len(row)} fields, the header has {len(self._header)}")
        time, prompt, output = self._columns
        return Row(
            self._clock.read(where, row[time]) / 1e9,
            _parse_tokens(where, "ContextTokens", row[prompt]),
            _parse_tokens(where, "GeneratedTokens", row[output]),
        )


def parse_time(where: str, text: str) -> tuple[datetime, int]:
    """The whole second (UTC) and the nanoseconds beyond it. Raises ``WorkloadError``."""
    match = TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise WorkloadError(
            f"{where}: TIMESTAMP {text!r} is not a time; expected YYYY-MM-DD HH:MM:SS.fffffff"
        ) from None
    return moment, int((match[2] or ".0")[1:].ljust(9, "0"))


def _find_columns(path: Path, header: list[str] | None) -> tuple[int, int, int]:
    wanted = ",".join(COLUMNS)
    if header is None:
        raise WorkloadError(f"{path}: empty file; expected the header {wanted}")
    for name in COLUMNS:
        if header.count(name) != 1:
            what = "no column" if name not in header else f"{header.count(name)} columns"
            shown = ",".join(header)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise WorkloadError(f"{path}: header: {what} {name!r}; expected {wanted}, got {shown!r}")
    return header.index(COLUMNS[0]), header.index(COLUMNS[1]), header.index(COLUMNS[2])


def _parse_tokens(where: str, column: str, text: str) -> int:
    digits = text.strip()
    if not re.fullmatch(r"-?[0-9]+", digits):
        raise WorkloadError(f"{where}: {column} {text!r} is not a whole number of tokens")
    # Longer than any number of tokens: refused before it is converted, which for huge strings is slow.
    tokens = int(digits) if len(digits) <= 20 else MAX_TOKENS + 1
    if not 1 <= tokens <= MAX_TOKENS:
        raise WorkloadError(f"{where}: {column} {digits[:24]} is out of range; expected 1 to {MAX_TOKENS}")
    return tokens
