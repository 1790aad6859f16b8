"""AIPerf: its ``profile_export_aiperf.json`` (``docs/reference/json-export-schema.md`` there)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from kvsim.calibration.bench_files.points import (
    BenchPoint,
    FileRecord,
    Rate,
    Row,
    SetUp,
    first_text,
    read_row,
    values_of,
)
from kvsim.calibration.bench_files.served import Served
from kvsim.errors import UserError

NAME = "AIPerf"
_SECONDS = {"ms": 1e-3, "sec": 1.0, "s": 1.0, "us": 1e-6, "ns": 1e-9}


class _Mean(Row):
    unit: str
    avg: Rate


class _Time(_Mean):
    unit: Literal["ms", "sec", "s", "us", "ns"]

    @property
    def seconds(self) -> float:
        """The mean."""
        return self.avg * _SECONDS[self.unit]


class _Export(Row):
    """The metrics that are read of a run."""

    aiperf_version: str = ""
    request_throughput: _Mean
    time_to_first_token: _Time
    inter_token_latency: _Time
    input_sequence_length: _Mean
    output_sequence_length: _Mean


def records(found: Iterable[FileRecord]) -> list[FileRecord]:
    """The records of this tool."""
    return [each for each in found if {"input_config", "request_throughput"} <= set(each.values)]


def points(records: Iterable[FileRecord]) -> list[BenchPoint]:
    """What was timed. Raises ``UserError``."""
    return [point for each in records for point in _points(each)]


def _points(record: FileRecord) -> list[BenchPoint]:
    if "inter_token_latency" not in record.values:
        raise UserError(f"{record.where}: no inter_token_latency; AIPerf has it with --streaming")
    row = read_row(_Export, record.values, record.where)
    names = sorted(
        {name for name in values_of(record.values.get("telemetry_data"), "gpu_name") if isinstance(name, str)}
    )
    set_up = SetUp(
        tool=NAME,
        build=row.aiperf_version,
        device=", ".join(names) or None,
        model=first_text(record.values["input_config"], "model_names", "models", "name"),
    )
    return Served(
        record.where,
        set_up,
        prompt=row.input_sequence_length.avg,
        new=row.output_sequence_length.avg,
        requests_per_s=row.request_throughput.avg,
        ttft_s=row.time_to_first_token.seconds,
        tpot_s=row.inter_token_latency.seconds,
    ).points()
