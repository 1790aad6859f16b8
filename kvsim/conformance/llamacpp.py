"""Recorded runs of real llama.cpp, replayed on our policies, and compared after every operation."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.errors import UserError
from policies import CacheConfig, Chunk, NoSlot, Unsupported
from policies.arena import Arena
from policies.llamacpp import early_2025, mid_2025, today
from policies.split import CacheSpec, Rejected, SplitPolicy
from policies.unified import UnifiedPolicy

LlamaPolicy = UnifiedPolicy | SplitPolicy
State = dict[str, Any]
"""What is compared: field by field, as in the recording."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first record whose state is not ours."""

    record: int
    """Its number in the file, the first after the header being 0."""
    operation: dict[str, Any]
    fields: tuple[str, ...]
    recorded: State
    ours: State


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one recording and our policy agree."""

    file: str
    era: str
    agree: int
    """Records whose every compared field is ours. After the first that is not, those that follow may suffer."""
    total: int
    first: Disagreement | None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        found: dict[str, Any] = {"file": self.file, "era": self.era, "agree": self.agree, "total": self.total}
        if self.first is not None:
            found["first_disagreement"] = {
                "record": self.first.record,
                "operation": self.first.operation,
                "fields": list(self.first.fields),
                "recorded": self.first.recorded,
                "ours": self.first.ours,
            }
        return found


def conform_llamacpp(path: str | Path) -> Agreement:
    """Replay one recording. Raises ``UserError`` where the file is not one."""
    source = Path(path)
    lines = _lines(source)
    header = next(lines, None)
    if header is None or "era" not in header[1]:
        raise UserError(f"{source}: line 1: not a recording's header; a JSON object with 'era' is expected")
    number = 1
    try:
        policy = _policy(header[1])
        agree = total = 0
        first: Disagreement | None = None
        for number, record in lines:  # noqa: B007  (used where the loop fails)
            returned = _perform(policy, record)
            recorded = _recorded(record)
            ours = {k: v for k, v in _state(policy, returned).items() if k in recorded}
            differ = tuple(key for key in recorded if recorded[key] != ours.get(key))
            agree += not differ
            if differ and first is None:
                operation: dict[str, Any] = {k: record[k] for k in ("op", "batch", "args") if k in record}
                first = Disagreement(total, operation, differ, recorded, ours)
            total += 1
    except UserError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as e:
        raise UserError(f"{source}: line {number}: not a record of a llama.cpp run ({type(e).__name__}: {e})") from None
    except (ValueError, Unsupported) as e:
        raise UserError(f"{source}: line {number}: {e}") from None
    return Agreement(source.name, str(header[1]["era"]), agree, total, first)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        try:
            with path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
        except ValueError as e:
            raise UserError(f"{path}: cannot be read: {e}") from None
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as text:
            for line in text:
                number += 1
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise UserError(f"{path}: line {number}: a JSON object is expected")
                    yield number, value
    except UserError:
        raise
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; a recording (JSONL, plain or gzip) is expected") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path}: damaged gzip data ({e})") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except json.JSONDecodeError as e:
        raise UserError(f"{path}: line {number}: not JSON: {e.msg}") from None
    except (ValueError, RecursionError) as e:
        # A number of thousands of digits, or brackets without end.
        raise UserError(f"{path}: line {number}: not JSON: {e}") from None


def _policy(header: dict[str, Any]) -> LlamaPolicy:
    """The preset of the recording's era, with its parameters."""
    era, n_layers = header["era"], _count(header, "n_layer")
    if era not in ("A", "M", "B"):
        raise ValueError(f"era {era!r} is unknown; there are A (b4666 to b4880), M (b5589 to b6244), B (since b6975)")
    config = CacheConfig(
        cells=_count(header, "n_cells"),
        n_ubatch=_count(header, "n_ubatch"),
        sequences=_count(header, "n_seq_max"),
        pad=_count(header, "n_pad") if "n_pad" in header else 256,
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


def _count(header: dict[str, Any], key: str) -> int:
    value = header[key]
    if not isinstance(value, int) or not 1 <= value <= 2**31:
        raise ValueError(f"{key} is {value!r:.40}; a whole number from 1 to 2**31 is expected")
    return value


def _perform(policy: LlamaPolicy, record: dict[str, Any]) -> int:
    """Carry out one operation; the code that decode returns, 0 for all others."""
    if record["op"] == "decode":
        step = [Chunk(seqs[0], pos, n, tuple(seqs[1:])) for seqs, pos, n in record["batch"]]
        try:
            policy.allocate(step)
        except NoSlot:
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
        raise ValueError(f"operation {record['op']!r} is unknown; there are decode, {', '.join(operations)}")
    operations[record["op"]](*args)
    return 0


def _end(position: int) -> int | None:
    return None if position < 0 else position


def _recorded(record: dict[str, Any]) -> State:
    """The fields of a record that are compared."""
    state: State = {"ret": record["ret"]} if record["op"] == "decode" else {}
    if "caches" in record:
        for c, streams in enumerate(record["caches"]):
            for s, stream in enumerate(streams):
                for key in ("map", "head", "used"):
                    state[f"cache {c} stream {s} {key}"] = stream[key]
        if record["op"] == "decode" and record["ret"] == 0 and record.get("attn"):
            state["n_kv"] = sorted({shape[2] for _, shape in record["attn"]})
    else:
        for key in ("map", "head", "used", "n_kv", "max_contiguous", "do_defrag"):
            state[key] = record[key]
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


def cell_runs(arena: Arena) -> list[list[Any]]:
    """The used cells as runs ``[first cell, length, [seqs], first position]``, positions rising by one."""
    cells = np.flatnonzero(arena.owner[: arena.top])
    if len(cells) == 0:
        return []
    owner, position = arena.owner[cells], arena.position[cells]
    breaks = (np.diff(cells) != 1) | (np.diff(owner) != 0) | (np.diff(position) != 1)
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.concatenate((firsts, [len(cells)])))
    return [
        [int(cells[i]), int(n), sorted(arena.sets[owner[i]]), int(position[i])]
        for i, n in zip(firsts.tolist(), lengths.tolist(), strict=True)
    ]
