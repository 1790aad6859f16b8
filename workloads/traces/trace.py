"""The base of all readers of traces: time windows, thinning, limits and rate scaling."""

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
from workloads.request import Prefixes, Request, Segment, WorkloadError, turn_kind
from workloads.rng import named_rng
from workloads.traces.bad_rows import BadRowLog, changed
from workloads.traces.files import shown_path

_BATCH = 4096
"""Rows in a batch; each segment of their content counts as one more."""

Bools = NDArray[np.bool_]


class Row(NamedTuple):
    """One request as it is in the trace, before windows and scaling."""

    seconds: float
    """Seconds since the first request of the trace; later turns of a session have the value of the first turn."""
    prompt_tokens: int
    output_tokens: int
    content: tuple[Segment, ...] = ()
    think_s: float = 0.0
    session: int | None = None
    priority: int = 0


class RowBatch(NamedTuple):
    """Successive rows of a trace, as columns, in order of time."""

    seconds: FloatArray
    """Seconds since the first request of the trace; shape (rows,)."""
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    contents: Sequence[tuple[Segment, ...]] | None = None
    """Content of each row; None if no row has any."""
    turns: tuple[Sequence[float], Sequence[int | None], Sequence[int]] | None = None
    """Think times in seconds, sessions and priorities; None if no row has any."""


@dataclass(frozen=True, slots=True)
class Trace(ABC):
    """The requests of a trace file, read in batches as they are needed; the whole file is checked at the start.

    Raises ``BadRowError`` for the first wrong row, counted from 1, and ``WorkloadError`` for faults of the file as a
    whole, or if it changes after the check. Memory holds one batch at a time, however long the file is; subclasses
    document what they hold beyond that.
    """

    path: Path
    limit: int | None = None
    """The most requests to keep; this may cut off the last turns of a session."""
    rate_scale: float = 1.0
    """Divide all arrival times by this: 2 doubles the rate and keeps the burstiness. Think times do not change."""
    start_s: float = 0.0
    stop_s: float | None = None
    """Keep the requests in ``[start_s, stop_s)``, in unscaled seconds since the first request of the trace."""
    keep: float = 1.0
    """Probability of keeping each request (or each whole session) in the window, drawn independently."""
    seed: int = 0
    """Seed of the draws for ``keep``."""
    skip_bad_rows: bool = False
    """Leave out wrong rows, and list them in ``notes``, instead of refusing the file."""
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)
    notes: tuple[str, ...] = field(default=(), init=False)
    """What was left out of the file or corrected in it, one line each."""
    _bad_rows: BadRowLog = field(init=False, repr=False, compare=False)
    _state: tuple[tuple[str, int, int], ...] = field(init=False, repr=False, compare=False)
    """Name, size and modification time of each file that was checked."""

    def __post_init__(self) -> None:
        bad_rows = BadRowLog(self.path, self.skip_bad_rows)
        object.__setattr__(self, "_bad_rows", bad_rows)
        object.__setattr__(self, "_state", tuple(map(_state_of, self._files())))
        inside, seen, thinning = 0, 0, _Thinning(self.keep, self.seed)
        for batch in self._batches(check_all=True):
            seen += len(batch.seconds)
            low, high = self._window(batch.seconds)
            chosen = thinning.choose(batch, low, high)
            inside += high - low if chosen is None else int(chosen.sum())
        bad_rows.closed = True
        count = inside if self.limit is None else min(inside, self.limit)
        if count == 0:
            if seen == 0 and self._has_header() and bad_rows.n_rows == 0:
                raise WorkloadError(f"{shown_path(self.path)}: no requests: only a header")
            where = " in the window" if self._windowed() else ""
            raise WorkloadError(f"{shown_path(self.path)}: no requests{where}{self._thinned()}{bad_rows.because()}")
        bad_rows.refuse_most()
        object.__setattr__(self, "n_requests", count)
        object.__setattr__(self, "notes", (*self._remarks(), *bad_rows.notes()))

    @property
    def prefixes(self) -> Prefixes:
        """Nothing, unless a subclass knows more."""
        return "unknown"

    def __iter__(self) -> Iterator[Request]:
        if tuple(map(_state_of, self._files())) != self._state:
            raise changed(self.path, "it, or a file that belongs to it, has another size or date")
        left, thinning = self.n_requests, _Thinning(self.keep, self.seed)
        last, turn = None, 0
        for batch in self._batches(check_all=False):
            low, high = self._window(batch.seconds)
            chosen = thinning.choose(batch, low, high)
            columns: list[Iterable[Any]] = [
                ((batch.seconds[low:high] - self.start_s) / self.rate_scale).tolist(),
                batch.prompt_tokens[low:high],
                batch.output_tokens[low:high],
            ]
            if batch.turns is not None:
                columns += (column[low:high] for column in batch.turns)
            # The content column comes last, since it may be unbounded.
            columns.append(repeat(()) if batch.contents is None else batch.contents[low:high])
            if chosen is not None:
                columns = [compress(column, chosen.tolist()) for column in columns]
            rows = zip(range(self.n_requests - left, self.n_requests), *columns, strict=False)
            if batch.turns is None:
                for i, arrival_s, prompt, output, content in rows:
                    yield Request(i, arrival_s, prompt, output, 0.0, content)
            else:
                for i, arrival_s, prompt, output, think_s, session, priority, content in rows:
                    turn = turn + 1 if session == last else 1
                    last, kind = session, 0 if session is None else turn_kind(turn)
                    yield Request(i, arrival_s, prompt, output, think_s, content, session, priority, kind=kind)
            left -= min(left, high - low if chosen is None else int(chosen.sum()))
            if left == 0:
                return
        raise changed(self.path, f"{left} of {self.n_requests} requests are gone")

    @abstractmethod
    def _batches(self, *, check_all: bool) -> Iterator[RowBatch]:
        """Read all good rows, in the order of the file; batches may be empty.

        ``check_all``: whether this is the first reading, which finds every fault. Later ones may skip checks that need
        memory for the whole file.
        """

    def _files(self) -> tuple[Path, ...]:
        """All files that are read."""
        return (self.path,)

    def _has_header(self) -> bool:
        """Whether the first line has the names of the columns."""
        return False

    def _remarks(self) -> tuple[str, ...]:
        """Further notes for users, one line each."""
        return ()

    def _window(self, seconds: FloatArray) -> tuple[int, int]:
        """The rows of a batch within the time window, as a half-open range of indices."""
        low = int(np.searchsorted(seconds, self.start_s))
        return low, len(seconds) if self.stop_s is None else max(low, int(np.searchsorted(seconds, self.stop_s)))

    def _windowed(self) -> bool:
        return self.start_s > 0 or self.stop_s is not None

    def _thinned(self) -> str:
        return f" (keep = {self.keep})" if self.keep < 1 else ""


