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

    __slots__ = ("added", "fell", "first", "last")

    def __init__(self) -> None:
        self.first: int | None = None
        """The time of the first good row; None before it."""
        self.last = -(1 << 100)
        """The time of the last good row; long ago before it."""
        self.added = 0
        """Ticks that are added to all times from here on."""
        self.fell = 0
        """Further ticks that are added if the row that is being read is good."""

    def move(self, now: int) -> int:
        """Advance to a good row; returns the ticks since the first good row."""
        if self.first is None:
            self.first = now
        self.last = now
        self.added += self.fell
        return now - self.first


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


def parse_datetime(column: str, text: str) -> int:
    """Parse a date and time, in UTC unless there is an offset, as nanoseconds since 1970. Raises ``FlawError``."""
    match = TIMESTAMP.fullmatch(text.strip(" \t"))
    try:
        if match is None:
            raise ValueError
        gone = datetime.fromisoformat(match[1] + (match[3] or "+00:00")).astimezone(UTC) - _EPOCH
    except (ValueError, OverflowError):
        raise FlawError(f"{column} {quoted(text)} is not a time; expected YYYY-MM-DD HH:MM:SS.fffffff") from None
    return (gone.days * 86_400 + gone.seconds) * 10**9 + int((match[2] or ".0")[1:].ljust(9, "0"))
