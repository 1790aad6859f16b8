"""Puts the rows of a table in order: by arrival, and each session together from its first row on."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workloads.request import WorkloadError
from workloads.traces.files import shown_path
from workloads.traces.table_row import TableRow
from workloads.traces.trace import Row, RowBatch

MAX_SORTED = 10_000_000
"""The most rows that are sorted, in about 100 bytes each; a table in order may have any number."""
_BATCH = 4096

Ints = NDArray[np.int64]


class OutOfOrderError(Exception):
    """The rows of a table are not in order, so they must be sorted."""


@dataclass(slots=True)
class Turns:
    """Counts of the later turns of sessions, and how many of them may begin with the turn before."""

    later: int = 0
    quoting: int = 0

    @property
    def are_talks(self) -> bool:
        """Whether sessions look like conversations whose prompts repeat what was said: at least half of their turns."""
        return 0 < self.later <= 2 * self.quoting

    @property
    def note(self) -> str:
        """What the lengths of the turns say, for people; empty without later turns."""
        if not self.later:
            return ""
        many = f"{self.quoting:,} of {self.later:,} later turns are long enough to begin with the prompt and the answer"
        if self.are_talks:
            return f"{many} before them, and are assumed to"
        return f"only {many} before them, so what prompts share is taken as unknown"

    def add(self, later: int, quoting: int) -> None:
        """Count more turns."""
        self.later += later
        self.quoting += quoting


class OrderedRows:
    """Turns rows that are in order into requests, one by one."""

    __slots__ = ("_before", "_first", "_key", "_last", "_number", "_seen", "_start_s", "_turns")

    def __init__(self, turns: Turns | None):
        """``turns``: to count in; the names of all sessions are then held, to find one that comes again. Or None."""
        self._turns = turns
        self._seen: set[str | int] = set()
        self._key: str | int | None = None
        self._number = 0
        self._first: int | None = None
        self._last = 0
        """Nanoseconds at which the last session, or single request, began."""
        self._start_s = 0.0
        self._before: TableRow | None = None

    def row(self, row: TableRow) -> Row:
        """The row as a request. Raises ``OutOfOrderError``."""
        now, key, before = row.arrival_ns, row.session, self._before
        if before is not None and key is not None and key == self._key:
            if now < before.arrival_ns:
                raise OutOfOrderError
            think_s = (now - before.arrival_ns) / 1e9
            if self._turns is not None:
                self._turns.add(1, row.prompt_tokens >= before.prompt_tokens + before.output_tokens)
        else:
            self._begin(now, key)
            think_s = 0.0
        self._key, self._before = key, row
        session = None if key is None else self._number - 1
        return Row(self._start_s, row.prompt_tokens, row.output_tokens, (), think_s, session, row.priority)

    def _begin(self, now: int, key: str | int | None) -> None:
        if self._first is None:
            self._first = now
        elif now < self._last:
            raise OutOfOrderError
        if key is not None and self._turns is not None:
            if key in self._seen:
                raise OutOfOrderError
            self._seen.add(key)
        self._last, self._start_s = now, (now - self._first) / 1e9
        self._number += key is not None


@dataclass(slots=True)
class SortedRows:
    """All rows of a table by column, to be sorted."""

    path: Path
    turns: Turns
    """To count in."""
    arrivals: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds, less those of the first row."""
    prompts: array[int] = field(default_factory=lambda: array("i"))
    outputs: array[int] = field(default_factory=lambda: array("i"))
    sessions: array[int] = field(default_factory=lambda: array("i"))
    """Number of the session in order of the file; -1 for a request of its own."""
    priorities: array[int] = field(default_factory=lambda: array("i"))
    out_of_order: int = 0
    """Rows that are earlier than a row before them."""
    n_sessions: int = 0

    @property
    def note(self) -> str:
        """What was done, for people."""
        done = []
        if self.out_of_order:
            done.append(f"sorted by arrival, {self.out_of_order:,} of them out of order")
        if self.n_sessions:
            done.append(f"put together in {self.n_sessions:,} sessions")
        return f"{len(self.arrivals):,} rows were {', and '.join(done)}"

    def read(self, rows: Iterable[TableRow]) -> None:
        """Hold these rows. Raises ``WorkloadError`` for too many."""
        numbers: dict[str | int, int] = {}
        first = latest = 0
        for n, row in enumerate(rows):
            if n == MAX_SORTED:
                raise WorkloadError(
                    f"{shown_path(self.path)}: not in order of arrival, and more than {MAX_SORTED:,} rows, "
                    "which are not sorted here; sort the file"
                )
            if n == 0:
                first = latest = row.arrival_ns
            self.out_of_order += row.arrival_ns < latest
            latest = max(latest, row.arrival_ns)
            try:
                self.arrivals.append(row.arrival_ns - first)
            except OverflowError:
                raise WorkloadError(
                    f"{shown_path(self.path)}: arrivals lie more than 292 years apart, and not in order"
                ) from None
            self.prompts.append(row.prompt_tokens)
            self.outputs.append(row.output_tokens)
            self.sessions.append(-1 if row.session is None else numbers.setdefault(row.session, len(numbers)))
            self.priorities.append(row.priority)
        self.n_sessions = len(numbers)

    def batches(self) -> Iterator[RowBatch]:
        """The rows in order, in batches; counts the turns."""
        n = len(self.arrivals)
        if n == 0:
            return
        arrivals, sessions = np.array(self.arrivals, dtype=np.int64), np.array(self.sessions, dtype=np.int64)
        order, later, numbers = _order(arrivals, sessions)
        arrivals = arrivals[order] - arrivals.min()
        prompts, outputs = np.array(self.prompts)[order], np.array(self.outputs)[order]
        priorities = np.array(self.priorities)[order]
        # Each row's session starts at the last row that is not a later turn.
        starts = arrivals[np.maximum.accumulate(np.where(later, 0, np.arange(n)))]
        thinks = np.where(later, np.diff(arrivals, prepend=0), 0) / 1e9
        quoting = later[1:] & (prompts[1:] >= prompts[:-1].astype(np.int64) + outputs[:-1])
        self.turns.add(int(later.sum()), int(quoting.sum()))
        for low in range(0, n, _BATCH):
            part = slice(low, low + _BATCH)
            named: list[int | None] = [None if number < 0 else number for number in numbers[part].tolist()]
            turns = (thinks[part].tolist(), named, priorities[part].tolist())
            yield RowBatch(starts[part] / 1e9, prompts[part].tolist(), outputs[part].tolist(), None, turns)


def _order(arrivals: Ints, sessions: Ints) -> tuple[Ints, NDArray[np.bool_], Ints]:
    """The order of rows, whether each row in that order is a later turn, and its session, numbered in that order.

    Rows of equal times stay in the order of the file.
    """
    n = len(arrivals)
    by_time = np.argsort(arrivals, kind="stable")
    groups = np.where(sessions[by_time] < 0, n + np.arange(n), sessions[by_time])
    _, first, which = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first[which], kind="stable")
    begins = first[which][order]
    later = np.diff(begins, prepend=-1) == 0
    rows = by_time[order]
    alone = sessions[rows] < 0
    numbers = np.where(alone, -1, np.cumsum(~later & ~alone) - 1)
    return rows, later, numbers
