"""``vllm bench serve``, ``latency`` and ``throughput``: their JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field

from kvsim.calibration.bench_files.points import (
    MOST_TOKENS,
    BenchPoint,
    Few,
    FileRecord,
    Positive,
    Rate,
    Row,
    SetUp,
    read_row,
)
from kvsim.calibration.bench_files.served import CLIENT_SPREAD, Served
from kvsim.errors import UserError

NAME = "vllm bench"
_SERVE, _LATENCY, _THROUGHPUT = (
    {"mean_ttft_ms", "completed"},
    {"avg_latency", "latencies"},
    {"elapsed_time", "num_requests"},
)


class _Serve(Row):
    """By the keys of ``vllm/benchmarks/serve.py``."""

    model_id: str = ""
    completed: Positive
    request_throughput: Rate
    total_input_tokens: Positive
    total_output_tokens: Positive
    mean_ttft_ms: Rate
    mean_tpot_ms: Rate


class _Latency(Row):
    """By the keys of ``vllm/benchmarks/latency.py``, which has neither lengths nor batch."""

    model_id: str = ""
    avg_latency: Rate
    latencies: Annotated[tuple[Rate, ...], Field(min_length=1)]


class _Throughput(Row):
    """By the keys of ``vllm/benchmarks/throughput.py``, which has the sum of both lengths only."""

    model_id: str = ""
    elapsed_time: Rate
    num_requests: Few
    total_num_tokens: Positive


def records(found: Iterable[FileRecord]) -> list[FileRecord]:
    """The records of these tools."""
    return [each for each in found if any(keys <= set(each.values) for keys in (_SERVE, _LATENCY, _THROUGHPUT))]


def points(records: Iterable[FileRecord], flags: str) -> list[BenchPoint]:
    """What was timed; ``flags``: what ``latency`` and ``throughput`` were started with. Raises ``UserError``."""
    found: list[BenchPoint] = []
    for each in records:
        if set(each.values) >= _SERVE:
            found += _served(each)
        elif set(each.values) >= _LATENCY:
            found.append(_latency(each, flags))
        else:
            found.append(_throughput(each, flags))
    return found


def _set_up(tool: str, model: str) -> SetUp:
    return SetUp(tool=f"{NAME} {tool}", engine="vllm", model=model)


def _served(record: FileRecord) -> list[BenchPoint]:
    row = read_row(_Serve, record.values, record.where)
    return Served(
        record.where,
        _set_up("serve", row.model_id),
        prompt=row.total_input_tokens / row.completed,
        new=row.total_output_tokens / row.completed,
        requests_per_s=row.request_throughput,
        ttft_s=row.mean_ttft_ms / 1e3,
        tpot_s=row.mean_tpot_ms / 1e3,
    ).points()


def _latency(record: FileRecord, flags: str) -> BenchPoint:
    row = read_row(_Latency, record.values, record.where)
    lengths = _lengths(flags, "latency", ("--input-len", "--output-len", "--batch-size"), record.where)
    mean = sum(row.latencies) / len(row.latencies)
    spread = (sum((each - mean) ** 2 for each in row.latencies) / len(row.latencies)) ** 0.5 / mean
    return BenchPoint(
        record.where,
        _set_up("latency", row.model_id),
        "batch",
        row.avg_latency,
        spread=spread,
        sequences=lengths["--batch-size"],
        prompt=lengths["--input-len"],
        new=lengths["--output-len"],
    )


def _throughput(record: FileRecord, flags: str) -> BenchPoint:
    row = read_row(_Throughput, record.values, record.where)
    lengths = _lengths(flags, "throughput", ("--input-len", "--output-len"), record.where)
    prompt, new = lengths["--input-len"], lengths["--output-len"]
    if abs(row.num_requests * (prompt + new) / row.total_num_tokens - 1) > 0.1:
        raise UserError(
            f"{record.where}: {row.num_requests:,} requests have {row.total_num_tokens:,} tokens, but --flags say "
            f"{prompt:,} and {new:,} tokens for each"
        )
    return BenchPoint(
        record.where,
        _set_up("throughput", row.model_id),
        "batch",
        row.elapsed_time,
        spread=CLIENT_SPREAD,
        sequences=row.num_requests,
        prompt=prompt,
        new=new,
    )


def _lengths(flags: str, tool: str, wanted: tuple[str, ...], where: str) -> dict[str, int]:
    """The values of flags. Raises ``UserError`` where one is missing or no number from 1 to 2**24."""
    try:
        words = [part for word in shlex.split(flags) for part in word.split("=", 1)]
    except ValueError as e:
        raise UserError(f"--flags: {e!s:.80}") from None
    given: dict[str, Any] = dict(pairwise(words))
    for flag in wanted:
        value = given.get(flag.replace("--", "--random-", 1), given.get(flag))
        if value is None or not (value.isascii() and value.isdigit() and 1 <= int(value[:10]) <= MOST_TOKENS):
            said = "does not say" if value is None else f"--flags: {flag} is {value!r:.20}, not a number of tokens;"
            raise UserError(
                f"{where}: vllm bench {tool} {said} how long its requests were; add what it was started with, such as "
                f'--flags "{" ".join(f"{name} {n}" for name, n in zip(wanted, (512, 128, 8), strict=False))}"'
            )
        given[flag] = int(value)
    return {flag: given[flag] for flag in wanted}
