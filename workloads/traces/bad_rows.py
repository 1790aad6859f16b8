"""Log of the rows of a trace that are left out or corrected.

The first reading of a file fills the log; later readings leave out the same rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class BadRowLog:
    """The rows of one trace that are left out or corrected: eight bytes for each, and the text of the first faults."""

    path: Path
    skips: bool = False
    """Leave out bad rows instead of raising the first one."""
    n_rows: int = 0
    """Number of rows in the first reading, good or bad."""
    closed: bool = False
    """Whether the first reading is over; later ones leave out the same rows."""
    _bad: array[int] = field(default_factory=lambda: array("q"))
    _faults: list[BadRowError] = field(default_factory=list)
    """The first bad rows."""
    _advice: str = ""
    _dropped: list[int] = field(default_factory=list)
    """The first dropped rows."""
    _n_dropped: int = 0
    _what: str = ""
    """What dropped rows are called."""
    _falls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = Path(shown_path(self.path))

    def sift(self, rows: Iterable[tuple[int, Raw]], read: Callable[[int, Raw], Good]) -> Iterator[Good]:
        """Apply ``read`` to each row and yield the results of the good ones; ``rows`` are numbered from 1.

        ``read`` raises ``FlawError`` for a bad row, and then must not have changed any state. Raises ``BadRowError``
        for the first bad row, or, if they are skipped, ``WorkloadError`` for too many; in later readings also if a
        good row has become bad, since then the file has changed.
        """
        again = self.closed
        known = iter(self._bad if again else ())
        skipped = next(known, 0)
        for number, raw in rows:
            if number == skipped:
                skipped = next(known, 0)
                continue
            self.n_rows += not again
            try:
                good = read(number, raw)
            except FlawError as flaw:
                if again:
                    raise changed(self.path, f"now row {number} is bad: {flaw}") from None
                self._leave_out(BadRowError(self.path, number, str(flaw)))
            else:
                yield good

    def hint(self, advice: str) -> str:
        """Text to append to a fault to give advice; empty if bad rows are skipped, where a note has the advice once."""
        if not self.skips:
            return f"; {advice}"
        self._advice = advice
        return ""

    def drop(self, number: int, what: str) -> None:
        """Count a valid row that is left out on request; ``what`` names such rows."""
        if not self.closed:
            self._what = what
            self._n_dropped += 1
            if len(self._dropped) < _NAMED:
                self._dropped.append(number)

    def clock_fell(self, number: int, added_s: int) -> None:
        """Log that from this row on, ``added_s`` more seconds are added to times."""
        if not self.closed:
            self._falls.append(f"row {number}: {added_s:,} s added from there on")

    def notes(self) -> tuple[str, ...]:
        """The log for users, one line for each kind of entry."""
        lines = []
        if n := len(self._bad):
            named = [f"row {fault.row} ({fault.what})" for fault in self._faults]
            lines.append(f"{_counted(n, 'bad row')} skipped: {_listed(named, n)}")
        if self._advice:
            lines.append(f"among the bad rows: {self._advice}")
        if n := self._n_dropped:
            rows = _listed([str(number) for number in self._dropped], n)
            lines.append(f"{_counted(n, self._what)} dropped: {'row' if n == 1 else 'rows'} {rows}")
        if n := len(self._falls):
            times = "once" if n == 1 else f"{n:,} times"
            lines.append(f"the clock jumped back {times}, at {_listed(self._falls[:_NAMED], n, '; ')}")
        return tuple(f"{self.path}: {line}" for line in lines)

    def because(self) -> str:
        """Text to append when no row is left, about the bad rows that were skipped; empty without any."""
        return f"; {_counted(len(self._bad), 'bad row')} skipped, {self._first()}" if self._bad else ""

    def refuse_most(self) -> None:
        """Raise ``WorkloadError`` if more than half of all rows are bad."""
        if 2 * len(self._bad) > self.n_rows:
            much = f"{len(self._bad):,} of {self.n_rows:,}"
            raise WorkloadError(f"{self.path}: more than half of the rows are wrong: {much}; {self._first()}")

    def _first(self) -> str:
        return f"the first: row {self._faults[0].row}: {self._faults[0].what}"

    def _leave_out(self, fault: BadRowError) -> None:
        if not self.skips:
            raise fault from None
        if len(self._bad) == MAX_BAD_ROWS:
            raise WorkloadError(f"{self.path}: more than {MAX_BAD_ROWS:,} bad rows; {self._first()}") from None
        self._bad.append(fault.row)
        if len(self._faults) < _NAMED:
            self._faults.append(fault)


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


def _listed(named: Sequence[str], n: int, mark: str = ", ") -> str:
    """The first of ``n`` things, and how many more there are."""
    more = n - len(named)
    return mark.join(named) + (f"{mark}and {more:,} more" if more > 0 else "")