class _Thinning:
    """Draws which rows are kept, once for each row or session, so that the sizes of batches do not matter."""

    __slots__ = ("_keep", "_last", "_rng", "_verdict")

    def __init__(self, keep: float, seed: int):
        self._keep, self._rng = keep, named_rng(seed, "thinning")
        self._last: int | None = None
        """Session of the previous row."""
        self._verdict = False

    def choose(self, batch: RowBatch, low: int, high: int) -> Bools | None:
        """Whether to keep each row of ``low:high`` in a batch; None for all."""
        if self._keep >= 1:
            return None
        if batch.turns is None:
            return self._rng.random(high - low) < self._keep
        chosen = np.zeros(high - low, dtype=np.bool_)
        for k, session in enumerate(batch.turns[1][low:high]):
            if session is None or session != self._last:
                self._verdict = bool(self._rng.random() < self._keep)
            self._last, chosen[k] = session, self._verdict
        return chosen


def in_batches(rows: Iterable[Row]) -> Iterator[RowBatch]:
    """Group rows into batches."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += 1 + len(row.content)
        if size >= _BATCH:
            yield batch_of(batch)
            batch, size = [], 0
    yield batch_of(batch)


def batch_of(rows: Sequence[Row]) -> RowBatch:
    """Make one batch of rows."""
    plain = all(row.session is None and not row.priority and not row.think_s for row in rows)
    return RowBatch(
        np.array([row.seconds for row in rows], dtype=np.float64),
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        [row.content for row in rows],
        None if plain else ([r.think_s for r in rows], [r.session for r in rows], [r.priority for r in rows]),
    )


def _state_of(path: Path) -> tuple[str, int, int]:
    """Name, size and modification time in nanoseconds; zeros if there is no file, which is reported on opening."""
    try:
        state = path.stat()
    except (OSError, ValueError):
        return str(path), 0, 0
    return str(path), state.st_size, state.st_mtime_ns
