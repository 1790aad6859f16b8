"""The Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting" (ISCA 2024); public at
github.com/Azure/AzurePublicDataset under CC-BY-4.0. The 2023 files have CRLF line ends, seven decimals and no
final newline; the 2024 ones six decimals and an offset.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from workloads.files import open_text
from workloads.lengths import MAX_TOKENS
from workloads.request import Request, WorkloadError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")


@dataclass(frozen=True, slots=True)
class AzureTrace:
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
        inside = sum(1 for seconds, _, _ in self._rows() if self._keeps(seconds))
        count = inside if self.limit is None else min(inside, self.limit)
        if count == 0:
            raise WorkloadError(f"{self.path}: no requests{' in the window' if self._windowed() else ''}")
        object.__setattr__(self, "n_requests", count)

    def __iter__(self) -> Iterator[Request]:
        kept = 0
        for seconds, prompt, output in self._rows():
            if not self._keeps(seconds):
                continue
            if kept == self.limit:
                return
            yield Request(kept, (seconds - self.start_s) / self.rate_scale, prompt, output)
            kept += 1

    def _keeps(self, seconds: float) -> bool:
        return seconds >= self.start_s and (self.stop_s is None or seconds < self.stop_s)

    def _windowed(self) -> bool:
        return self.start_s > 0 or self.stop_s is not None

    def _rows(self) -> Iterator[tuple[float, int, int]]:
        """Seconds since the first row, prompt tokens, output tokens."""
        with open_text(self.path) as text:
            rows = csv.reader(text, strict=True)
            try:
                header = next(rows, None)
                columns = _find_columns(self.path, header)
                first: datetime | None = None
                ticks_before = 0
                for number, row in enumerate((r for r in rows if r), 1):
                    where = f"{self.path}: row {number}"
                    _check_shape(where, row, header or [])
                    moment, ticks = _parse_time(where, row[columns[0]])
                    first = first or moment
                    ticks += round((moment - first).total_seconds()) * 10**9
                    if number == 1:
                        origin = ticks_before = ticks
                    if ticks < ticks_before:
                        raise WorkloadError(f"{where}: TIMESTAMP {row[columns[0]]!r} is earlier than the row before")
                    ticks_before = ticks
                    prompt = _parse_tokens(where, "ContextTokens", row[columns[1]])
                    output = _parse_tokens(where, "GeneratedTokens", row[columns[2]])
                    yield (ticks - origin) / 1e9, prompt, output
            except csv.Error as e:
                raise WorkloadError(f"{self.path}: line {rows.line_num}: not CSV ({e})") from None


def _find_columns(path: Path, header: list[str] | None) -> tuple[int, int, int]:
    wanted = ",".join(_COLUMNS)
    if header is None:
        raise WorkloadError(f"{path}: empty file; expected the header {wanted}")
    for name in _COLUMNS:
        if header.count(name) != 1:
            what = "no column" if name not in header else f"{header.count(name)} columns"
            shown = ",".join(header)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise WorkloadError(f"{path}: header: {what} {name!r}; expected {wanted}, got {shown!r}")
    return header.index(_COLUMNS[0]), header.index(_COLUMNS[1]), header.index(_COLUMNS[2])


def _check_shape(where: str, row: list[str], header: list[str]) -> None:
    if row == header:
        raise WorkloadError(f"{where}: the header again; two files joined?")
    if len(row) != len(header):
        raise WorkloadError(f"{where}: {len(row)} fields, the header has {len(header)}")


def _parse_time(where: str, text: str) -> tuple[datetime, int]:
    """The whole second (UTC) and the nanoseconds beyond it."""
    match = _TIMESTAMP.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise WorkloadError(
            f"{where}: TIMESTAMP {text!r} is not a time; expected YYYY-MM-DD HH:MM:SS.fffffff"
        ) from None
    return moment, int((match[2] or ".0")[1:].ljust(9, "0"))


def _parse_tokens(where: str, column: str, text: str) -> int:
    digits = text.strip()
    if not re.fullmatch(r"-?[0-9]+", digits):
        raise WorkloadError(f"{where}: {column} {text!r} is not a whole number of tokens")
    # Longer than any number of tokens: refused before it is converted, which for huge strings is slow.
    tokens = int(digits) if len(digits) <= 20 else MAX_TOKENS + 1
    if not 1 <= tokens <= MAX_TOKENS:
        raise WorkloadError(f"{where}: {column} {digits[:24]} is out of range; expected 1 to {MAX_TOKENS}")
    return tokens
