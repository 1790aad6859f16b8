"""Times in traces: parsing them, and checking that they never go back."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from workloads.traces.bad_rows import FlawError, quoted

TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""Date and time, fraction, offset."""

MAX_SECONDS = 10**12
"""The largest accepted time in seconds, 30,000 years."""

_NUMBER = re.compile(r"([0-9]{1,24})(?:\.([0-9]{1,24}))?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """The time since the first good row of a trace, in whole ticks; it never goes back."""

    __slots__ = ("_first", "_last", "column")

    def __init__(self, column: str):
        self.column = column
        """Name of the column of times, for messages."""
        self._first: int | None = None
        self._last = 0

    def check(self, now: int, as_written: str | None = None) -> int:
        """Return ``now``. Raises ``FlawError`` if it is earlier than the last good row.

        ``as_written``: the time as the row has it, if it is not this number.
        """
        if self._first is not None and now < self._last:
            raise FlawError(f"{self.column} {now if as_written is None else as_written} is earlier than the row before")
        return now

    def move(self, now: int) -> int:
        """Advance to a good row; returns the ticks since the first good row."""
        if self._first is None:
            self._first = now
        self._last = now
        return now - self._first

    @property
    def last(self) -> int | None:
        """The time of the last good row; None before the first."""
        return None if self._first is None else self._last


def parse_seconds(column: str, text: str, decimals: int = 9) -> int:
    """Parse a time, with or without a fraction, as whole nanoseconds. Raises ``FlawError``.

    ``decimals``: digits behind the point down to nanoseconds: 9 for seconds, 0 for nanoseconds.
    """
    match = _NUMBER.fullmatch(text.strip(" \t"))
    if match is None:
        raise FlawError(f"{column} {quoted(text)} is not a time; expected a number, whole or with decimals, at least 0")
    beyond = (match[2] or "")[:decimals].ljust(decimals, "0")
    ticks = int(match[1]) * int(10**decimals) + int(beyond or "0")
    if ticks > MAX_SECONDS * 10**9:
        raise FlawError(f"{column} {quoted(text)} is out of range; expected at most {MAX_SECONDS} seconds")
    return ticks


def parse_time(column: str, text: str) -> tuple[datetime, int]:
    """Parse a date and time as a whole second (UTC) and nanoseconds beyond it. Raises ``FlawError``."""
    match = TIMESTAMP.fullmatch(text.strip(" \t"))
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise FlawError(f"{column} {quoted(text)} is not a time; expected YYYY-MM-DD HH:MM:SS.fffffff") from None
    return moment, int((match[2] or ".0")[1:].ljust(9, "0"))


def parse_datetime(column: str, text: str) -> int:
    """Parse a date and time as nanoseconds since 1970. Raises ``FlawError``."""
    moment, nanoseconds = parse_time(column, text)
    gone = moment - _EPOCH
    return (gone.days * 86_400 + gone.seconds) * 10**9 + nanoseconds
