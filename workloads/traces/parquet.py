"""Reads Parquet tables in batches; needs pyarrow, which the extra ``parquet`` installs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from workloads.request import MissingExtraError, WorkloadError
from workloads.traces.bad_rows import FlawError
from workloads.traces.files import open_bytes, packing_of, shown_path
from workloads.traces.jsonl import shown, tokens, whole
from workloads.traces.parquet_pages import BadPageError, check_pages, footer_limit
from workloads.traces.table_row import MAX_PRIORITY, Columns, RowParser, TableRow, Time, parse_session, parse_value

_MAGIC = b"PAR1"
_BATCH = 4096
"""Rows that are decoded at a time."""
_TICKS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds in each unit of a time stamp."""

Rows = Iterator[tuple[int, Sequence[Any]]]


def parquet_rows(path: Path, columns: Columns, time: Time) -> tuple[Rows, RowParser]:
    """The rows, numbered from 1, with a value for each of ``columns.named``; and a function that parses one row.

    Iterating over the rows raises ``WorkloadError`` if pyarrow is missing, the file is not Parquet or damaged, or a
    column has a wrong type.
    """
    arrival, prompt, output, session, priority = columns
    named = columns.named

    def parse_row(row: Sequence[Any]) -> TableRow:
        values = dict(zip(named, row, strict=True))
        value = values[arrival]
        if value is None:
            raise FlawError(f"{arrival} is missing; expected a time")
        # Time stamps are nanoseconds already.
        now = value if time == "datetime" else parse_value(arrival, value, time)
        name = None if session is None else parse_session(session, values[session])
        rank = 0 if priority is None else whole(values, priority, -MAX_PRIORITY, MAX_PRIORITY)
        return TableRow(now, shown(value), tokens(values, prompt), tokens(values, output), name, rank)

    return _rows(path, columns, time), parse_row


def parquet_columns(path: Path) -> dict[str, bool]:
    """The names of all columns, and whether each has time stamps. Raises ``WorkloadError``."""
    with _open(path) as (_, file, pa):
        return {field.name: pa.types.is_timestamp(field.type) for field in file.schema_arrow}


def _rows(path: Path, columns: Columns, time: Time) -> Rows:
    number = 0
    with _open(path, lambda: number) as (raw, file, pa):
        places = _check_types(path, file.schema_arrow, columns, time, pa.types)
        check_pages(raw, places)
        for batch in file.iter_batches(_BATCH, columns=list(columns.named), use_threads=False):
            lists = [_values(batch.column(name), time, name == columns.arrival, pa) for name in places]
            for row in zip(*lists, strict=True):
                number += 1
                yield number, row


@contextmanager
def _open(path: Path, row: Callable[[], int] = lambda: 0) -> Iterator[tuple[IO[bytes], Any, Any]]:
    """Open a file; gives its bytes, pyarrow's ``ParquetFile``, and pyarrow.

    ``row``: the last row that was read, for messages. Raises ``WorkloadError``, also for faults while it is open.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(f"{shown_path(path)}: reading Parquet needs pyarrow", "parquet") from None
    with open_bytes(path) as raw:
        if packing := packing_of(path):
            raise WorkloadError(
                f"{shown_path(path)}: Parquet data in {packing}, which cannot be searched; unpack it first"
            )
        if raw.read(len(_MAGIC)) != _MAGIC:
            raise WorkloadError(f"{shown_path(path)}: not Parquet data, which begins with {_MAGIC.decode()}")
        try:
            limit = footer_limit(raw)
            with parquet.ParquetFile(
                raw, buffer_size=1 << 16, pre_buffer=False, thrift_container_size_limit=limit
            ) as file:
                yield raw, file, pa
        except BadPageError as e:
            raise WorkloadError(f"{shown_path(path)}: damaged Parquet data ({e})") from None
        except (pa.ArrowException, OSError, EOFError, OverflowError) as e:
            what = " ".join(str(e).split())[:200]
            raise WorkloadError(f"{shown_path(path)}: damaged Parquet data after row {row()} ({what})") from None


def _values(column: Any, time: Time, is_arrival: bool, pa: Any) -> list[Any]:
    """The values of a column as Python objects; time stamps as nanoseconds since 1970."""
    if not (is_arrival and time == "datetime"):
        return list(column.to_pylist())
    ticks = _TICKS[column.type.unit]
    return [None if n is None else n * ticks for n in column.cast(pa.int64()).to_pylist()]


def _check_types(path: Path, schema: Any, columns: Columns, time: Time, types: Any) -> tuple[str, ...]:
    """The names of the columns. Raises ``WorkloadError`` unless each is there once, with a supported type."""
    for name in columns.named:
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            what = "no column" if not found else f"{len(found)} columns"
            there = ", ".join(schema.names)
            there = there if len(there) <= 80 else there[:77] + "..."
            raise WorkloadError(
                f"{shown_path(path)}: {what} {name!r}; expected {', '.join(columns.named)}, got {there!r}"
            )
    whole = ("whole numbers", types.is_integer)
    wanted = {
        columns.prompt: whole,
        columns.output: whole,
        columns.arrival: ("time stamps", types.is_timestamp)
        if time == "datetime"
        else ("numbers", lambda t: types.is_integer(t) or types.is_floating(t)),
        columns.session: (
            "text or whole numbers",
            lambda t: types.is_string(t) or types.is_large_string(t) or types.is_integer(t) or types.is_null(t),
        ),
        columns.priority: whole,
    }
    for name in columns.named:
        what, fits = wanted[name]
        kind = schema.field(name).type
        if not fits(kind):
            shown_kind = " ".join(str(kind).split())[:60]
            raise WorkloadError(f"{shown_path(path)}: column {name!r} has the type {shown_kind}; expected {what}")
    return columns.named
