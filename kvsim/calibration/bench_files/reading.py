"""Reading a file of a benchmark, whose kind is known from what is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvsim.calibration.bench_files import aiperf, guidellm, llama_batched_bench, llama_bench, vllm_bench
from kvsim.calibration.bench_files.llamacpp_log import Logged
from kvsim.calibration.bench_files.points import BenchPoint, BenchText, FileRecord, records_of
from kvsim.errors import UserError

KINDS = "llama-bench -o json|jsonl|csv|md, llama-batched-bench, vllm bench, GuideLLM and AIPerf"
_MOST_BYTES = 64 << 20
_Points = Callable[[], list[BenchPoint]]


def read_bench_file(path: str | Path, flags: str = "") -> list[BenchPoint]:
    """What a file of a benchmark says was timed; ``flags``: what the tool was started with, where the file needs it.

    Raises ``UserError`` for a file of another kind, one without anything timed, and the first wrong row.
    """
    name = str(path)
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise UserError(f"{name}: larger than {_MOST_BYTES >> 20} MiB, which results of benchmarks are not")
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{name}: not text in UTF-8; accepted are files of {KINDS}") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{name}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    read = BenchText(name, records_of(name, text), text.splitlines(), flags)
    timed = [point for found, points in _readers(read) if found for point in points()]
    if not timed:
        raise UserError(f"{name}: not the result of a benchmark that is known; accepted are files of {KINDS}")
    return _with_models(timed)


def _with_models(points: list[BenchPoint]) -> list[BenchPoint]:
    """Rows of tables that do not say their model, with that of other tables in the file. Raises ``UserError``."""
    said = list(dict.fromkeys(p.set_up for p in points if p.set_up.tool == llama_bench.NAME))
    silent = [p for p in points if p.set_up.tool == llama_batched_bench.NAME and p.set_up.parameters is None]
    if not (said and silent):
        return points
    if len(models := {each.model for each in said}) > 1:
        raise UserError(
            f"{silent[0].where}: tables of llama-batched-bench do not say which of these models they are of: "
            f"{', '.join(sorted(models))}; put those of each model into a file of its own"
        )
    like = said[0]
    known = {key: getattr(like, key) for key in ("device", "model", "model_bytes", "parameters", "weights", "threads")}
    return [replace(p, set_up=replace(p.set_up, **known)) if p in silent else p for p in points]


def _readers(text: BenchText) -> list[tuple[list[FileRecord], _Points]]:
    """What each reader takes for its own, and how it goes on."""
    tests, rows = llama_bench.records(text), llama_batched_bench.records(text)
    vllm, guides, exports = (kind.records(text.records) for kind in (vllm_bench, guidellm, aiperf))
    return [
        (tests, lambda: llama_bench.points(tests)),
        (rows, lambda: llama_batched_bench.points(rows, Logged.of(text.lines))),
        (vllm, lambda: vllm_bench.points(vllm, text.flags)),
        (guides, lambda: guidellm.points(guides)),
        (exports, lambda: aiperf.points(exports)),
    ]
