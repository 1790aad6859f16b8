"""The report of one run: counts, latencies, how the cache fared, and why requests failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.model.storage_types import format_size
from kvsim.reports.formats import LATENCIES, seconds, share, whole
from kvsim.reports.report import UNKNOWN, Column, Report, Section, Table
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES
from kvsim.scenario.without_effect import effect_lines
from kvsim.simulation.job import FailureKind
from kvsim.simulation.summary import (
    failure_lines,
    inferred_lines,
    link_waits,
    lost_to_checkpoints,
    router_waits,
    what_serves,
)

if TYPE_CHECKING:
    from kvsim.simulation.result import Result

Summary = Mapping[str, Any]
"""What a run's ``--json`` has; an earlier version may have written it."""


def run_report(result: Result) -> Report:
    """One run: counts, latencies, and how the cache fared."""
    s = result.summary
    counts = f"{s['completed']:,} of {s['requests']:,} requests completed, {s['failed']:,} failed"
    if s["truncated"]:
        counts += f", {s['truncated']:,} cut short by a full slot"
    engine = f" ({s['engine']})" if s["engine"] else ""
    rate = UNKNOWN if s["throughput_tokens_per_s"] is None else whole(s["throughput_tokens_per_s"])
    columns = [Column("", lambda key: LATENCIES[key])]
    columns += [Column(name, partial(_quantile, s, key=key), seconds) for name, key in _STATISTICS.items()]
    return Report(
        f"{s['scenario']} under {s['policy']}{engine}, scheduler {s['scheduler']}, {what_serves(s)}, seed {s['seed']}",
        [s["basis"]] if s["basis"] else [],
        [*s["assumed"], *effect_lines([(s["policy"], s["without_effect"])]), *inferred_lines([s])],
        sections=[
            Section(
                text=[
                    f"{counts}; {rate} output tokens/s",
                    *failures_and_remedies([(s["policy"], s["failures"])], s["scenario"]),
                ],
                tables=[Table("Latencies", columns, list(LATENCIES))],
            ),
            Section(
                text=[
                    *_cache(s),
                    *_prefixes(s),
                    *_host(s["host"]),
                    *_disk(s),
                    *_checkpoints(result),
                    *_drafts(s.get("speculation")),
                ]
            ),
            *_cluster(s.get("cluster")),
        ],
    )


_STATISTICS = {"mean": "mean", "P50": "p50", "P95": "p95", "P99": "p99"}


def _quantile(summary: Summary, latency: str, key: str) -> float | None:
    found: float | None = summary[latency][key]
    return found


_OF_SERVERS = [
    Column("server", "number"),
    Column("role", "role"),
    Column("device", "device"),
    Column("requests", "requests", whole),
    Column("tokens computed", "computed_tokens", whole, "prompt tokens that were not in the cache, and output tokens"),
    Column("prefix hits", "hit_rate", share),
    Column("cells used", "utilization_mean", share),
    Column("preemptions", "preemptions", whole),
    Column("TTFT P50", lambda row: row["ttft_s"]["p50"], seconds),
    Column("TTFT P95", lambda row: row["ttft_s"]["p95"], seconds),
    Column("TPOT P95", lambda row: row["tpot_s"]["p95"], seconds),
]


def _cluster(cluster: Summary | None) -> list[Section]:
    """A row for each server, where there are several, and how even their load was."""
    if cluster is None:
        return []
    rows = [{"number": number, **server} for number, server in enumerate(cluster["servers"], 1)]
    columns = [c for c in _OF_SERVERS if c.value not in ("device", "role") or any(row.get(c.value) for row in rows)]
    even = cluster["most_over_mean"]
    text = [] if even is None else [f"the busiest server computed {even:.2f} times the mean's tokens"]
    text += filter(None, [router_waits(cluster), link_waits(cluster)])
    return [Section(tables=[Table("Servers", columns, rows, at_most=16)], text=text)]


