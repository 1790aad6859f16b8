"""What readers of trace files share: a window of the trace's time, a limit, a scale of the rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workloads.lengths import FloatArray
from workloads.request import Request, Segment, WorkloadError

_PAGE = 4096
"""Rows, and blocks that they name, that are read one by one before they are handed on together."""


class Row(NamedTuple):
    """One request as a trace tells it."""

    seconds: float
    """From the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    content: tuple[Segment, ...] = ()


class Page(NamedTuple):
    """Successive rows of a trace, by column; in order of time, as the whole trace is."""

    seconds: FloatArray
    """From the trace's first request; shape (rows,)."""
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    contents: Sequence[tuple[Segment, ...]] | None = None
    """None: no row has any."""


@dataclass(frozen=True, slots=True)
class Trace(ABC):
    """The requests of a trace file, read page by page as they are asked for; the whole file is checked at the start.

    Raises ``WorkloadError`` for the first thing that is wrong, with its data row counted from 1. No more than a page
    is held at a time, however long the file is; what a kind of trace must hold beyond that, its class says.
    """

    path: Path
    limit: int | None = None
    """Keep this many requests at most."""
    rate_scale: float = 1.0
    """Divide all times by this: 2 doubles the rate and keeps the burstiness."""
    start_s: float = 0.0
    stop_s: float | None = None
    """Keep the requests of ``[start_s, stop_s)``, in the trace's own seconds from its first request."""
    users: None = field(default=None, init=False)
    n_requests: int = field(init=False)

    def __post_init__(self) -> None:
        inside = 0
        for page in self._pages(check_all=True):
            low, high = self._window(page.seconds)
            inside += high - low
        count = inside if self.limit is None else min(inside, self.limit)
        if count == 0:
            raise WorkloadError(f"{self.path}: no requests{' in the window' if self._windowed() else ''}")
        object.__setattr__(self, "n_requests", count)

    def __iter__(self) -> Iterator[Request]:
        left = self.n_requests
        for page in self._pages(check_all=False):
            low, high = self._window(page.seconds)
            high = min(high, low + left)
            rows = zip(
                range(self.n_requests - left, self.n_requests),
                ((page.seconds[low:high] - self.start_s) / self.rate_scale).tolist(),
                page.prompt_tokens[low:high],
                page.output_tokens[low:high],
                repeat(()) if page.contents is None else page.contents[low:high],
                strict=False,
            )
            for i, arrival_s, prompt, output, content in rows:
                yield Request(i, arrival_s, prompt, output, 0.0, content)
            left -= high - low
            if left == 0:
                return

    @abstractmethod
    def _pages(self, *, check_all: bool) -> Iterator[Page]:
        """Every row of the file, in its order, checked; pages may be empty.

        ``check_all``: the first reading, which finds every fault; later ones may spare what only memory can tell.
        """

    def _window(self, seconds: FloatArray) -> tuple[int, int]:
        """Which of a page's rows are kept: from one, up to before another."""
        low = int(np.searchsorted(seconds, self.start_s))
        return low, len(seconds) if self.stop_s is None else max(low, int(np.searchsorted(seconds, self.stop_s)))

    def _windowed(self) -> bool:
        return self.start_s > 0 or self.stop_s is not None


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
    return Page(
        np.array([row.seconds for row in rows], dtype=np.float64),
        [row.prompt_tokens for row in rows],
        [row.output_tokens for row in rows],
        [row.content for row in rows],
    )
