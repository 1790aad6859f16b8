"""The reports of a comparison (latencies, the cache, intervals over replications, the verdict), and of drafts of
several lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvsim.errors import counted
from kvsim.experiments.interval_text import from_to
from kvsim.experiments.policy_code import plugins_line
from kvsim.experiments.shared_warnings import share_assumptions
from kvsim.model.storage_types import format_size
from kvsim.reports.formats import LATENCIES, half_width, interval_of, milliseconds, seconds, share, whole
from kvsim.reports.report import Cell, Column, Report, Section, Table
from kvsim.reports.run_report import Summary, failures_and_remedies
from kvsim.scenario.without_effect import effect_lines
from kvsim.simulation.summary import inferred_lines, what_serves

if TYPE_CHECKING:
    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.draft_counts import DraftCounts
    from kvsim.experiments.estimates import Interval


def comparison_report(compared: Comparison) -> Report:
    """A row for each policy: what users feel, what the cache did, and what may be concluded."""
    return comparison_of(compared.to_dict(), compared.failures)


def comparison_of(saved: Summary, failures: Mapping[str, Sequence[Summary]] | None = None) -> Report:
    """The report of a comparison from the object that ``--json`` prints.

    ``failures``: why requests of each policy failed, over all replications; by default in the first of them.
    """
    runs: list[Summary] = saved["policies"]
    reasons = failures or {run["policy"]: run.get("failures", ()) for run in runs}
    plugins = plugins_line(saved.get("plugins", ()))
    assumed = [run.get("assumed", ()) for run in runs]
    of_all = [line for line in assumed[0] if all(line in lines for lines in assumed)]
    dead = [run.get("without_effect", ()) for run in runs]
    under_all = [key for key in dead[0] if all(key in keys for keys in dead)]
    under_some = [
        (run["policy"], [key for key in run.get("without_effect", ()) if key not in under_all]) for run in runs
    ]
    about = [
        f"{counted(runs[0]['requests'], 'request')}, seed {saved['seed']}; the same requests and arrivals under "
        f"{len(runs):,} policies; step times by the profile {saved['profile']}",
        *what_ran(runs),
        *of_all,
        *([f"no effect under any of them: {', '.join(under_all)}"] if under_all else []),
        *inferred_lines(runs),
        *([plugins] if plugins else []),
    ]
    sections = [
        Section("At a glance", tables=[_at_a_glance(saved, runs)], detail=False),
        Section("Latency and throughput", tables=_latencies(saved, runs), detail=True),
        Section("The cache", tables=_caches(runs), detail=True),
    ]
    if saved.get("intervals"):
        sections.append(Section("Over replications", tables=[_intervals(saved)]))
    conclusion = [f"Conclusion: {saved['conclusion']}"] if saved.get("conclusion") else []
    return Report(
        f"KV-cache policies on {saved['scenario']}",
        [str(saved["basis"])] if saved.get("basis") else [],
        about,
        conclusion,
        sections,
        _warnings(runs, list(reasons.items()), saved["scenario"]),
        meaning=_MEANING,
        assumed=[
            *share_assumptions(line for line in chain.from_iterable(assumed) if line not in of_all),
            *effect_lines(under_some),
        ],
    )


_MEANING = (
    "A KV-cache policy decides which cells hold the K and V of each token, and with that how many requests fit, how "
    "long they wait for room, and how many cells attention reads for a token: what your users wait for."
)
"""What a comparison is about, for a reader who is new to it."""


def what_ran(runs: Sequence[Summary]) -> list[str]:
    """A line for each scheduler, with its sizes and the policies that ran under it."""
    by_server: dict[str, list[str]] = {}
    for run in runs:
        if "scheduler" not in run:  # An earlier version wrote it.
            continue
        server = f"scheduler {run['scheduler']}, {what_serves(run)}"
        engine = f" ({run['engine']})" if run["engine"] else ""
        by_server.setdefault(server, []).append(run["policy"] + engine)
    return [f"{server}: {', '.join(policies)}" for server, policies in by_server.items()]


def _warnings(runs: Sequence[Summary], failures: Sequence[tuple[str, Sequence[Summary]]], scenario: str) -> list[str]:
    lines = failures_and_remedies(failures, scenario)
    if failed := [run["policy"] for run in runs if run["failed"]]:
        lines.append(f"Requests failed under {', '.join(failed)}; latencies are those of completed requests only.")
    if unstable := [run["policy"] for run in runs if (run.get("queue") or {}).get("unstable")]:
        lines.append(
            f"Arrivals outpaced service under {', '.join(unstable)}; latencies depend on how long the run was."
        )
    return lines or ["No request failed, and no queue kept growing."]


_POLICY = Column("policy", "policy")


def _of(part: str, heading: str, key: str, show: Any, meaning: str = "") -> Column:
    """A column of a figure in a part of a run's summary; unknown where an earlier version did not write it."""
    return Column(heading, lambda run: (run.get(part) or {}).get(key), show, meaning)


