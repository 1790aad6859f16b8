"""What readers of trace files share: a window of the trace's time, a limit, a scale of the rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from workloads.request import Request, Segment, WorkloadError


class Row(NamedTuple):
    """One request as a trace tells it."""

    seconds: float
    """From the trace's first request."""
    prompt_tokens: int
    output_tokens: int
    content: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace(ABC):
    """The requests of a trace file, read as they are asked for; the whole file is checked at the start.

    Raises ``WorkloadError`` for the first thing that is wrong, with its data row counted from 1.
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
        inside = sum(1 for row in self._rows() if self._keeps(row.seconds))
        count = inside if self.limit is None else min(inside, self.limit)
        if count == 0:
            raise WorkloadError(f"{self.path}: no requests{' in the window' if self._windowed() else ''}")
        object.__setattr__(self, "n_requests", count)

    def __iter__(self) -> Iterator[Request]:
        kept = 0
        for seconds, prompt, output, content in self._rows():
            if not self._keeps(seconds):
                continue
            if kept == self.limit:
                return
            yield Request(kept, (seconds - self.start_s) / self.rate_scale, prompt, output, content=content)
            kept += 1

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """Every row of the file, in its order, checked."""

    def _keeps(self, seconds: float) -> bool:
        return seconds >= self.start_s and (self.stop_s is None or seconds < self.stop_s)

    def _windowed(self) -> bool:
        return self.start_s > 0 or self.stop_s is not None
