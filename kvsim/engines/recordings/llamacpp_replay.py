"""Replay recorded runs of llama.cpp on the policies that describe it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engines.recordings.recording_files import Record, whole_number
from kvsim.engines.recordings.replay import Replay, State
from policies import CacheConfig, Chunk, OutOfCells, Unsupported
from policies.cells.arena import Arena
from policies.cells.states import StateMemory
from policies.layouts.hybrid import HybridPolicy
from policies.layouts.llamacpp import early_2025, mid_2025, today
from policies.layouts.multi_stream import CacheSpec, MultiStreamPolicy, Rejected
from policies.layouts.recurrent import RecurrentMemory
from policies.layouts.unified import UnifiedPolicy
from policies.vocabulary import IntArray

_FIELDS_A = ("map", "head", "used", "n_kv", "max_contiguous", "do_defrag")
"""State fields of a record of era A."""

LlamaPolicy = UnifiedPolicy | MultiStreamPolicy | RecurrentMemory


class LlamaCppReplay(Replay):
    """Performs the operations of a llama.cpp context (decode, seq_rm, ...) on the preset of its era."""

    def __init__(self, header: Record):
        if "era" not in header:
            raise ValueError("not a recording's header; a JSON object with 'era' is expected")
        self.era = str(header["era"])
        self._policy = _policy(header)

    def perform(self, record: Record) -> tuple[State, State]:
        """Perform one operation."""
        returned = _perform(self._policy, record)
        recorded = _recorded(record)
        return recorded, {k: v for k, v in _state(self._policy, returned).items() if k in recorded}

    def operation(self, record: Record) -> dict[str, Any]:
        """The operation with its arguments."""
        return {k: record[k] for k in ("op", "batch", "args") if k in record}


def _policy(header: Record) -> LlamaPolicy:
    """The preset of the recording's era, with its parameters."""
    era, n_layers = header["era"], whole_number(header, "n_layer")
    if era not in ("A", "M", "B"):
        raise ValueError(f"era {era!r} is unknown; accepted: A (b4666 to b4880), M (b5589 to b6244), B (since b6975)")
    config = CacheConfig(
        cells=whole_number(header, "n_cells"),
        n_ubatch=whole_number(header, "n_ubatch"),
        sequences=whole_number(header, "n_seq_max"),
        pad=whole_number(header, "n_pad", 256),
        n_layers=n_layers,
    )
    threshold = float(header["defrag_thold"])
    if era == "A":
        return early_2025("llama.cpp", config, threshold=threshold, max_nodes=int(header.get("max_nodes", 8192)))
    caches = [
        CacheSpec(int(c["size"]), max(int(c["n_pad"]), 256 if era == "B" else 1), int(c["n_swa"]) or None)
        for c in header["caches"]
    ]
    streams = int(header.get("n_stream", 1))
    if "snapshots" in header:
        snapshots = whole_number(header, "snapshots", 0, least=0)
        if not caches:
            return RecurrentMemory(config.sequences, config.n_ubatch, snapshots)
        return HybridPolicy("llama.cpp", config, caches, n_streams=streams, snapshots=snapshots)
    if era == "M":
        nodes = int(header.get("max_nodes", max(1024, 8 * int(header.get("n_tensors", 0)))))
        return mid_2025(
            "llama.cpp",
            config,
            caches,
            threshold=threshold,
            max_nodes=nodes,
            n_streams=streams,
            contiguous=not header["set_rows"],
        )
    return today("llama.cpp", config, caches, n_streams=streams)


def _perform(policy: LlamaPolicy, record: Record) -> int:
    """Perform one operation; return the code of a decode, whether positions could be removed, 0 for all others."""
    if record["op"] == "decode":
        step = [Chunk(seqs[0], pos, n, tuple(seqs[1:])) for seqs, pos, n in record["batch"]]
        try:
            policy.allocate(step)
        except OutOfCells:
            return 1
        except Rejected:
            return -1
        return 0
    args = record.get("args", [])
    operations: dict[str, Callable[..., object]] = {
        "init": lambda: None,
        "seq_rm": lambda seq, a, b: policy.free(seq, max(a, 0), _end(b)),
        "seq_cp": lambda src, dst, a, b: policy.copy(src, dst, max(a, 0), _end(b)),
        "seq_keep": policy.keep,
        "seq_add": lambda seq, a, b, delta: policy.shift(seq, max(a, 0), _end(b), delta),
        "seq_div": lambda seq, a, b, d: policy.divide(seq, max(a, 0), _end(b), d),
        "clear": policy.clear,
        "defrag": lambda: setattr(policy, "wants_compaction", True),
        "update": policy.update,
    }
    if record["op"] not in operations:
        raise ValueError(f"operation {record['op']!r} is unknown; accepted: decode, {', '.join(operations)}")
    try:
        operations[record["op"]](*args)
    except Unsupported:
        if record["op"] != "seq_rm":
            raise
        return 0
    return int(record["op"] == "seq_rm")


