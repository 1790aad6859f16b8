"""The report of one run: counts, latencies, how the cache fared, and why requests failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.reports.formats import LATENCIES, seconds, share, size, whole
from kvsim.reports.report import UNKNOWN, Column, Report, Section, Table
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES
from kvsim.simulation.job import FailureKind
from kvsim.simulation.summary import failure_lines, inferred_lines

if TYPE_CHECKING:
    from kvsim.simulation.result import Result

Summary = Mapping[str, Any]
"""What a run's ``--json`` has; an earlier version may have written it."""


def run_report(result: Result) -> Report:
    """One run: counts, latencies, and how the cache fared."""
    s, scenario = result.summary, result.scenario
    counts = f"{s['completed']:,} of {s['requests']:,} requests completed, {s['failed']:,} failed"
    if s["truncated"]:
        counts += f", {s['truncated']:,} cut short by a full slot"
    rate = UNKNOWN if s["throughput_tokens_per_s"] is None else whole(s["throughput_tokens_per_s"])
    columns = [Column("", lambda key: LATENCIES[key])]
    columns += [Column(name, partial(_quantile, s, key=key), seconds) for name, key in _STATISTICS.items()]
    return Report(
        f"{s['scenario']} under {s['policy']}, {scenario.cache.cells:,} cells, "
        f"{counted(scenario.server.slots, 'slot')}, seed {s['seed']}",
        [s["basis"]] if s["basis"] else [],
        [*s["assumed"], *inferred_lines([s])],
        sections=[
            Section(
                text=[
                    f"{counts}; {rate} output tokens/s",
                    *failures_and_remedies([(s["policy"], s["failures"])], s["scenario"]),
                ],
                tables=[Table("Latencies", columns, list(LATENCIES))],
            ),
            Section(text=[*_cache(s), *_prefixes(s), *_host(s["host"])]),
        ],
    )


_STATISTICS = {"mean": "mean", "P50": "p50", "P95": "p95", "P99": "p99"}


def _quantile(summary: Summary, latency: str, key: str) -> float | None:
    found: float | None = summary[latency][key]
    return found


def _cache(s: Summary) -> list[str]:
    c, sampled = s["cache"], ""
    if c["utilization_mean"] is not None:
        sampled = (
            f"{share(c['utilization_mean'])} of the cells used, external fragmentation "
            f"{share(c['external_fragmentation_mean'])}, internal {share(c['internal_fragmentation_mean'])}; "
        )
    counts = f"{counted(c['failed_allocations'], 'failed allocation')}, {counted(c['batch_splits'], 'batch split')}"
    return [f"cache: {sampled}{counts}, {size(c['moved_bytes'])} moved"]


def _prefixes(s: Summary) -> list[str]:
    if not s["prefix"]["found"] and not s["preemptions"]:
        return []
    rate = s["prefix"]["hit_rate"]
    hits = UNKNOWN_PREFIXES if rate is None else f"{share(rate)} of the prompt tokens were in the cache already"
    again = f"{counted(s['preemptions'], 'preemption')}, {counted(s['recomputed_tokens'], 'token')} computed again"
    return [f"prefixes: {hits}; {again}"]


def _host(host: Summary) -> list[str]:
    """What was copied to and from the host cache and how full it was, or the same of the host tier."""
    if host["saves"]:
        limit = host["limit_bytes"]
        room = "without a limit" if limit is None else f"of {limit / (1 << 20):,.0f} MiB"
        return [
            f"host cache: {counted(host['saves'], 'save')} ({size(host['bytes_out'])}), "
            f"{counted(host['loads'], 'load')} ({size(host['bytes_in'])}), {seconds(host['copy_s'])} of copying; "
            f"at most {size(host['most_bytes'])} held {room}"
        ]
    if host["bytes_out"] or host["bytes_in"]:
        return [
            f"host tier: {size(host['bytes_out'])} out, {size(host['bytes_in'])} back, "
            f"{size(host['bytes_prefetched'])} of that ahead of use; steps waited "
            f"{seconds(host['prefetch_wait_s'])} for copies to arrive"
        ]
    return []


def failures_and_remedies(runs: Sequence[tuple[str, Sequence[Summary]]], scenario: str) -> list[str]:
    """A line for each way in which requests failed, given as (policy, ``failures`` of its summary), and what to try."""
    if not any(failures for _, failures in runs):
        return []
    from kvsim.advice.why.remedies import FAILURES
    from kvsim.experiments.shared_warnings import share_warnings

    lines = [shared.line() for shared in share_warnings((policy, failure_lines(each)) for policy, each in runs)]
    kinds = dict.fromkeys(FailureKind(group["kind"]) for _, failures in runs for group in failures)
    remedies = dict.fromkeys(remedy for kind in kinds for remedy in FAILURES.get(kind, ())[:1])
    return [*lines, *(f"to try: {r.what} ({r.kvsim.format(scenario=scenario)})" for r in remedies)]
