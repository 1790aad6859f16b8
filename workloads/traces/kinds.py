"""The kinds of traces, and how to tell which kind a file is."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import IO, Any

from workloads.request import WorkloadError
from workloads.traces.azure import AzureTrace
from workloads.traces.bad_rows import quoted
from workloads.traces.burstgpt import BurstGptTrace
from workloads.traces.files import not_text, not_utf8, open_bytes, shown_path
from workloads.traces.jsonl import MAX_LINE
from workloads.traces.mooncake import MooncakeTrace
from workloads.traces.observed import ObservedTrace
from workloads.traces.own_logs import NAMES, LogTrace, log_form, why_no_log
from workloads.traces.parquet import PARQUET
from workloads.traces.ragpulse import RagPulseTrace
from workloads.traces.recorded import LINES, RecordedTrace
from workloads.traces.row_trace import RowTrace
from workloads.traces.table import TableTrace
from workloads.traces.table_row import Columns
from workloads.traces.trace import Trace
from workloads.traces.weka import WekaTrace

KINDS: dict[str, type[Trace]] = {
    "azure": AzureTrace,
    "burstgpt": BurstGptTrace,
    "mooncake": MooncakeTrace,
    "ragpulse": RagPulseTrace,
    "weka": WekaTrace,
    "recorded": RecordedTrace,
    "observed": ObservedTrace,
    "log": LogTrace,
    "table": TableTrace,
}
"""The built-in readers by their ``kind`` in scenarios."""


def readers() -> dict[str, type[Trace]]:
    """All readers by kind: built-in ones, then those that other packages register."""
    return KINDS | others(KINDS)


_START = 1 << 14
"""Bytes that are inspected, from the first that is not blank; a longer first line is read in full."""

_NAMES = 100
"""The most characters of columns' names in a message."""

_KEY = re.compile(r'"(\w+)"\s*:\s*("\w*|[\[{])?')
"""A key in a line that cannot be parsed, and how its value begins."""
_COMPONENTS = {"sys_prompt", "passages_ids", "user_input", "web_search"}
_LENGTHS = {"input_length", "output_length"}
_BLANK = b" \t\r\n\v\f"

_CSV_SIGNS = (
    ("azure", {"contexttokens", "generatedtokens"}),
    ("burstgpt", {"request tokens", "response tokens", "total tokens", "log type"}),
    ("table", set(Columns().named)),
)
_AZURE_ROW = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[^,;\t]*[,;\t]")


def sniff(path: Path | str) -> str:
    """Guess the kind of a trace file from its beginning.

    A damaged file gets the likeliest kind, whose reader describes the fault. Raises ``WorkloadError`` if no kind
    fits or the file cannot be opened.
    """
    path = _path_of(path)
    shown = shown_path(path)
    start = read_beginning(path)
    if start.startswith(PARQUET):
        return "table"
    kinds = f"expected a trace of one of the kinds {', '.join(readers())}"
    if not start:
        raise WorkloadError(f"{shown}: empty file; {kinds}")
    # The last character may be cut; a few wrong bytes are left to the reader, which names their row.
    text = start.decode("utf-8", errors="surrogateescape")
    is_json = text.startswith(("{", "["))
    first = text.splitlines()[0]
    if fault := not_text(start[:_START]) or ("" if is_json else not_utf8(first)):
        raise WorkloadError(f"{shown}: {fault}; {kinds}")
    if text.count("\0") > len(text) // 10 or "\0" * 8 in text or (not is_json and "\0" in first):
        raise WorkloadError(f"{shown}: zero bytes; {kinds}, in UTF-8 (is this UTF-16, or an archive?)")
    signs = _json_kind(text.replace("\0", "")) if is_json else _csv_kind(first)
    if signs in (None, "table", "ragpulse") and log_form(text) is not None:
        signs = "log"
    names = list(next(objects(text), ())) if is_json else header_names(first)[1]
    if signs in (None, "table", "log"):
        signs = _registered_kind(names, "jsonl" if is_json else "csv") or signs
    if signs is None:
        if why := why_no_log(text):
            raise WorkloadError(f"{shown}: {why}")
        own = f"; if it is a table of your own, {how_to_name_columns(names)}" if len(names) > 1 else ""
        raise WorkloadError(f"{shown}: begins with {quoted(first)}; {kinds}{own}")
    return signs


def open_trace(path: Path | str, kind: str | None = None, **options: Any) -> Trace:
    """Open a trace file of a given kind, or of the kind that it looks like; ``options`` are those of the reader.

    Raises ``WorkloadError``.
    """
    path = _path_of(path)
    kind = sniff(path) if kind is None else kind
    if kind not in (known := readers()):
        raise WorkloadError(f"{shown_path(path)}: no kind of trace is called {kind!r}; accepted: {', '.join(known)}")
    reader = known[kind]
    accepted = [option.name for option in fields(reader) if option.init and option.name != "path"]
    for name in options:
        if name not in accepted:
            raise WorkloadError(
                f"{shown_path(path)}: {name}: a trace of kind {kind} has no such option; "
                f"accepted: {', '.join(accepted)}"
            )
    return reader(path, **options)


def _path_of(path: Path | str) -> Path:
    if not str(path):
        raise WorkloadError("an empty path; the path of a trace file is expected")
    return Path(path)


def read_beginning(path: Path) -> bytes:
    """Read the bytes of a file that are inspected, with the whole first line. Raises ``WorkloadError``."""
    with open_bytes(path) as raw:
        return _beginning(raw)