def _end(position: int) -> int | None:
    return None if position < 0 else position


def _recorded(record: Record) -> State:
    """The fields of a record to compare: all that it has.

    A recording need not show the cells after every operation, nor all streams, nor all fields.
    """
    if "ends" in record:
        return {key: record[key] for key in ("ret", "ends", "held", "states") if key in record}
    state: State = {"ret": record["ret"]} if record["op"] == "decode" else {}
    if "caches" in record:
        for c, streams in enumerate(record["caches"]):
            for s, stream in enumerate(streams):
                if stream is not None:
                    for key in ("map", "head", "used"):
                        state[f"cache {c} stream {s} {key}"] = stream[key]
        if record["op"] == "decode" and record["ret"] == 0 and record.get("attn"):
            state["n_kv"] = sorted({shape[2] for _, shape in record["attn"]})
    else:
        seen = [key for key in _FIELDS_A if key in record]
        if seen:
            # A record with any of these fields must have the cells.
            state |= {"map": record["map"], **{key: record[key] for key in seen}}
    return state


def _state(policy: LlamaPolicy, returned: int) -> State:
    if isinstance(policy, UnifiedPolicy):
        arena = policy.arena
        return {
            "ret": returned,
            "map": cell_runs(arena),
            "head": arena.head,
            "used": arena.used,
            "n_kv": policy.attended,
            "max_contiguous": arena.free.largest,
            "do_defrag": int(policy.wants_compaction),
        }
    if isinstance(policy, HybridPolicy | RecurrentMemory) and policy.states is not None:
        return {"ret": returned, **_of_states(policy, policy.states)}
    assert isinstance(policy, MultiStreamPolicy)
    state: State = {"ret": returned, "n_kv": sorted(policy.attended)}
    for c, arenas in enumerate(policy.arenas):
        for s, arena in enumerate(arenas):
            where = f"cache {c} stream {s}"
            state |= {
                f"{where} map": cell_runs(arena),
                f"{where} head": arena.head,
                f"{where} used": arena.used,
            }
    return state


def _of_states(policy: HybridPolicy | RecurrentMemory, states: StateMemory) -> State:
    """What recordings of models with states show: both ends of each sequence, the states and the tokens that caches
    hold, each in the order of cells, but not in which cell."""
    held = [[_in_order(arena) for arena in arenas] for arenas in getattr(policy, "arenas", ())]
    cells = zip(states.position, states.seqs, strict=True)
    return {
        "ends": [list(policy.ends(seq)) for seq in range(len(states.position))],
        "states": [[position, sorted(seqs)] for position, seqs in cells if seqs],
        "held": held,
    }


def _in_order(arena: Arena) -> list[list[Any]]:
    """The used cells as runs without their first cells, as if there were no holes."""
    used = np.flatnonzero(arena.position >= 0)
    owner = arena.owner[used]
    return [run[1:] for run in runs_of_cells(arena.position[used], owner, lambda cell: arena.sets[owner[cell]])]


def cell_runs(arena: Arena) -> list[list[Any]]:
    """The used cells of an arena, as ``runs_of_cells``."""
    own = slice(0, arena.top)
    return runs_of_cells(arena.position[own], arena.owner[own], lambda cell: arena.sets[arena.owner[cell]])


def runs_of_cells(
    position: IntArray, owner: NDArray[np.integer[Any]], seqs_of: Callable[[int], Iterable[int]]
) -> list[list[Any]]:
    """The used cells as runs ``[first cell, length, [seqs], first position]``, positions rising by one.

    ``position`` and ``owner`` have the shape (n,); equal owners are equal sets of sequences, and ``seqs_of``
    says which, for a cell. Cells whose position is negative are empty.
    """
    cells = np.flatnonzero(position >= 0)
    if len(cells) == 0:
        return []
    owner, position = owner[cells], position[cells]
    breaks = (np.diff(cells) != 1) | (np.diff(owner) != 0) | (np.diff(position) != 1)
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((firsts, [len(cells)])))
    return [
        [int(cells[i]), int(n), sorted(seqs_of(int(cells[i]))), int(position[i])]
        for i, n in zip(firsts.tolist(), lengths.tolist(), strict=True)
    ]
