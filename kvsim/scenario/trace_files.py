"""Scenarios of trace files that are named on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsim.errors import UserError
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.trace_sections import TRACES, is_registered
from workloads import sniff
from workloads.traces import mooncake, weka
from workloads.traces.kinds import readers
from workloads.traces.table_form import table_form
from workloads.traces.table_row import Time

_BLOCK_TOKENS = {"mooncake": mooncake.BLOCK_TOKENS, "weka": weka.BLOCK_TOKENS}
"""Tokens in the blocks that a trace names, by its kind."""


def trace_scenario(
    path: str | Path,
    kind: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    time: Time | None = None,
    own_blocks: bool = False,
    **keys: Any,
) -> Scenario:
    """Make a scenario that replays a trace file.

    ``kind``: by default the one that the file looks like, or ``table`` if columns or times are given. ``columns``:
    which column of a table is what (``table_form``). ``time``: the unit of its arrivals. ``own_blocks``: cut the cache
    into the blocks that the trace names. ``keys``: further keys of ``[workload]``. Raises ``UserError`` and
    ``WorkloadError``.
    """
    path = str(path)
    if kind is None:
        kind = "table" if columns or time else sniff(path)
    if kind not in TRACES and not is_registered(kind):
        raise UserError(f"{path}: no kind of trace is called {kind!r}; accepted: {', '.join(readers())}")
    workload = {"kind": kind, "path": path, **keys}
    if kind == "table":
        form = table_form(path, columns, time)
        named = {field: name for field, name in form.columns._asdict().items() if name is not None}
        workload |= {**form._asdict(), "columns": named}
    elif columns or time:
        raise UserError(f"{path}: --columns and --time are for tables; a trace of kind {kind} has columns of its own")
    cache = {"block_size": _BLOCK_TOKENS[kind]} if own_blocks and kind in _BLOCK_TOKENS else {}
    return load_scenario({"name": _name_of(path), "workload": workload, "cache": cache})


def _name_of(path: str) -> str:
    """A name for a folder of results: that of the file up to its first dot."""
    stem = Path(path).name.split(".")[0]
    return "".join(c if c.isalnum() or c in "_+=@-" else "_" for c in stem)[:100].lstrip("_+=@-") or "trace"
