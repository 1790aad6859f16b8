"""Reads Parquet tables in batches; needs pyarrow, which the extra ``parquet`` installs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from workloads.request import MissingExtraError, WorkloadError
from workloads.traces.bad_rows import BadRowLog, FlawError
from workloads.traces.columns import NAMES, NUMBERS, STAMPS, WHOLE, Column, Schema
from workloads.traces.files import open_bytes, packing_of, shown_path
from workloads.traces.parquet_pages import BadPageError, check_pages, footer_limit

PARQUET = b"PAR1"
"""The first bytes of a Parquet file."""
_BATCH = 4096
"""Rows that are decoded at a time."""
_TICKS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds in each unit of a time stamp."""

Good = TypeVar("Good")


def read_parquet(
    path: Path, columns: Schema, bad_rows: BadRowLog, use: Callable[[int, list[Any]], Good]
) -> Iterator[Good]:
    """What ``use`` makes of each good row: of its number, from 1, and of the values of these columns.

    Raises ``WorkloadError``, also if pyarrow is missing, the file is not Parquet or damaged, or a column has a wrong
    type.
    """

    def read(number: int, values: tuple[Any, ...]) -> Good:
        row = dict(zip(columns, values, strict=True))
        return use(number, [_value(column, row, name) for name, column in columns.items()])

    yield from bad_rows.sift(_rows(path, columns), read)


def parquet_columns(path: Path) -> dict[str, bool]:
    """The names of all columns, and whether each has time stamps. Raises ``WorkloadError``."""
    with _open(path) as (_, file, pa):
        return {field.name: pa.types.is_timestamp(field.type) for field in file.schema_arrow}


def _value(column: Column, row: dict[str, Any], name: str) -> Any:
    if column.holds in (NUMBERS, STAMPS) and row[name] is None:
        raise FlawError(f"{name} is missing; expected a time")
    # Time stamps are nanoseconds already.
    return row[name] if column.holds == STAMPS else column.of_value(row, name)


def _rows(path: Path, columns: Schema) -> Iterator[tuple[int, tuple[Any, ...]]]:
    number = 0
    with _open(path, lambda: number) as (raw, file, pa):
        _check_types(path, file.schema_arrow, columns, pa.types)
        check_pages(raw, list(columns))
        for batch in file.iter_batches(_BATCH, columns=list(columns), use_threads=False):
            lists = [_values(batch.column(name), column, pa) for name, column in columns.items()]
            for row in zip(*lists, strict=True):
                number += 1
                yield number, row


@contextmanager
def _open(path: Path, row: Callable[[], int] = lambda: 0) -> Iterator[tuple[IO[bytes], Any, Any]]:
    """Open a file; gives its bytes, pyarrow's ``ParquetFile``, and pyarrow.

    ``row``: the last row that was read, for messages. Raises ``WorkloadError``, also for faults while it is open.
    """
    shown = shown_path(path)
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(f"{shown}: reading Parquet needs pyarrow", "parquet") from None
    with open_bytes(path) as raw:
        if packing := packing_of(path):
            raise WorkloadError(f"{shown}: Parquet data in {packing}, which cannot be searched; unpack it first")
        if raw.read(len(PARQUET)) != PARQUET:
            raise WorkloadError(f"{shown}: not Parquet data, which begins with {PARQUET.decode()}")
        try:
            limit = footer_limit(raw)
            with parquet.ParquetFile(
                raw, buffer_size=1 << 16, pre_buffer=False, thrift_container_size_limit=limit
            ) as file:
                yield raw, file, pa
        except BadPageError as e:
            raise WorkloadError(f"{shown}: damaged Parquet data ({e})") from None
        except (pa.ArrowException, OSError, EOFError, OverflowError) as e:
            what = " ".join(str(e).split())[:200]
            raise WorkloadError(f"{shown}: damaged Parquet data after row {row()} ({what})") from None


def _values(values: Any, column: Column, pa: Any) -> list[Any]:
    """The values of a column as Python objects; time stamps as nanoseconds since 1970."""
    if column.holds != STAMPS:
        return list(values.to_pylist())
    ticks = _TICKS[values.type.unit]
    return [None if n is None else n * ticks for n in values.cast(pa.int64()).to_pylist()]


def _check_types(path: Path, schema: Any, columns: Schema, types: Any) -> None:
    """Raise ``WorkloadError`` unless each column is there once, with a type that fits."""
    fits: dict[str, tuple[Callable[[Any], bool], ...]] = {
        WHOLE: (types.is_integer,),
        NUMBERS: (types.is_integer, types.is_floating),
        STAMPS: (types.is_timestamp,),
        NAMES: (types.is_string, types.is_large_string, types.is_integer, types.is_null),
    }
    for name in columns:
        if (n := len(schema.get_all_field_indices(name))) != 1:
            what = f"{n} columns" if n else "no column"
            there = ", ".join(schema.names)
            there = there if len(there) <= 80 else there[:77] + "..."
            raise WorkloadError(f"{shown_path(path)}: {what} {name!r}; expected {', '.join(columns)}, got {there!r}")
    for name, column in columns.items():
        kind = schema.field(name).type
        if not any(fit(kind) for fit in fits[column.holds]):
            shown_kind = " ".join(str(kind).split())[:60]
            expected = f"has the type {shown_kind}; expected {column.holds}"
            raise WorkloadError(f"{shown_path(path)}: column {name!r} {expected}")
