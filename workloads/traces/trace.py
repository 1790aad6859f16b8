"""What readers of trace files share: a window of the trace's time, thinning, a limit, a scale of the rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workloads.generators.lengths import FloatArray
from workloads.request import Request, Segment, WorkloadError
from workloads.rng import named_rng
from workloads.traces.bad_rows import BadRowLog, changed
from workloads.traces.files import shown_path

_PAGE = 4096
"""Rows, and blocks that they name, that are read one by one before they are handed on together."""

Bools = NDArray[np.bool_]


class Row(NamedTuple):
    """One request as a trace tells it."""

    seconds: float
    """From the trace's first request; of a session's later turns, what its first turn has."""
    prompt_tokens: int
    output_tokens: int
    content: tuple[Segment, ...] = ()
    think_s: float = 0.0
    session: int | None = None
    priority: int = 0


class Page(NamedTuple):
    """Successive rows of a trace, by column; in order of time, as the whole trace is."""

    seconds: FloatArray
    """From the trace's first request; shape (rows,)."""
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    contents: Sequence[tuple[Segment, ...]] | None = None
    """None: no row has any."""
    turns: tuple[Sequence[float], Sequence[int | None], Sequence[int]] | None = None
    """Seconds of thinking, sessions, priorities. None: no row has any."""


@dataclass(frozen=True, slots=True)
class Trace(ABC):
    """The requests of a trace file, read page by page as they are asked for; the whole file is checked at the start.

    Raises ``BadRowError`` for the first row that is wrong, counted from 1, and ``WorkloadError`` for whatever is wrong
    with the file as a whole, or has changed in it since it was checked. No more than a page is held at a time, however
    long the file is; what a kind of trace must hold beyond that, its class says.
    """

    path: Path
    limit: int | None = None
    """Keep this many requests at most; of a session that it cuts, the first turns."""
    rate_scale: float = 1.0
    """Divide all arrival times by this: 2 doubles the rate and keeps the burstiness. Users think as long as before."""
    start_s: float = 0.0
    stop_s: float | None = None
    """Keep the requests of ``[start_s, stop_s)``, in the trace's own seconds from its first request."""
    keep: float = 1.0
    """Share of the rows in the window that are kept, each by a draw of its own; a session stays or goes whole."""
    seed: int = 0
    """Of these draws."""
    skip_bad_rows: bool = False
    """Leave out rows that are wrong, and say so in ``notes``, instead of refusing the file."""
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)
    notes: tuple[str, ...] = field(default=(), init=False)
    """What was left out of the file or mended, a line each."""
    _ledger: BadRowLog = field(init=False, repr=False, compare=False)
    _state: tuple[tuple[str, int, int], ...] = field(init=False, repr=False, compare=False)
    """Name, size and time of change of each file that was checked."""

    def __post_init__(self) -> None:
        bad_rows = BadRowLog(self.path, skips=self.skip_bad_rows)
        object.__setattr__(self, "_ledger", bad_rows)
        object.__setattr__(self, "_state", tuple(map(_state_of, self._files())))
        inside, seen, thinning = 0, 0, _Thinning(self.keep, self.seed)
        for page in self._pages(check_all=True):
            seen += len(page.seconds)
            low, high = self._window(page.seconds)
            chosen = thinning.choose(page, low, high)
            inside += high - low if chosen is None else int(chosen.sum())
        bad_rows.close()
        count = inside if self.limit is None else min(inside, self.limit)
        if count == 0:
            if seen == 0 and self._has_header() and bad_rows.n_rows == 0:
                raise WorkloadError(f"{shown_path(self.path)}: no requests: only a header")
            where = " in the window" if self._windowed() else ""
            raise WorkloadError(f"{shown_path(self.path)}: no requests{where}{self._thinned()}{bad_rows.because()}")
        bad_rows.refuse_most()
        object.__setattr__(self, "n_requests", count)
        object.__setattr__(self, "notes", (*self._remarks(), *bad_rows.notes()))

    def __iter__(self) -> Iterator[Request]:
        if tuple(map(_state_of, self._files())) != self._state:
            raise changed(self.path, "it, or a file that belongs to it, has another size or date")
        left, thinning = self.n_requests, _Thinning(self.keep, self.seed)
        for page in self._pages(check_all=False):
            low, high = self._window(page.seconds)
            chosen = thinning.choose(page, low, high)
            columns: list[Iterable[Any]] = [
                ((page.seconds[low:high] - self.start_s) / self.rate_scale).tolist(),
                page.prompt_tokens[low:high],
                page.output_tokens[low:high],
            ]
            if page.turns is not None:
                columns += (column[low:high] for column in page.turns)
            # The longest column, and the one that may be endless, comes last.
            columns.append(repeat(()) if page.contents is None else page.contents[low:high])
            if chosen is not None:
                columns = [compress(column, chosen.tolist()) for column in columns]
            rows = zip(range(self.n_requests - left, self.n_requests), *columns, strict=False)
            if page.turns is None:
                for i, arrival_s, prompt, output, content in rows:
                    yield Request(i, arrival_s, prompt, output, 0.0, content)
            else:
                for i, arrival_s, prompt, output, think_s, session, priority, content in rows:
                    yield Request(i, arrival_s, prompt, output, think_s, content, session, priority)
            left -= min(left, high - low if chosen is None else int(chosen.sum()))
            if left == 0:
                return
        raise changed(self.path, f"{left} of {self.n_requests} requests are gone")

    @abstractmethod
    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        """Every good row of the file, in its order, checked; pages may be empty.

        ``check_all``: the first reading, which finds every fault; later ones may spare what only memory can tell.
        """

    def _files(self) -> tuple[Path, ...]:
        """All that is read."""
        return (self.path,)

    def _has_header(self) -> bool:
        """Whether the first line names the columns."""
        return False

    def _remarks(self) -> tuple[str, ...]:
        """What else a user must know, a line each."""
        return ()

    def _window(self, seconds: FloatArray) -> tuple[int, int]:
        """Which of a page's rows are kept: from one, up to before another."""
        low = int(np.searchsorted(seconds, self.start_s))
        return low, len(seconds) if self.stop_s is None else max(low, int(np.searchsorted(seconds, self.stop_s)))

    def _windowed(self) -> bool:
        return self.start_s > 0 or self.stop_s is not None

    def _thinned(self) -> str:
        return f" (keep = {self.keep})" if self.keep < 1 else ""