def _cache(s: Summary) -> list[str]:
    c, sampled = s["cache"], ""
    if c["utilization_mean"] is not None:
        sampled = (
            f"{share(c['utilization_mean'])} of the cells used, external fragmentation "
            f"{share(c['external_fragmentation_mean'])}, internal {share(c['internal_fragmentation_mean'])}; "
        )
    counts = f"{counted(c['failed_allocations'], 'failed allocation')}, {counted(c['batch_splits'], 'batch split')}"
    return [f"cache: {sampled}{counts}, {format_size(c['moved_bytes'])} moved"]


def _prefixes(s: Summary) -> list[str]:
    if not s["prefix"]["found"] and not s["preemptions"]:
        return []
    rate = s["prefix"]["hit_rate"]
    hits = UNKNOWN_PREFIXES if rate is None else f"{share(rate)} of the prompt tokens were in the cache already"
    again = f"{counted(s['preemptions'], 'preemption')}, {counted(s['recomputed_tokens'], 'token')} computed again"
    return [f"prefixes: {hits}; {again}"]


def _checkpoints(result: Result) -> list[str]:
    """How checkpoints of slots fared, where a policy has any."""
    found = result.summary["checkpoints"]
    if not (found["made"] or found["lost_tokens"]):
        return []
    made = f"checkpoints: {found['made']:,} made, {counted(found['restored'], 'prompt')} went on from one"
    lost = lost_to_checkpoints(result.summary, result.scenario.server.ctx_checkpoints)
    return [f"{made}; {lost}" if lost else made]


def _host(host: Summary) -> list[str]:
    """What was copied to and from the host cache and how full it was, or the same of the host tier."""
    if host["saves"]:
        limit = host["limit_bytes"]
        room = "without a limit" if limit is None else f"of {format_size(limit)}"
        return [
            f"host cache: {counted(host['saves'], 'save')} ({format_size(host['bytes_out'])}), "
            f"{counted(host['loads'], 'load')} ({format_size(host['bytes_in'])}), {seconds(host['copy_s'])} of "
            f"copying; at most {format_size(host['most_bytes'])} held {room}"
        ]
    if host.get("chunk_loads") is not None:
        return [
            f"host tier: {format_size(host['bytes_out'])} stored, {format_size(host['bytes_in'])} loaded, beside the "
            f"steps; {counted(host['chunk_loads'], 'request')} waited {seconds(host['load_wait_s'])} in all for "
            f"{counted(host['chunk_tokens'], 'token')} found there, and steps {seconds(host['store_wait_s'])} for "
            "blocks that were still being stored"
        ]
    if host["bytes_out"] or host["bytes_in"]:
        return [
            f"host tier: {format_size(host['bytes_out'])} out, {format_size(host['bytes_in'])} back, "
            f"{format_size(host['bytes_prefetched'])} of that ahead of use; steps waited "
            f"{seconds(host.get('step_copies_s', 0.0))} for copies of their own, and "
            f"{seconds(host['prefetch_wait_s'])} for those made ahead"
        ]
    return []


def _drafts(of: Summary | None) -> list[str]:
    """How many drafted tokens were accepted, and what drafting took."""
    if not of or not of["drafts"]:
        return []
    took = f"; drafting took {seconds(of['drafting_s'])}" if of["drafting_s"] else ""
    return [
        f"drafts: {share(of['accepted_tokens'] / of['drafted_tokens'])} of {counted(of['drafted_tokens'], 'token')} "
        f"accepted, {of['wasted_tokens']:,} wasted; {of['tokens_per_draft']:.2f} tokens a draft, with the model's "
        f"own{took}"
    ]


def _disk(s: Summary) -> list[str]:
    """What the files behind the host tier hold, and what was found in them."""
    disk = s.get("disk")
    if not disk or not disk["bytes_out"]:
        return []
    return [
        f"disk: {format_size(disk['bytes_out'])} in files, {format_size(disk['bytes_in'])} read, with "
        f"{counted(disk['tokens'], 'token')} found there; requests waited {seconds(s['host']['lookup_wait_s'])} in all "
        "for look-ups and what these were waiting for"
    ]


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
