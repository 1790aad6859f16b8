"""The clock of a trace, which counts from the first row and never goes back."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from workloads.traces.bad_rows import FlawError, quoted

TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""Date and time, fraction, offset."""

MAX_SECONDS = 10**12
"""No trace is told by larger numbers of seconds; 30,000 years."""

_NUMBER = re.compile(r"([0-9]{1,24})(?:\.([0-9]{1,24}))?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """Whole ticks from a trace's first good row."""

    __slots__ = ("_first", "_last", "column")

    def __init__(self, column: str):
        self.column = column
        """What the trace calls it."""
        self._first: int | None = None
        self._last = 0

    def check(self, now: int, told: str | None = None) -> int:
        """The same moment, which is no earlier than the last good row's. Raises ``FlawError``.

        ``told``: how the row tells it, where not as that number.
        """
        if self._first is not None and now < self._last:
            raise FlawError(f"{self.column} {now if told is None else told} is earlier than the row before")
        return now

    def move(self, now: int) -> int:
        """The row of that moment is good; ticks from the first good row to it."""
        if self._first is None:
            self._first = now
        self._last = now
        return now - self._first

    @property
    def last(self) -> int | None:
        """The moment of the last good row; None before the first."""
        return None if self._first is None else self._last


def parse_seconds(column: str, text: str, decimals: int = 9) -> int:
    """Nanoseconds in a time that is written with or without a fraction. Raises ``FlawError``.

    ``decimals``: so many of its digits behind the point are nanoseconds, 9 for seconds and 0 for nanoseconds.
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
    """The whole second (UTC) and the nanoseconds beyond it. Raises ``FlawError``."""
    match = TIMESTAMP.fullmatch(text.strip(" \t"))
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise FlawError(f"{column} {quoted(text)} is not a time; expected YYYY-MM-DD HH:MM:SS.fffffff") from None
    return moment, int((match[2] or ".0")[1:].ljust(9, "0"))


def parse_datetime(column: str, text: str) -> int:
    """Nanoseconds from the start of 1970 to a date and time. Raises ``FlawError``."""
    moment, nanoseconds = parse_time(column, text)
    gone = moment - _EPOCH
    return (gone.days * 86_400 + gone.seconds) * 10**9 + nanoseconds
