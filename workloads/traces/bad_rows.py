"""Which rows of a trace are left out, and what was mended: written at the first reading, kept to by later ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from workloads.request import BadRowError, WorkloadError
from workloads.traces.files import no_text, shown_path

MAX_BAD_ROWS = 100_000
"""A file with more bad rows than this is another kind of file, not one with some bad rows."""

_NAMED = 20
"""Rows that a note names; of the others it gives the number."""

Raw = TypeVar("Raw")
Good = TypeVar("Good")


class FlawError(Exception):
    """What is wrong with a row, in one line; ``Ledger.sift`` says in which row of which file."""


class BadRowLog:
    """The rows of one trace that are left out or mended.

    Holds eight bytes for each bad row, and the reasons of the first few.
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
        """``skips``: bad rows are left out; else the first of them is raised."""
        self._path, self._skips = Path(shown_path(path)), skips
        """The path as messages show it."""
        self._rows = 0
        """Rows that were read for the first time."""
        self._advice = ""
        self._closed = False
        self._bad = array("q")
        self._first: BadRowError | None = None
        self._named: list[str] = []
        self._what = ""
        self._dropped: list[int] = []
        self._others = 0
        """Rows dropped beyond those that are named."""
        self._falls: list[str] = []

    @property
    def n_rows(self) -> int:
        """Rows that were sifted at the first reading, good or bad."""
        return self._rows

    @property
    def closed(self) -> bool:
        """Whether the first reading is over."""
        return self._closed

    def close(self) -> None:
        """The first reading is over; from now on the same rows are left out."""
        self._closed = True

    def sift(self, rows: Iterable[tuple[int, Raw]], read: Callable[[Raw], Good]) -> Iterator[Good]:
        """What ``read`` makes of each good row; ``rows`` are numbered from 1.

        ``read`` raises ``FlawError`` for a bad row, and must not remember anything of it. Raises ``BadRowError`` for
        the first one, or, if they are to be left out, ``WorkloadError`` where they are too many; and in later readings
        where a row that was good is bad, since then the file is another one.
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
        """What follows a fault to say what would help against it: where bad rows are left out, a note instead, once."""
        if not self._skips:
            return f"; {advice}"
        self._advice = advice
        return ""

    def drop(self, number: int, what: str) -> None:
        """A row that is as it should be is not wanted; ``what`` says what such a row is."""
        if self._closed:
            return
        self._what = what
        if len(self._dropped) < _NAMED:
            self._dropped.append(number)
        else:
            self._others += 1

    def clock_fell(self, number: int, added_s: int) -> None:
        """From that row on, so many more seconds are added to the times than before."""
        if not self._closed:
            self._falls.append(f"row {number}: {added_s:,} s added from there on")

    def notes(self) -> tuple[str, ...]:
        """What a user must know, a line each."""
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
            lines.append(f"the clock fell once, at {self._falls[0]}")
        elif self._falls:
            named = "; ".join(self._falls[:_NAMED])
            others = len(self._falls) - _NAMED
            more = f"; and {others:,} more" if others > 0 else ""
            lines.append(f"the clock fell {len(self._falls):,} times, at {named}{more}")
        return tuple(f"{self._path}: {line}" for line in lines)

    def because(self) -> str:
        """Why there is nothing left, where bad rows were left out; else nothing."""
        if self._first is None:
            return ""
        return f"; {_counted(len(self._bad), 'bad row')} skipped, the first: row {self._first.row}: {self._first.what}"

    def refuse_most(self) -> None:
        """Raises ``WorkloadError`` where more than half of all rows were left out: they are no exceptions then."""
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
    """Part of a row, or all of it, which has no bytes that are no text. Raises ``FlawError``."""
    if not text.isascii() and (found := no_text(text)):
        raise FlawError(found)


def changed(path: Path, how: str) -> WorkloadError:
    """The file is no longer the one that was checked."""
    return WorkloadError(f"{shown_path(path)}: changed since it was checked ({how}); run again")


def quoted(text: str) -> str:
    """A field of a row in quotes, in one short line."""
    whole = repr(text[:60])
    return whole if len(text) <= 60 else f"{whole[:57]}..."


def _counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _listed(named: Sequence[str], others: int) -> str:
    return ", ".join(named) + (f", and {others:,} more" if others else "")
