"""The kinds of trace that can be read, and which of them a file is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from workloads.azure import AzureTrace
from workloads.burstgpt import BurstGptTrace
from workloads.cells import Columns
from workloads.files import open_bytes
from workloads.ledger import quoted
from workloads.mooncake import MooncakeTrace
from workloads.ragpulse import RagPulseTrace
from workloads.request import WorkloadError
from workloads.table import TableTrace
from workloads.traces import Trace
from workloads.weka import WekaTrace

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
"""Bytes that are looked at."""

_JSON_SIGNS = (
    ("weka", r'"requests"\s*:|"hash_id_scope"|"tool_tokens"'),
    ("ragpulse", r'"hash_ids"\s*:\s*\{|"(sys_prompt|passages_ids|user_input|web_search)"|"timestamp"\s*:\s*"'),
    ("mooncake", r'"(hash_ids|input_length|output_length)"'),
    ("table", r'"(arrival|prompt|output)"\s*:'),
)
"""What tells the kinds apart, in this order; also where a part of a row is missing or damaged."""

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
    path = Path(path)
    with open_bytes(path) as raw:
        start = raw.read(_START)
    if start.startswith(b"PAR1"):
        return "table"
    kinds = f"expected a trace of one of the kinds {', '.join(KINDS)}"
    if not start.strip():
        raise WorkloadError(f"{path}: empty file; {kinds}")
    try:
        # The last character may be cut.
        text = start.decode("utf-8-sig", errors="strict" if len(start) < _START else "ignore")
    except UnicodeDecodeError as e:
        raise WorkloadError(f"{path}: not UTF-8 text (byte {e.object[e.start]:#04x}); {kinds}") from None
    if "\0" in text:
        raise WorkloadError(f"{path}: zero bytes; {kinds}, in UTF-8 (is this UTF-16, or an archive?)")
    text = text.lstrip()
    signs = _json_kind(text) if text.startswith(("{", "[")) else _csv_kind(text.splitlines()[0])
    if signs is None:
        shown = quoted(text.splitlines()[0])
        raise WorkloadError(f"{path}: begins with {shown}; {kinds}; table reads any columns that are named")
    return signs


def open_trace(path: Path | str, kind: str | None = None, **options: Any) -> Trace:
    """The trace in a file, of a kind that is given or found; ``options`` are those of its reader.

    Raises ``WorkloadError``.
    """
    path = Path(path)
    kind = sniff(path) if kind is None else kind
    if kind not in KINDS:
        raise WorkloadError(f"{path}: no kind of trace is called {kind!r}; there are {', '.join(KINDS)}")
    reader = KINDS[kind]
    accepted = [option.name for option in fields(reader) if option.init and option.name != "path"]
    for name in options:
        if name not in accepted:
            raise WorkloadError(
                f"{path}: {name}: a trace of kind {kind} has no such option; accepted: {', '.join(accepted)}"
            )
    return reader(path, **options)


def _json_kind(text: str) -> str | None:
    return next((kind for kind, sign in _JSON_SIGNS if re.search(sign, text)), None)


def _csv_kind(header: str) -> str | None:
    names = {name.strip(' "').casefold() for name in re.split(r"[,;\t|]", header)}
    found = next((kind for kind, known in _CSV_SIGNS if names & known), None)
    return found or ("azure" if _AZURE_ROW.match(header) else None)
