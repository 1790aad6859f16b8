"""What a row of a table says, whatever format the table has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from workloads.traces.bad_rows import FlawError
from workloads.traces.clock import MAX_SECONDS, parse_datetime
from workloads.traces.jsonl import shown

Time = Literal["s", "ms", "us", "ns", "datetime"]
"""The unit of arrivals; or they are dates with a time."""

MAX_PRIORITY = 2**31 - 1
"""And as much below 0."""

DECIMALS = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Nanoseconds are so many digits behind the point."""


class Columns(NamedTuple):
    """What the columns are called. None: there is no such column."""

    arrival: str = "arrival"
    prompt: str = "prompt"
    """Tokens."""
    output: str = "output"
    """Tokens."""
    session: str | None = None
    priority: str | None = None
    """The smaller, the more urgent."""

    @property
    def named(self) -> tuple[str, ...]:
        """Those that there are, each once."""
        return tuple(dict.fromkeys(name for name in self if name is not None))


class Cells(NamedTuple):
    """What a row says."""

    arrival_ns: int
    told: str
    """The arrival as the row has it."""
    prompt_tokens: int
    output_tokens: int
    session: str | int | None = None
    priority: int = 0


Read = Callable[[Any], Cells]
"""Makes a row's cells out of what a format has."""


def parse_value(column: str, value: Any, time: Time) -> int:
    """Nanoseconds that an arrival says which is no text but has a type of its own. Raises ``FlawError``."""
    if time == "datetime":
        if not isinstance(value, str):
            raise FlawError(f"{column} {shown(value)} is not text; expected YYYY-MM-DD HH:MM:SS.fffffff")
        return parse_datetime(column, value)
    if type(value) is not int and type(value) is not float:
        raise FlawError(f"{column} {shown(value)} is not a number; expected {time}")
    scale: int = 10 ** DECIMALS[time]
    if not 0 <= value <= MAX_SECONDS * 10**9 // scale:  # NaN is not, nor is infinity
        raise FlawError(f"{column} {shown(value)} is out of range; expected 0 to {MAX_SECONDS * 10**9 // scale}")
    return value * scale if isinstance(value, int) else round(value * scale)


def parse_session(column: str, value: Any) -> str | int | None:
    """A session's name or number; None where there is none. Raises ``FlawError``."""
    if value is None or value == "":
        return None
    if type(value) is not int and type(value) is not str:
        raise FlawError(f"{column} {shown(value)} is not a name; expected text or a whole number")
    return value
