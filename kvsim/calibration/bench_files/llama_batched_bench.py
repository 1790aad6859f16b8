"""``llama-batched-bench``: its table and its JSON lines (``--output-format jsonl``)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvsim.calibration.bench_files.llamacpp_log import Logged, table_cells
from kvsim.calibration.bench_files.points import (
    BenchPoint,
    BenchText,
    Count,
    Few,
    FileRecord,
    Row,
    SetUp,
    gguf_weights,
    read_row,
)
from kvsim.errors import UserError

NAME = "llama-batched-bench"
_COLUMNS = {"PP": "pp", "TG": "tg", "B": "pl", "T_PP s": "t_pp", "T_TG s": "t_tg"}
_HEAD = re.compile(r"\b(n_ubatch|flash_attn|is_pp_shared|is_tg_separate|n_gpu_layers) = (-?\d{1,9})\b")


class _Test(Row):
    """One row, by the keys in ``tools/batched-bench/batched-bench.cpp``."""

    pp: Count
    tg: Count
    pl: Few
    t_pp: float
    t_tg: float
    n_ubatch: Few = 512
    flash_attn: int = -1
    is_pp_shared: bool = False
    is_tg_separate: bool = False
    n_gpu_layers: int = -1

    def points(self, where: str, logged: Logged) -> list[BenchPoint]:
        """Its prompts and its decodes; those too short for the clock are left out."""
        set_up = SetUp(
            tool=NAME,
            engine="llamacpp",
            device=logged.device,
            model=logged.file_type or "",
            parameters=logged.parameters,
            weights=gguf_weights(logged.file_type or ""),
            flash=self.flash_attn != 0,
            gpu_layers=self.n_gpu_layers if self.n_gpu_layers >= 0 else None,
        )
        found = []
        if self.pp and 0 < self.t_pp < 1e9:
            many = 1 if self.is_pp_shared else self.pl
            found.append(
                BenchPoint(where, set_up, "prompt", self.t_pp, sequences=many, prompt=self.pp, ubatch=self.n_ubatch)
            )
        if self.tg and 0 < self.t_tg < 1e9:
            # One sequence after the other, or all at a time.
            many, share = (1, self.pl) if self.is_tg_separate else (self.pl, 1)
            found.append(
                BenchPoint(
                    where,
                    set_up,
                    "decode",
                    self.t_tg / share,
                    sequences=many,
                    depth=self.pp,
                    new=self.tg,
                    ubatch=self.n_ubatch,
                )
            )
        return found


def records(text: BenchText) -> list[FileRecord]:
    """The rows of a file of either form; none if it is another tool's."""
    if found := [each for each in text.records if {"pp", "tg", "pl"} <= set(each.values)]:
        return found
    heads: list[str] = []
    said: dict[str, str] = {}
    for i, line in enumerate(text.lines, 1):
        cells = table_cells(line)
        if set(_COLUMNS) <= set(cells):
            heads = cells
        elif heads and cells and not set(line) <= set("|- "):
            where = f"{text.name}: line {i}"
            if len(cells) != len(heads):
                raise UserError(f"{where}: {len(cells)} columns where the table has {len(heads)}")
            row = dict(zip(heads, cells, strict=True))
            found.append(FileRecord(where, {**said, **{key: row[column] for column, key in _COLUMNS.items()}}))
        elif not cells:
            heads = []
            if "n_kv_max = " in line:
                said = dict(_HEAD.findall(line))
    return found


def points(records: Iterable[FileRecord], logged: Logged) -> list[BenchPoint]:
    """What was timed. Raises ``UserError``."""
    return [point for each in records for point in read_row(_Test, each.values, each.where).points(each.where, logged)]