class _Thinning:
    """Which rows are kept, one draw for each row or session, so that it does not matter how they come in pages."""

    __slots__ = ("_keep", "_last", "_rng", "_verdict")

    def __init__(self, keep: float, seed: int):
        self._keep, self._rng = keep, named_rng(seed, "thinning")
        self._last: int | None = None
        """The session of the row before."""
        self._verdict = False

    def choose(self, page: Page, low: int, high: int) -> Bools | None:
        """Of a page's rows from ``low`` to before ``high``; None: all."""
        if self._keep >= 1:
            return None
        if page.turns is None:
            return self._rng.random(high - low) < self._keep
        chosen = np.zeros(high - low, dtype=np.bool_)
        for k, session in enumerate(page.turns[1][low:high]):
            if session is None or session != self._last:
                self._verdict = bool(self._rng.random() < self._keep)
            self._last, chosen[k] = session, self._verdict
        return chosen


def paged(rows: Iterable[Row]) -> Iterator[Page]:
    """Rows that come one by one, as pages."""
    page, size = [], 0
    for row in rows:
        page.append(row)
        size += 1 + len(row.content)
        if size >= _PAGE:
            yield page_of(page)
            page, size = [], 0
    yield page_of(page)


def page_of(rows: Sequence[Row]) -> Page:
    """Rows as a page."""
    plain = all(row.session is None and not row.priority and not row.think_s for row in rows)
    return Page(
        np.array([row.seconds for row in rows], dtype=np.float64),
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        [row.content for row in rows],
        None if plain else ([r.think_s for r in rows], [r.session for r in rows], [r.priority for r in rows]),
    )


def _state_of(path: Path) -> tuple[str, int, int]:
    """Name, size and time of change in nanoseconds; of what is no file, zeros (whoever opens it says what it is)."""
    try:
        state = path.stat()
    except (OSError, ValueError):
        return str(path), 0, 0
    return str(path), state.st_size, state.st_mtime_ns
