"""GuideLLM: its JSON report (``--output kind=json``), of version 0.3 and later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from kvsim.calibration.bench_files.points import BenchPoint, FileRecord, Rate, Row, SetUp, first_text, read_row
from kvsim.calibration.bench_files.served import Served

NAME = "GuideLLM"


class _Mean(Row):
    mean: Rate


class _Distribution(Row):
    successful: _Mean


class _Metrics(Row):
    """The metrics that are read of a benchmark (``GenerativeMetrics``)."""

    requests_per_second: _Distribution
    time_to_first_token_ms: _Distribution
    inter_token_latency_ms: _Distribution
    prompt_token_count: _Distribution
    output_token_count: _Distribution


class _Benchmark(Row):
    metrics: _Metrics


class _Metadata(Row):
    guidellm_version: str = ""


class _Report(Row):
    metadata: _Metadata = Field(default_factory=_Metadata)
    benchmarks: list[Any] = Field(min_length=1)


def records(found: Iterable[FileRecord]) -> list[FileRecord]:
    """The records of this tool."""
    return [each for each in found if isinstance(each.values.get("benchmarks"), list)]


def points(records: Iterable[FileRecord]) -> list[BenchPoint]:
    """What was timed, benchmark by benchmark. Raises ``UserError``."""
    found: list[BenchPoint] = []
    for each in records:
        report = read_row(_Report, each.values, each.where)
        set_up = SetUp(
            tool=NAME,
            build=report.metadata.guidellm_version,
            model=first_text([each.values.get("config"), each.values.get("args")], "model"),
        )
        for i, benchmark in enumerate(report.benchmarks, 1):
            found += _served(benchmark, f"{each.where}: benchmark {i}", set_up)
    return found


def _served(benchmark: Any, where: str, set_up: SetUp) -> list[BenchPoint]:
    m = read_row(_Benchmark, benchmark, where).metrics
    return Served(
        where,
        set_up,
        prompt=m.prompt_token_count.successful.mean,
        new=m.output_token_count.successful.mean,
        requests_per_s=m.requests_per_second.successful.mean,
        ttft_s=m.time_to_first_token_ms.successful.mean / 1e3,
        tpot_s=m.inter_token_latency_ms.successful.mean / 1e3,
    ).points()
