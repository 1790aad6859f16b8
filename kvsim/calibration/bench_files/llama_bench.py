"""``llama-bench``: its JSON, JSON lines, CSV and its table (``-o json|jsonl|csv|md``)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvsim.calibration.bench_files.llamacpp_log import Logged, table_cells
from kvsim.calibration.bench_files.points import (
    BenchPoint,
    BenchText,
    Count,
    Few,
    FileRecord,
    Rate,
    Row,
    SetUp,
    gguf_weights,
    read_row,
)
from kvsim.errors import UserError

NAME = "llama-bench"
_ON_PROCESSOR = {"CPU", "BLAS", "ZenDNN", "Accelerate", ""}


class _Test(Row):
    """One test, by the keys of ``test::get_fields`` in ``tools/llama-bench/llama-bench.cpp``."""

    n_prompt: Count
    n_gen: Count
    n_depth: Count = 0
    avg_ns: Rate
    stddev_ns: Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)] = 0.0
    n_ubatch: Few = 512
    build_commit: str = ""
    build_number: int = 0
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = ""
    model_type: str = ""
    model_size: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    model_n_params: Annotated[float, Field(ge=0, le=1e15)] = 0
    n_threads: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    no_kv_offload: bool = False
    flash_attn: bool | int = -1

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value != ""} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _something_was_timed(self) -> _Test:
        if not (self.n_prompt or self.n_gen):
            raise ValueError("n_prompt, n_gen: one of them must be above 0")
        return self

    def point(self, where: str) -> BenchPoint:
        """The test as what was timed."""
        kind = "batch" if self.n_prompt and self.n_gen else "prompt" if self.n_prompt else "decode"
        return BenchPoint(
            where,
            self._set_up(),
            kind,  # type: ignore[arg-type]
            self.avg_ns * 1e-9,
            spread=self.stddev_ns / self.avg_ns,
            depth=self.n_depth,
            prompt=self.n_prompt,
            new=self.n_gen,
            ubatch=self.n_ubatch,
        )

    def _set_up(self) -> SetUp:
        on_processor = set(re.split(r"[,+]", self.backends)) <= _ON_PROCESSOR and not self.gpu_info
        moved = self.no_kv_offload or self.n_cpu_moe > 0
        layers = 0 if moved else None if on_processor or self.n_gpu_layers < 0 else self.n_gpu_layers
        return SetUp(
            tool=NAME,
            build=f"b{self.build_number}" if self.build_number else self.build_commit,
            engine="llamacpp",
            device=(self.cpu_info if on_processor else self.gpu_info) or None,
            model=self.model_type,
            model_bytes=self.model_size or None,
            parameters=self.model_n_params or None,
            weights=gguf_weights(self.model_type),
            type_k=self.type_k,
            type_v=self.type_v,
            flash=int(self.flash_attn) != 0,
            gpu_layers=layers,
            threads=self.n_threads if on_processor else None,
        )


def records(text: BenchText) -> list[FileRecord]:
    """The tests of a file of any of the four forms; none if it is another tool's."""
    if found := [each for each in text.records if {"n_gen", "n_prompt"} <= set(each.values)]:
        return found
    if text.lines and text.lines[0].startswith("build_commit,"):
        return _of_csv(text)
    return _of_tables(text)


def points(records: Iterable[FileRecord]) -> list[BenchPoint]:
    """What was timed. Raises ``UserError``."""
    return [read_row(_Test, each.values, each.where).point(each.where) for each in records]


def _of_csv(text: BenchText) -> list[FileRecord]:
    try:
        rows = list(csv.DictReader(text.lines, strict=True))
    except csv.Error as e:
        raise UserError(f"{text.name}: not CSV: {e}") from None
    return [
        FileRecord(f"{text.name}: row {i}", {k: v for k, v in row.items() if isinstance(k, str) and v is not None})
        for i, row in enumerate(rows, 1)
    ]


_SHORT = {"ngl": "n_gpu_layers", "threads": "n_threads", "fa": "flash_attn", "nkvo": "no_kv_offload"}
"""Names in tables (``markdown_printer::get_field_display_name``)."""
_TEST = re.compile(r"(?:pp(\d{1,9}))?\+?(?:tg(\d{1,9}))?(?: @ d(\d{1,9}))?")
_SPEED = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(?: ± (\d{1,12}(?:\.\d{1,9})?))?")
_UNITS = {"MiB": 2**20, "GiB": 2**30, "M": 1e6, "B": 1e9}


def _of_tables(text: BenchText) -> list[FileRecord]:
    """The rows of tables, with what the lines around them say of device and build."""
    heads: list[str] = []
    logged, found = Logged.of(text.lines), []
    build = next((m for line in text.lines if (m := re.match(r"build: (\w{1,40}) \((\d{1,9})\)", line))), None)
    for i, line in enumerate(text.lines, 1):
        cells = table_cells(line)
        if {"test", "t/s", "params"} <= set(cells):
            heads = cells
        elif heads and cells and not set(line) <= set("|-: "):
            where = f"{text.name}: line {i}"
            if len(cells) != len(heads):
                raise UserError(f"{where}: {len(cells)} columns where the table has {len(heads)}")
            values = _of_row(dict(zip(heads, cells, strict=True)), where)
            values |= {"gpu_info": logged.device} if logged.device else {}
            values |= {"build_commit": build[1], "build_number": build[2]} if build else {}
            found.append(FileRecord(where, values))
        elif not cells:
            heads = []
    return found


def _of_row(row: dict[str, str], where: str) -> dict[str, Any]:
    """The keys of a test from a row of a table. Raises ``UserError``."""
    values: dict[str, Any] = {_SHORT.get(key, key): value for key, value in row.items()}
    test, speed = _TEST.fullmatch(row["test"]), _SPEED.fullmatch(row["t/s"])
    if test is None or not (test[1] or test[2]):
        raise UserError(f"{where}: test is {row['test']!r:.40}; pp512, tg128 or pp512 @ d4096 is expected")
    if speed is None or not float(speed[1]):
        raise UserError(f"{where}: t/s is {row['t/s']!r:.40}; such as 132.85 ± 0.02 is expected")
    prompt, new, depth = (int(part or 0) for part in test.groups())
    seconds = (prompt + new) / float(speed[1])
    return {
        **{key: value for key, value in values.items() if key not in ("test", "t/s", "size", "params", "model")},
        "n_prompt": prompt,
        "n_gen": new,
        "n_depth": depth,
        "avg_ns": 1e9 * seconds,
        "stddev_ns": 1e9 * seconds * float(speed[2] or 0) / float(speed[1]),
        "model_type": row.get("model", ""),
        "model_size": int(_with_unit(row.get("size", ""))),
        "model_n_params": _with_unit(row["params"]),
        "backends": row.get("backend", ""),
    }


def _with_unit(text: str) -> float:
    """A number such as "4.58 GiB" or "8.03 B"; 0 if it is none."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) (MiB|GiB|M|B)", text)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
