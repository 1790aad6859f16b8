"""Rows of an Azure trace, checked one by one: whatever is wrong with a row is found and worded here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from workloads.traces.bad_rows import FlawError, quoted
from workloads.traces.clock import parse_time
from workloads.traces.csv_rows import check_fields, parse_tokens
from workloads.traces.trace import Row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureClock:
    """Nanoseconds from a trace's first good row, which never go back."""

    __slots__ = ("first", "last", "nanoseconds")

    def __init__(self) -> None:
        self.first: datetime | None = None
        """The whole second (UTC) of the first row; None before it."""
        self.nanoseconds = 0
        """Of the first row, beyond its whole second."""
        self.last = 0
        """Nanoseconds from the first row to the last one."""

    def check(self, moment: datetime, nanoseconds: int, text: str) -> int:
        """Nanoseconds from the first row to a moment, which the row tells so. Raises ``FlawError``."""
        if self.first is None:
            return 0
        ticks = round((moment - self.first).total_seconds()) * 10**9 + nanoseconds - self.nanoseconds
        if ticks < self.last:
            raise FlawError(f"TIMESTAMP {quoted(text)} is earlier than the row before")
        return ticks

    def move(self, moment: datetime, nanoseconds: int, ticks: int) -> None:
        """The row of that moment is good."""
        if self.first is None:
            self.first, self.nanoseconds = moment, nanoseconds
        self.last = ticks


class RowReader:
    """What the rows of one file are checked against, one after another."""

    def __init__(self, header: list[str], columns: Sequence[int], clock: AzureClock):
        """``header``: the fields of the first line; ``columns``: where ``COLUMNS`` stand in it."""
        self._header, self._columns, self._clock = header, columns, clock

    def read(self, row: list[str]) -> Row:
        """The row as a request. Raises ``FlawError``."""
        check_fields(row, self._header)
        time, prompt, output = (row[i] for i in self._columns)
        moment, nanoseconds = parse_time("TIMESTAMP", time)
        ticks = self._clock.check(moment, nanoseconds, time)
        good = Row(ticks / 1e9, parse_tokens("ContextTokens", prompt), parse_tokens("GeneratedTokens", output))
        # Only now: the row after a bad one is compared with the last good one.
        self._clock.move(moment, nanoseconds, ticks)
        return good
