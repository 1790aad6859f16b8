"""Finds the format, the columns and the unit of times of a table of one's own by its beginning."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workloads.request import WorkloadError
from workloads.traces.bad_rows import quoted
from workloads.traces.clock import TIMESTAMP
from workloads.traces.files import shown_path
from workloads.traces.kinds import header_names, how_to_name_columns, objects, read_beginning
from workloads.traces.own_logs import NAMES
from workloads.traces.parquet import PARQUET, parquet_columns
from workloads.traces.table import Format
from workloads.traces.table_row import SINCE_1970, Columns, Time

_REQUIRED = Columns._fields[:3]


class TableForm(NamedTuple):
    """How a table is to be read."""

    format: Format
    columns: Columns
    time: Time
    delimiter: str


def table_form(path: Path | str, columns: Mapping[str, str] | None = None, time: Time | None = None) -> TableForm:
    """Look at the beginning of a table.

    ``columns``: names of columns by our field; fields that are not given are found by their own names, or else by
    those that logs have for them (``own_logs.NAMES``), in small or capital letters. ``time``: the unit of arrivals; by
    default dates where they are written so, and else seconds, unless the numbers are so large that they must be smaller
    units since 1970. Raises ``WorkloadError``.
    """
    path, given = Path(path), dict(columns or {})
    for field in given:
        if field not in Columns._fields:
            close = difflib.get_close_matches(field, Columns._fields, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise WorkloadError(f"--columns: there is no {quoted(field)}; {hint}accepted: {', '.join(Columns._fields)}")
    start = read_beginning(path)
    if start.startswith(PARQUET):
        stamped = parquet_columns(path)
        found = _find(path, list(stamped), given)
        return TableForm("parquet", found, time or ("datetime" if stamped.get(found.arrival) else "s"), ",")
    text = start.decode("utf-8", errors="replace")
    if text.startswith(("{", "[")):
        row = next(objects(text), {})  # If there is none, the reader says so.
        found = _find(path, list(row), given)
        return TableForm("jsonl", found, time or _unit(row.get(found.arrival)), ",")
    lines = [line for line in text.splitlines() if line.strip()]
    delimiter, names = header_names(lines[0] if lines else "")
    found = _find(path, names, given)
    first = next(csv.reader(lines[1:2], delimiter=delimiter), [])
    values = dict(zip(names, first, strict=False))
    return TableForm("csv", found, time or _unit(values.get(found.arrival)), delimiter)


def _find(path: Path, names: Sequence[str], given: Mapping[str, str]) -> Columns:
    """The names of all columns. Raises ``WorkloadError`` if one that is needed is not clear."""
    found: dict[str, str | None] = {}
    for field in Columns._fields:
        if field in given:
            # The header may have blanks around the name.
            found[field] = next((name for name in names if name.strip() == given[field].strip()), given[field])
            continue
        plain = {name.strip().casefold() for name in names}
        called = (
            field
            if field in plain
            else next((name for name in map(str.casefold, NAMES.get(field, ())) if name in plain), field)
        )
        like = [name for name in names if name.strip().casefold() == called]
        found[field] = like[0] if len(like) == 1 else None
    missing = [field for field in _REQUIRED if found[field] is None]
    if missing:
        what = f"no column is clearly {' or '.join(missing)}"
        raise WorkloadError(f"{shown_path(path)}: {what}; {how_to_name_columns(names)}")
    return Columns(**found)  # type: ignore[arg-type]


def _unit(value: Any) -> Time:
    """The unit of a time as it is written."""
    if isinstance(value, str) and TIMESTAMP.fullmatch(value.strip()):
        return "datetime"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return "s"
    return next((unit for least, unit in SINCE_1970 if number >= least), "s")
