"""Rows of tables, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import MAX_SECONDS, parse_datetime
from workloads.traces.jsonl import shown

Time = Literal["s", "ms", "us", "ns", "datetime"]
"""The unit of arrivals; ``datetime``: a date and time."""

MAX_PRIORITY = 2**31 - 1
"""The largest priority; the smallest is its negative."""

DECIMALS = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Digits behind the point down to nanoseconds, by unit."""


class Columns(NamedTuple):
    """Names of the columns; None if there is no such column."""

    arrival: str = "arrival"
    prompt: str = "prompt"
    """Number of tokens."""
    output: str = "output"
    """Number of tokens."""
    session: str | None = None
    priority: str | None = None
    """Smaller values are more urgent."""

    @property
    def named(self) -> tuple[str, ...]:
        """All names that are set, each once."""
        return tuple(dict.fromkeys(name for name in self if name is not None))


class TableRow(NamedTuple):
    """The values of one row."""

    arrival_ns: int
    arrival_text: str
    """The arrival as written, for messages."""
    prompt_tokens: int
    output_tokens: int
    session: str | int | None = None
    priority: int = 0


RowParser = Callable[[Any], TableRow]
"""Parses a row as a file format represents it."""


def parse_value(column: str, value: Any, time: Time) -> int:
    """Convert an arrival from JSON or Parquet to nanoseconds. Raises ``FlawError``."""
    if time == "datetime":
        if not isinstance(value, str):
            raise FlawError(f"{column} {shown(value)} is not text; expected YYYY-MM-DD HH:MM:SS.fffffff")
        return parse_datetime(column, value)
    if type(value) is not int and type(value) is not float:
        raise FlawError(f"{column} {shown(value)} is not a number; expected {time}")
    scale: int = 10 ** DECIMALS[time]
    if not 0 <= value <= MAX_SECONDS * 10**9 // scale:  # also refuses NaN and infinity
        raise FlawError(f"{column} {shown(value)} is out of range; expected 0 to {MAX_SECONDS * 10**9 // scale}")
    return value * scale if isinstance(value, int) else round(value * scale)


def parse_session(column: str, value: Any) -> str | int | None:
    """The name or number of a session; None if it is empty. Raises ``FlawError``."""
    if value is None or value == "":
        return None
    if type(value) is not int and type(value) is not str:
        raise FlawError(f"{column} {shown(value)} is not a name; expected text or a whole number")
    return value
