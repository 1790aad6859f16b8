"""Reads and checks the rows of an Azure trace one by one, and describes their faults."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from workloads.traces.bad_rows import FlawError, quoted
from workloads.traces.clock import parse_time
from workloads.traces.csv_rows import check_fields, parse_tokens
from workloads.traces.trace import Row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureClock:
    """The time since the first good row, in nanoseconds; it never goes back."""

    __slots__ = ("first", "last", "nanoseconds")

    def __init__(self) -> None:
        self.first: datetime | None = None
        """The first row's time (UTC) in whole seconds; None before the first row."""
        self.nanoseconds = 0
        """The first row's time beyond its whole second."""
        self.last = 0
        """Nanoseconds from the first row to the last good one."""

    def check(self, moment: datetime, nanoseconds: int, text: str) -> int:
        """Nanoseconds since the first row; the moment is written as ``text``. Raises ``FlawError``."""
        if self.first is None:
            return 0
        ticks = round((moment - self.first).total_seconds()) * 10**9 + nanoseconds - self.nanoseconds
        if ticks < self.last:
            raise FlawError(f"TIMESTAMP {quoted(text)} is earlier than the row before")
        return ticks

    def move(self, moment: datetime, nanoseconds: int, ticks: int) -> None:
        """Advance to the moment of a good row."""
        if self.first is None:
            self.first, self.nanoseconds = moment, nanoseconds
        self.last = ticks


class RowReader:
    """Makes requests of the rows of one file, in order."""

    def __init__(self, header: list[str], columns: Sequence[int], clock: AzureClock):
        """``header``: fields of the first line; ``columns``: indices of ``COLUMNS`` in it."""
        self._header, self._columns, self._clock = header, columns, clock

    def read(self, row: list[str]) -> Row:
        """Check a row. Raises ``FlawError``, and then does not advance the clock."""
        check_fields(row, self._header)
        time, prompt, output = (row[i] for i in self._columns)
        moment, nanoseconds = parse_time("TIMESTAMP", time)
        ticks = self._clock.check(moment, nanoseconds, time)
        good = Row(ticks / 1e9, parse_tokens("ContextTokens", prompt), parse_tokens("GeneratedTokens", output))
        # Only now, so that the next row is compared with the last good one.
        self._clock.move(moment, nanoseconds, ticks)
        return good