def header_names(header: str) -> tuple[str, list[str]]:
    """Split the first line of a CSV file; returns the delimiter that gives most fields, and the fields."""
    rows = {}
    for delimiter in ",;\t|":
        try:
            rows[delimiter] = next(csv.reader([header], delimiter=delimiter), [])
        except csv.Error:
            continue
    if not rows:
        return ",", []
    best = max(rows, key=lambda delimiter: len(rows[delimiter]))
    return best, rows[best]


def how_to_name_columns(names: Sequence[str]) -> str:
    """Say which columns a table has, and how to tell what they are."""
    found = ", ".join(name.strip() if name.isprintable() else ascii(name) for name in names)
    found = found if len(found) <= _NAMES else f"{found[: _NAMES - 3]}..."
    required, others = Columns._fields[:3], Columns._fields[3:]
    syntax = ",".join(f"{field}={_nearest(field, names)}" for field in required)
    return f"name its columns with --columns {syntax} (and {', '.join(others)}, if there); found: {found}"


def _nearest(field: str, names: Sequence[str]) -> str:
    """The column whose name is most like ours for this, or like that of logs; NAME if none is."""
    plain = {name.strip().casefold(): name.strip() for name in names}
    for known in (field, *NAMES.get(field, ())):
        if close := get_close_matches(known.casefold(), plain, n=1):
            return plain[close[0]]
    return "NAME"


def _beginning(raw: IO[bytes]) -> bytes:
    """The first bytes after a byte order mark and blanks, with the whole first line unless it is huge."""
    start = raw.read(_START).removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
    while not start:
        piece = raw.read(_START)
        if not piece:
            return b""
        start = piece.lstrip(_BLANK)
    return start if b"\n" in start else start + raw.readline(MAX_LINE)


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The rows that are objects, or arrays that begin with one, among those that can be parsed."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        row = row[0] if isinstance(row, list) and row else row
        if isinstance(row, dict):
            yield row


def _json_kind(text: str) -> str | None:
    """The kind by keys and types of the first conclusive row; by those in the first line if no row can be parsed."""
    rows = list(objects(text))
    if not rows:
        # The contents of an array may begin in another line.
        first = text if text.startswith("[") else text.partition("\n")[0]
        rows = [{key: _beginning_with(start) for key, start in reversed(_KEY.findall(first))}]
    return next((kind for kind in map(_row_kind, rows) if kind is not None), None)


def _beginning_with(start: str) -> Any:
    """A value of the type of one that begins so."""
    return [] if start == "[" else {} if start == "{" else start[1:] if start else 0


def _row_kind(row: dict[str, Any]) -> str | None:
    keys, ids = row.keys(), row.get("hash_ids")
    if row.get("kind") == "observed" or (row.get("kind") == "request" and "prompt_units" in keys):
        return "observed"
    if row.get("kind") in LINES:
        return "recorded"
    plain = keys & _LENGTHS or set(Columns().named) <= keys
    if isinstance(row.get("requests"), list) or (not plain and keys & {"requests", "hash_id_scope", "tool_tokens"}):
        return "weka"
    if not isinstance(ids, list) and (
        isinstance(ids, dict) or isinstance(row.get("timestamp"), str) or keys & _COMPONENTS
    ):
        return "ragpulse"
    if keys & _LENGTHS or "hash_ids" in keys:
        return "mooncake"
    return "table" if keys & set(Columns().named) else None


def _csv_kind(header: str) -> str | None:
    names = {name.strip(' "').casefold() for name in re.split(r"[,;\t|]", header)}
    found = next((kind for kind, known in _CSV_SIGNS if names & known), None)
    return found or ("azure" if _AZURE_ROW.match(header) else None)


def _registered_kind(names: Sequence[str], format: str) -> str | None:
    """The kind of the first registered reader whose columns are all there."""
    for kind, reader in others(KINDS).items():
        if issubclass(reader, RowTrace) and reader.format == format and set(reader.columns) <= set(names):
            return kind
    return None


ENTRY_POINT_GROUP = "kvsim.readers"
"""Where other packages register readers: subclasses of ``Trace``, by the kind of trace that they read."""

_NAME = re.compile(r"[\w.+@-]+")


class ReaderWarning(UserWarning):
    """A registered reader was left out. The message is one line."""


def others(taken: Container[str]) -> dict[str, type[Trace]]:
    """The registered readers by kind, but those that cannot be imported or whose kind is taken: a warning says so."""
    found = {}
    for kind, reader, fault in _registered(entry_points):
        fault = fault or (f"{kind!r} is a kind of trace already" if kind in taken or kind in found else "")
        if reader is None or fault:
            warnings.warn(f"reader {kind!r} is left out: {fault}", ReaderWarning, stacklevel=2)
        else:
            found[kind] = reader
    return found


@cache
def _registered(
    search: Callable[..., Iterable[EntryPoint]],
) -> list[tuple[str, type[Trace] | None, str]]:
    """Kind, reader and fault of each entry point, by kind; looked for once in a process."""
    found: list[tuple[str, type[Trace] | None, str]] = []
    for point in sorted(search(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        fault, reader = "", None
        try:
            reader = point.load()
        except (Exception, SystemExit) as e:
            fault = f"it cannot be imported: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"
        if not fault and not (isinstance(reader, type) and issubclass(reader, Trace)):
            fault = f"a subclass of workloads.api.Trace is expected, got {reader!r:.60}"
        elif not _NAME.fullmatch(point.name):
            fault = "letters, digits and any of . _ + @ - are accepted in its name"
        found.append((point.name, reader, fault))
    return found
