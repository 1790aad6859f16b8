"""What tables have, independent of the file format."""

from __future__ import annotations

from typing import Literal, NamedTuple

Time = Literal["s", "ms", "us", "ns", "datetime"]
"""The unit of arrivals; ``datetime``: a date and time, in UTC unless there is an offset."""

SINCE_1970: tuple[tuple[float, Time], ...] = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))
"""From these numbers on, a time is no number of seconds, but one of smaller units since 1970."""


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
    prompt_tokens: int
    output_tokens: int
    session: str | int | None = None
    priority: int = 0
