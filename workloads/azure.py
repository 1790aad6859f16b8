"""The Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting" (ISCA 2024); public at
github.com/Azure/AzurePublicDataset under CC-BY-4.0. The 2023 files have CRLF line ends, seven decimals and no
final newline; the 2024 ones six decimals and an offset.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from workloads.files import open_text
from workloads.lengths import MAX_TOKENS
from workloads.request import WorkloadError
from workloads.traces import Row, Trace

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")


class AzureTrace(Trace):
    """The requests of one of these files."""

    __slots__ = ()

    def _rows(self) -> Iterator[Row]:
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
                    yield Row((ticks - origin) / 1e9, prompt, output)
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
