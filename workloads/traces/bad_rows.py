"""Log of the rows of a trace that are left out or corrected.

The first reading of a file fills the log; later readings leave out the same rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from workloads.request import BadRowError, WorkloadError
from workloads.traces.files import not_utf8, shown_path

MAX_BAD_ROWS = 100_000
"""The most bad rows that are skipped; a file with more is probably of another kind."""

_NAMED = 20
"""The most rows that a note lists; the others are counted."""

Raw = TypeVar("Raw")
Good = TypeVar("Good")


class FlawError(Exception):
    """A fault of a row, in one line; ``BadRowLog.sift`` adds the row and the file."""


class BadRowLog:
    """The rows of one trace that are left out or corrected.

    Takes eight bytes for each bad row, and the text of the first few faults.
    """

    __slots__ = (
        "_advice",
        "_bad",
        "_closed",
        "_dropped",
        "_falls",
        "_first",
        "_named",
        "_others",
        "_path",
        "_rows",
        "_skips",
        "_what",
    )

    def __init__(self, path: Path, *, skips: bool = False):
        """``skips``: leave out bad rows instead of raising the first one."""
        self._path, self._skips = Path(shown_path(path)), skips
        """The path as messages show it."""
        self._rows = 0
        """Rows in the first reading."""
        self._advice = ""
        self._closed = False
        self._bad = array("q")
        self._first: BadRowError | None = None
        self._named: list[str] = []
        self._what = ""
        self._dropped: list[int] = []
        self._others = 0
        """Dropped rows that notes do not list."""
        self._falls: list[str] = []

    @property
    def n_rows(self) -> int:
        """Number of rows in the first reading, good or bad."""
        return self._rows

    @property
    def closed(self) -> bool:
        """Whether the first reading is over."""
        return self._closed

    def close(self) -> None:
        """End the first reading; later ones leave out the same rows."""
        self._closed = True

    def sift(self, rows: Iterable[tuple[int, Raw]], read: Callable[[Raw], Good]) -> Iterator[Good]:
        """Apply ``read`` to each row and yield the results of the good ones; ``rows`` are numbered from 1.

        ``read`` raises ``FlawError`` for a bad row, and then must not have changed any state. Raises ``BadRowError``
        for the first bad row, or, if they are skipped, ``WorkloadError`` for too many; in later readings also if a
        good row has become bad, since then the file has changed.
        """
        if self._closed:
            yield from self._again(rows, read)
            return
        for number, raw in rows:
            self._rows += 1
            try:
                good = read(raw)
            except FlawError as flaw:
                self._leave_out(BadRowError(self._path, number, str(flaw)))
            else:
                yield good

    def hint(self, advice: str) -> str:
        """Text to append to a fault to give advice; empty if bad rows are skipped, where a note has the advice once."""
        if not self._skips:
            return f"; {advice}"
        self._advice = advice
        return ""

    def drop(self, number: int, what: str) -> None:
        """Count a valid row that is left out on request; ``what`` names such rows."""
        if self._closed:
            return
        self._what = what
        if len(self._dropped) < _NAMED:
            self._dropped.append(number)
        else:
            self._others += 1

    def clock_fell(self, number: int, added_s: int) -> None:
        """Log that from this row on, ``added_s`` more seconds are added to times."""
        if not self._closed:
            self._falls.append(f"row {number}: {added_s:,} s added from there on")

    def notes(self) -> tuple[str, ...]:
        """The log for users, one line for each kind of entry."""
        lines = []
        if self._bad:
            count = _counted(len(self._bad), "bad row")
            lines.append(f"{count} skipped: {_listed(self._named, len(self._bad) - len(self._named))}")
        if self._advice:
            lines.append(f"among the bad rows: {self._advice}")
        if self._dropped:
            n = len(self._dropped) + self._others
            rows = _listed([f"{number}" for number in self._dropped], self._others)
            lines.append(f"{_counted(n, self._what)} dropped: {'row' if n == 1 else 'rows'} {rows}")
        if len(self._falls) == 1:
            lines.append(f"the clock jumped back once, at {self._falls[0]}")
        elif self._falls:
            named = "; ".join(self._falls[:_NAMED])
            others = len(self._falls) - _NAMED
            more = f"; and {others:,} more" if others > 0 else ""
            lines.append(f"the clock jumped back {len(self._falls):,} times, at {named}{more}")
        return tuple(f"{self._path}: {line}" for line in lines)

    def because(self) -> str:
        """Text to append when no row is left, about the bad rows that were skipped; empty without any."""
        if self._first is None:
            return ""
        return f"; {_counted(len(self._bad), 'bad row')} skipped, the first: row {self._first.row}: {self._first.what}"

    def refuse_most(self) -> None:
        """Raise ``WorkloadError`` if more than half of all rows are bad."""
        if self._first is not None and 2 * len(self._bad) > self._rows:
            raise WorkloadError(
                f"{self._path}: more than half of the rows are wrong: {len(self._bad):,} of {self._rows:,}; "
                f"the first: row {self._first.row}: {self._first.what}"
            )

    def _again(self, rows: Iterable[tuple[int, Raw]], read: Callable[[Raw], Good]) -> Iterator[Good]:
        bad = iter(self._bad)
        skipped = next(bad, 0)
        for number, raw in rows:
            if number == skipped:
                skipped = next(bad, 0)
                continue
            try:
                good = read(raw)
            except FlawError as flaw:
                raise changed(self._path, f"now row {number} is bad: {flaw}") from None
            yield good

    def _leave_out(self, fault: BadRowError) -> None:
        if not self._skips:
            raise fault from None
        if self._first is None:
            self._first = fault
        if len(self._bad) == MAX_BAD_ROWS:
            first = f"row {self._first.row}: {self._first.what}"
            raise WorkloadError(f"{self._path}: more than {MAX_BAD_ROWS:,} bad rows; the first: {first}") from None
        self._bad.append(fault.row)
        if len(self._named) < _NAMED:
            self._named.append(f"row {fault.row} ({fault.what})")


def check_text(text: str) -> None:
    """Raise ``FlawError`` if the text contains bytes that are not UTF-8."""
    if not text.isascii() and (found := not_utf8(text)):
        raise FlawError(found)


def changed(path: Path, how: str) -> WorkloadError:
    """The error for a file that has changed since it was checked."""
    return WorkloadError(f"{shown_path(path)}: changed since it was checked ({how}); run again")


def quoted(text: str) -> str:
    """A field of a row in quotes, shortened to one line."""
    whole = repr(text[:60])
    return whole if len(text) <= 60 else f"{whole[:57]}..."


def _counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _listed(named: Sequence[str], others: int) -> str:
    return ", ".join(named) + (f", and {others:,} more" if others else "")