def _hit_rate(run: Summary) -> Any:
    rate = run["prefix"]["hit_rate"]
    return Cell("unknown", "unknown") if rate is None else rate


_HITS = Column("prefix hits", _hit_rate, share, "share of the prompt tokens that were in the cache already")
_PREEMPTIONS = Column("preemptions", "preemptions", whole)
_USEFUL = _of("cache", "useful attention", "scored_useful", share, "share of the cells read that a token needs")


def _at_a_glance(saved: Summary, runs: Sequence[Summary]) -> Table:
    """What users feel, and the share of attention that explains it, narrow enough for 80 characters."""
    columns = [_POLICY, Column("failed", "failed", whole), _of("ttft_s", "TTFT P95", "p95", milliseconds)]
    columns += [_of("tpot_s", "TPOT P95", "p95", milliseconds)]
    columns += [_of("e2e_s", f"e2e {x.upper()}", x, milliseconds) for x in ("p50", "p95")]
    note = (
        "milliseconds, of completed requests: to the first token (TTFT), for each further one (TPOT), from end to end "
        "(e2e)"
    )
    if saved.get("e2e_mean_over_oracle"):
        columns.append(_over_oracle(saved))
        note += "; × oracle: the mean, over that of a policy that knows all lengths in advance"
    columns += [_USEFUL, *(each for each in (_HITS, _PREEMPTIONS) if any(each.cell(run).value for run in runs))]
    note += "; useful attention: the share of the cells read that the request can see"
    return Table("At a glance", columns, runs, note)


def _over_oracle(saved: Summary) -> Column:
    ratios = saved["e2e_mean_over_oracle"]
    return Column("e2e mean × oracle", lambda run: ratios.get(run["policy"]), "{:.2f}".format)


def _latencies(saved: Summary, runs: Sequence[Summary]) -> list[Table]:
    """A table of each latency: all of them in one would be wider than most screens."""
    counts = [
        Column("ok", "completed", whole, "requests that were completed"),
        Column("failed", "failed", whole),
        Column("tokens/s", "throughput_tokens_per_s", whole, "output tokens"),
    ]
    tables = [Table("Requests by policy", [_POLICY, *counts], runs, narrow=True)]
    for key, short in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "e2e")):
        columns = [_of(key, f"{short} {x.upper()}", x, milliseconds) for x in ("p50", "p95", "p99")]
        note = ""
        if key == "e2e_s":
            note = "TTFT, TPOT and end-to-end (e2e) latency in milliseconds, of completed requests"
            if saved.get("e2e_mean_over_oracle"):
                columns.append(_over_oracle(saved))
                note += "; × oracle: the mean divided by the oracle's"
        title = f"{LATENCIES[key][:1].upper()}{LATENCIES[key][1:]} by policy"
        tables.append(Table(title, [_POLICY, *columns], runs, note, narrow=True))
    return tables


