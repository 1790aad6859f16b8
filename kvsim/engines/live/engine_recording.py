"""Record a scenario's run on the real llama.cpp, in the format that ``kvsim conform`` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsim.calibration.llamacpp_session import LlamaCppSession
from kvsim.engines.recordings.llamacpp_replay import runs_of_cells
from kvsim.engines.recordings.recording_files import check_target, write_recording
from kvsim.errors import Divergence, UserError
from kvsim.results import writable
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.recorder import Recorder
from kvsim.simulation.request_log import Progress
from kvsim.simulation.run import drive
from policies.layouts.multi_stream import MultiStreamPolicy
from real_engine.llama_cells import SHARED, StreamCells
from real_engine.llamacpp import LlamaCpp


@dataclass(frozen=True, slots=True)
class Recording:
    """Summary of a recording that was written."""

    path: Path
    engine: str
    """Name and version of llama.cpp."""
    policy: str
    records: int
    seen: int
    """Records with cells that llama.cpp showed."""
    divergence: str | None
    """First difference between llama.cpp and the policy, with which the recording ends; None if there was none."""

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        told = asdict(self)
        return {"file": str(told.pop("path")), **told}


def record(
    scenario: Scenario | str | Path,
    path: str | Path,
    policy: str | None = None,
    *,
    model: str | None = None,
    threads: int = 1,
    library: Path | str | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Run the scenario on llama.cpp and record every operation and the cells that llama.cpp shows.

    ``policy``: one of those that describe this version of llama.cpp. ``model``: a GGUF file in place of the scenario's.
    ``library``: a folder with another llama-cpp-python than the installed one.

    The schedule follows the policy. If llama.cpp returns something else, the recording ends with that record. The file
    is written atomically. Raises ``UserError``.
    """
    path = Path(path)
    check_target(path)
    observer, divergence = _OperationRecords(), None
    with LlamaCppSession(scenario, model=model, library=library, threads=threads) as session:
        backend = session.backend(session.choose_policy(policy), show_cells=True)
        backend.checks = False
        backend.policy.observer = observer
        writable(path.parent)
        with backend.context:
            try:
                drive(session.scenario, backend.policy, backend, Recorder(progress, detail="requests"), None)
                backend.finish()
            except Divergence as e:
                divergence = str(e)
    write_recording(path, [_header(session, backend), *observer.records])
    seen = sum("map" in record or "caches" in record for record in observer.records)
    return Recording(path, session.library.name, backend.policy.name, len(observer.records), seen, divergence)


def _header(session: LlamaCppSession, backend: LlamaCpp) -> dict[str, Any]:
    context, scenario = backend.context, session.scenario
    settings, inner = context.settings, backend.policy.inner
    header: dict[str, Any] = {
        "era": context.era,
        "engine": session.library.name,
        "model": session.model.path.name,
        "scenario": scenario.name,
        "n_ctx": settings.cells,
        "n_seq_max": settings.sequences,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "defrag_thold": settings.defrag_threshold,
        "n_layer": session.model.n_layers,
    }
    if not isinstance(inner, MultiStreamPolicy):
        return header | {"n_cells": settings.cells, "n_pad": scenario.cache.pad}
    caches = [
        {"size": size, "n_pad": spec.pad, "n_swa": spec.window or 0}
        for size, spec in zip(context.sizes, inner.caches, strict=True)
    ]
    streams = {"n_stream": inner.n_streams, "kv_unified": settings.unified, "set_rows": True}
    return header | {"n_cells": context.sizes[0], "caches": caches, **streams}


class _OperationRecords:
    """Collects the records; cells shown are added to the last one."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = [{"op": "init", "args": []}]

    def operation_done(self, operation: str, arguments: Sequence[Any], returned: int | None = None) -> None:
        """Add a record."""
        record: dict[str, Any] = {"op": operation, "batch" if operation == "decode" else "args": list(arguments)}
        self.records.append(record if returned is None else record | {"ret": returned})

    def cells_shown(self, cells: Sequence[StreamCells]) -> None:
        """Add the cells to the last record."""
        last = self.records[-1]
        if any(each.head is None for each in cells):
            (own,) = cells
            last |= {"map": _runs(own), "used": own.used, "max_contiguous": own.largest}
            return
        for each in cells:
            caches = last.setdefault("caches", [])
            while len(caches) <= each.cache:
                caches.append([])
            streams = caches[each.cache]
            streams += [None] * (each.stream + 1 - len(streams))
            streams[each.stream] = {"map": _runs(each), "head": each.head, "used": each.used}


def _runs(cells: StreamCells) -> list[list[Any]]:
    def seqs_of(cell: int) -> tuple[int, ...]:
        owner = int(cells.owner[cell])
        if owner != SHARED:
            return (owner,)
        if cells.shared is None:
            raise UserError("sequences share cells, and this version of llama.cpp does not show which")
        return cells.shared[cell]

    # Cells of different sets of sequences get different labels.
    label = cells.owner.copy()
    for number, seqs in enumerate(sorted(set((cells.shared or {}).values()))):
        label[[cell for cell, own in (cells.shared or {}).items() if own == seqs]] = SHARED - 1 - number
    return runs_of_cells(cells.position, label, seqs_of)
