"""The kinds of trace that can be read, and which of them a file is."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from workloads.request import WorkloadError
from workloads.traces.azure import AzureTrace
from workloads.traces.bad_rows import quoted
from workloads.traces.burstgpt import BurstGptTrace
from workloads.traces.files import no_text, no_text_file, open_bytes, shown_path
from workloads.traces.jsonl import MAX_LINE
from workloads.traces.mooncake import MooncakeTrace
from workloads.traces.ragpulse import RagPulseTrace
from workloads.traces.table import PARQUET, TableTrace
from workloads.traces.table_cells import Columns
from workloads.traces.trace import Trace
from workloads.traces.weka import WekaTrace

KINDS: dict[str, type[Trace]] = {
    "azure": AzureTrace,
    "burstgpt": BurstGptTrace,
    "mooncake": MooncakeTrace,
    "ragpulse": RagPulseTrace,
    "weka": WekaTrace,
    "table": TableTrace,
}
"""Readers by what a scenario calls them."""

_START = 1 << 14
"""Bytes that are looked at, from the first that is not blank; a first line may be longer."""

_JSON_SIGNS = (
    ("weka", r'"requests"\s*:|"hash_id_scope"|"tool_tokens"'),
    ("ragpulse", r'"hash_ids"\s*:\s*\{|"(sys_prompt|passages_ids|user_input|web_search)"|"timestamp"\s*:\s*"'),
    ("mooncake", r'"(hash_ids|input_length|output_length)"'),
    ("table", r'"(arrival|prompt|output)"\s*:'),
)
"""What tells the kinds apart, in this order, where no row can be parsed."""
_COMPONENTS = {"sys_prompt", "passages_ids", "user_input", "web_search"}
_LENGTHS = {"input_length", "output_length"}
_BLANK = b" \t\r\n\v\f"

_CSV_SIGNS = (
    ("azure", {"contexttokens", "generatedtokens"}),
    ("burstgpt", {"request tokens", "response tokens", "total tokens", "log type"}),
    ("table", set(Columns().named)),
    ("azure", {"timestamp"}),
)
_AZURE_ROW = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[^,;\t]*[,;\t]")


def sniff(path: Path | str) -> str:
    """The kind of reader that suits a file, by how it begins; a damaged one goes to the likeliest, which says why.

    Raises ``WorkloadError`` where none suits, and for what cannot be opened.
    """
    path = _path_of(path)
    shown = shown_path(path)
    with open_bytes(path) as raw:
        start = _beginning(raw)
    if start.startswith(PARQUET):
        return "table"
    kinds = f"expected a trace of one of the kinds {', '.join(KINDS)}"
    if not start:
        raise WorkloadError(f"{shown}: empty file; {kinds}")
    # The last character may be cut; a few bytes that are wrong are for the reader of their rows.
    text = start.decode("utf-8", errors="surrogateescape")
    is_json = text.startswith(("{", "["))
    first = text.splitlines()[0]
    if fault := no_text_file(start[:_START]) or ("" if is_json else no_text(first)):
        raise WorkloadError(f"{shown}: {fault}; {kinds}")
    if text.count("\0") > len(text) // 10 or "\0" * 8 in text or (not is_json and "\0" in first):
        raise WorkloadError(f"{shown}: zero bytes; {kinds}, in UTF-8 (is this UTF-16, or an archive?)")
    signs = _json_kind(text.replace("\0", "")) if is_json else _csv_kind(first)
    if signs is None:
        raise WorkloadError(f"{shown}: begins with {quoted(first)}; {kinds}; table reads any columns that are named")
    return signs


def open_trace(path: Path | str, kind: str | None = None, **options: Any) -> Trace:
    """The trace in a file, of a kind that is given or found; ``options`` are those of its reader.

    Raises ``WorkloadError``.
    """
    path = _path_of(path)
    kind = sniff(path) if kind is None else kind
    if kind not in KINDS:
        raise WorkloadError(f"{shown_path(path)}: no kind of trace is called {kind!r}; there are {', '.join(KINDS)}")
    reader = KINDS[kind]
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
        raise WorkloadError("an empty path; that of a trace file is expected")
    return Path(path)


def _beginning(raw: IO[bytes]) -> bytes:
    """The file's first bytes after a byte order mark and blanks, and the whole of its first line if it is not huge."""
    start = raw.read(_START).removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
    while not start:
        piece = raw.read(_START)
        if not piece:
            return b""
        start = piece.lstrip(_BLANK)
    return start if b"\n" in start else start + raw.readline(MAX_LINE)


def _json_kind(text: str) -> str | None:
    """By the keys and the types of the first row that can be parsed and tells; else by the text of the first one."""
    parsed = False
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        row = row[0] if isinstance(row, list) and row else row
        if isinstance(row, dict):
            parsed = True
            if (kind := _row_kind(row)) is not None:
                return kind
    if parsed:
        return None
    # What an array holds may begin in another line.
    first = text if text.startswith("[") else text.partition("\n")[0]
    return next((kind for kind, sign in _JSON_SIGNS if re.search(sign, first)), None)


def _row_kind(row: dict[str, Any]) -> str | None:
    keys, ids = row.keys(), row.get("hash_ids")
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