def _caches(runs: Sequence[Summary]) -> list[Table]:
    used = [
        _of("cache", "cells used", "utilization_mean", share, "share of the cells that hold a token, mean over time"),
        _of(
            "cache", "external fragmentation", "external_fragmentation_mean", share, "share of free cells out of reach"
        ),
        _of("cache", "internal fragmentation", "internal_fragmentation_mean", share),
        _of("cache", "free extents", "free_extents_mean", whole),
        _of("cache", "largest extent", "largest_free_extent_mean", whole),
        _USEFUL,
        _HITS,
    ]
    done = [
        _of("cache", "failed allocations", "failed_allocations", whole),
        _of("cache", "batch splits", "batch_splits", whole),
        _of("cache", "compactions", "compactions", whole),
        _of("cache", "bytes moved", "moved_bytes", format_size),
        _PREEMPTIONS,
    ]
    if any(run.get("host", {}).get("saves") for run in runs):
        done += [
            _of("host", "host saves", "saves", whole),
            _of("host", "host loads", "loads", whole),
            _of("host", "bytes to the host", "bytes_out", format_size),
            _of("host", "bytes back", "bytes_in", format_size),
            _of("host", "host cache at most", "most_bytes", format_size),
            _of("host", "copying", "copy_s", seconds),
        ]
    return [
        Table("How the cache was used", [_POLICY, *used], runs, "shares are means over time"),
        Table("What the policies did", [_POLICY, *done], runs),
    ]


_MEASURES = {
    "e2e_mean": "e2e mean",
    "e2e_p50": "e2e P50",
    "e2e_p95": "e2e P95",
    "e2e_p99": "e2e P99",
    "ttft_p95": "TTFT P95",
    "tpot_p95": "TPOT P95",
    "memory_bytes": "KV memory, MB",
}


def _measured(intervals: Summary, policy: str, measure: str) -> Interval | None:
    return interval_of(intervals[policy].get(measure))


def _intervals(saved: Summary) -> Table:
    """Measures over the replications, and differences from the best and ratios to the oracle in pairs."""
    intervals, best = saved["intervals"], saved.get("best")
    from_best, from_bound = (
        saved.get(key) or {} for key in ("e2e_mean_delta_vs_best", "e2e_mean_over_oracle_interval")
    )
    columns = [Column("policy", str)]
    for measure, heading in _MEASURES.items():
        show = half_width(1e-6 if measure == "memory_bytes" else 1e3)
        columns.append(Column(heading, partial(_measured, intervals, measure=measure), show))
    if best is not None:
        columns.append(
            Column(f"Δ vs {best}", lambda p: interval_of(from_best.get(p)), lambda interval: from_to(interval, 1e3))
        )
    if from_bound:
        columns.append(Column("× oracle", lambda p: interval_of(from_bound.get(p)), from_to))
    note = (
        f"{saved['replications']} replications, 95% intervals; latencies in milliseconds: the mean of the runs' means, "
        "percentiles of all their requests together; Δ: differences of the mean in pairs on the same requests, from "
        "the best corrected for their number (Bonferroni); ×: ratios to the oracle by Fieller"
    )
    return Table("Over replications", columns, list(intervals), note)


def draft_counts_report(found: DraftCounts) -> Report:
    """Report how a scenario does under several lengths of drafts, and without any."""
    columns = [
        Column("drafted", "tokens", whole, "tokens that are drafted for a sequence in each step"),
        Column("cells", "cells", whole, "what is left beside what drafts, on a device"),
        Column("TPOT mean ms", lambda row: row["tpot_s"]["mean"], milliseconds),
        Column("TPOT P95 ms", lambda row: row["tpot_s"]["p95"], milliseconds),
        Column("TTFT P95 ms", lambda row: row["ttft_s"]["p95"], milliseconds),
        Column("tokens/s", "throughput_tokens_per_s", whole),
        Column("tokens a draft", "tokens_per_draft", "{:.2f}".format, "with the model's own"),
        Column("wasted", lambda row: row["wasted_tokens"] / (row["drafted_tokens"] or 1), share, "of what is drafted"),
        Column(
            "drafting", lambda row: row["drafting_s"] / row["makespan_s"], share, "share of the time, drafter alone"
        ),
    ]
    if len(found.loads) > 1:
        columns.insert(0, Column("load", "load", "{:g}".format, "multiple of the scenario's own"))
    method = found.scenario.speculation.method
    return Report(
        f"{found.scenario.name} under {found.policy}, drafts by {method}: with or without, and how many",
        [found.basis] if found.basis else [],
        sections=[Section(text=found.sentences, tables=[Table("Drafts", columns, found.rows, keys=2)])],
    )
