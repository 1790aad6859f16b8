"""The base of readers of files with one request in each row, in order of time: a subclass says what the columns are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from workloads.traces.bad_rows import FlawError, quoted
from workloads.traces.clock import Clock
from workloads.traces.columns import Column, Schema, read_csv, read_jsonl
from workloads.traces.jsonl import Object, shown
from workloads.traces.trace import Row, RowBatch, Trace, in_batches

Make = Callable[[int, list[Any]], tuple[Any, ...] | list[Any] | None]
"""Makes a request of a row: of its number, and of the values of all columns but the time.

Gives the tokens of its prompt and of its answer, and perhaps the content of the prompt; None leaves the row out. Raises
``FlawError`` for a bad row, and then must not have changed anything.
"""


class RowTrace(Trace):
    """A trace with one request in each row, none earlier than the row before."""

    __slots__ = ()

    format: ClassVar[Literal["csv", "jsonl"]] = "csv"
    columns: ClassVar[Schema]
    """What each column, or key of an object, holds: the time first, then what ``start`` takes; others are ignored."""
    ticks: ClassVar[float] = 1e9
    """The units of time in a second."""

    def start(self, *, check_all: bool) -> Make:
        """Begin a reading of the file; by default the columns after the time are prompt and answer, in tokens.

        ``check_all``: as in ``_batches``.
        """
        return lambda number, values: values

    def went_back(self, written: str, behind: int) -> int:
        """What to add to all times from a row on that is ``behind`` ticks earlier than the row before.

        ``written``: name and value of its time, for messages. Raises ``FlawError``, by default always.
        """
        raise FlawError(f"{written} is earlier than the row before")

    def drop(self, number: int, what: str) -> None:
        """Count a valid row that is left out on request; ``what`` names such rows, for a note."""
        self._bad_rows.drop(number, what)

    def _has_header(self) -> bool:
        return self.format == "csv"

    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        return in_batches(self._rows(check_all=check_all))

    def _rows(self, *, check_all: bool) -> Iterator[Row]:
        """The good rows, one by one. Raises ``WorkloadError``."""
        clock = Clock()
        read = read_csv if self.format == "csv" else read_jsonl
        rows = read(self.path, self._timed(clock), self._bad_rows, self._reader(clock, check_all=check_all))
        return (row for row in rows if row is not None)

    def _timed(self, clock: Clock) -> dict[str, Column]:
        """The columns, of which the first also looks at the clock."""
        columns = dict(self.columns)
        name, time = next(iter(columns.items()))

        def of_text(name: str, text: str) -> int:
            now: int = time.of_text(name, text) + clock.added
            behind = clock.last - now
            clock.fell = self.went_back(f"{name} {quoted(text)}", behind) if behind > 0 else 0
            return now + clock.fell

        def of_value(row: Object, name: str) -> int:
            now: int = time.of_value(row, name) + clock.added
            behind = clock.last - now
            clock.fell = self.went_back(f"{name} {shown(row[name])}", behind) if behind > 0 else 0
            return now + clock.fell

        columns[name] = Column(of_text, of_value)
        return columns

    def _reader(self, clock: Clock, *, check_all: bool) -> Callable[[int, list[Any]], Row | None]:
        """The function that makes a row of its number and values, and advances the clock."""
        make, ticks = self.start(check_all=check_all), self.ticks

        def read(number: int, values: list[Any]) -> Row | None:
            now = values.pop(0)
            made = make(number, values)
            if made is None:
                return None
            if clock.fell:
                self._bad_rows.clock_fell(number, clock.fell // int(ticks))
            # Only now, so that the next row is compared with the last good one.
            return Row(clock.move(now) / ticks, *made)

        return read
