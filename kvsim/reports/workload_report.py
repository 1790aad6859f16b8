"""The reports about request streams: their statistics, generators fitted to them, and hits of a prefix cache."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import counted
from kvsim.reports.formats import share, whole
from kvsim.reports.report import Column, Report, Section, Table
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES

if TYPE_CHECKING:
    from kvsim.advice.workload_fit.fit import WorkloadFit
    from kvsim.experiments.prefix_cache import PrefixStudy
    from workloads.fitting.statistics import Spread, Statistics


def statistics_report(name: str, found: Statistics) -> Report:
    """How many requests a stream has, how bursty and how long they are, and how much of them repeats."""
    rate = "all at once" if found.rate is None else f"{found.rate:.4g} a second"
    sessions = f" in {found.sessions:,} sessions" if found.sessions else ""
    columns = [
        Column("tokens", 0),
        *(
            Column(heading, partial(_spread, key=key), whole)
            for heading, key in {"mean": "mean", "P50": "p50", "P95": "p95", "P99": "p99", "max": "max"}.items()
        ),
        Column("lognormal mu", lambda row: row[1].mu, "{:.3f}".format),
        Column("sigma", lambda row: row[1].sigma, "{:.3f}".format),
    ]
    rows = [("prompt", found.prompt), ("output", found.output)]
    when = f"over {found.duration_s:,.6g} s, {rate}"
    if found.users is not None:
        when = f"of {counted(found.users, 'user')}, each after the answer to the one before"
    return Report(
        f"{name}: {found.requests:,} requests{sessions} {when}",
        about=_arrivals(found),
        sections=[Section("Tokens", tables=[Table("Tokens", columns, rows)]), Section("Reuse", _reuse(found))],
    )


def _spread(row: tuple[str, Spread], key: str) -> float:
    return float(getattr(row[1], key))


def _arrivals(found: Statistics) -> list[str]:
    """How bursty arrivals are, and how fine the clock is."""
    lines = []
    bursts = [f"{w:g} s {value:.3g}" for w, value in found.dispersion.items() if value is not None]
    if found.gap_cv is not None:
        line = f"gaps between arrivals: coefficient of variation {found.gap_cv:.3g}"
        if bursts:
            line += f"; variance over mean of the arrivals in windows of {', of '.join(bursts)} (Poisson: 1)"
        lines.append(line)
    if found.tick_s is not None:
        lines.append(
            f"the clock ticks every {found.tick_s:.3g} s, and many requests share a tick: burstiness on a finer scale "
            "cannot be measured"
        )
    return lines


def _reuse(found: Statistics) -> list[str]:
    lines = []
    if found.correlation is not None:
        lines.append(f"rank correlation of prompt and output: {found.correlation:.3f}")
    if logged := found.logged:
        most = f"; {share(logged.sharing)} of the requests found {logged.shared:,} tokens or more" * (logged.found > 0)
        lines.append(f"prefix hits as the server counted them: {share(logged.hit_rate)} of the prompt tokens{most}")
    reuse = found.reuse
    if reuse is None and logged:
        return lines
    if reuse is None:
        return [*lines, f"prefix hits: {UNKNOWN_PREFIXES}"]
    return [
        *lines,
        f"prefix hits in an infinite cache: {share(reuse.hit_rate)} of the prompt tokens, "
        f"in {reuse.blocks:,} blocks of {reuse.block_size} tokens, {reuse.distinct:,} of them distinct",
    ]


class _Candidate(NamedTuple):
    """A row of the candidates; what does not apply is None."""

    of: str
    label: str
    aic: float | None = None
    distance: float | None = None
    gap_cv: float | None = None
    dispersion: dict[float, float | None] = {}  # noqa: RUF012 - never written
    misfit: float | None = None


def workload_fit_report(fitted: WorkloadFit) -> Report:
    """The candidates, what was chosen and why, and the section to paste."""
    wanted = fitted.statistics
    rows = [_Candidate("arrivals", "the stream", None, None, wanted.gap_cv, wanted.dispersion)]
    for one in fitted.arrivals:
        mark = " *" if one is fitted.used else ""
        c = one.candidate
        rows.append(_Candidate("arrivals", one.label + mark, c.aic, c.distance, *one.drawn[1:], one.misfit))
    for of, lengths in (("prompt", fitted.prompt), ("output", fitted.output)):
        used = lengths.used["kind"]
        rows += [_Candidate(of, c.kind + " *" * (c.kind == used), c.aic, c.distance) for c in lengths.candidates]
        if used not in {c.kind for c in lengths.candidates}:
            rows.append(_Candidate(of, f"{used} *"))
    columns = [
        Column("", attrgetter("of")),
        Column("candidate", attrgetter("label")),
        Column("AIC", attrgetter("aic"), whole),
        Column("distance", attrgetter("distance"), _number, "Kolmogorov's"),
        Column("gaps' CV", attrgetter("gap_cv"), _number),
        *(Column(f"{window:g} s", partial(_dispersion, window=window), _number) for window in wanted.dispersion),
        Column("misfit", attrgetter("misfit"), _number),
    ]
    note = (
        "* used; distance: Kolmogorov's; at 1 s, 60 s: variance over mean of arrivals; CV and these are medians of "
        "five streams drawn from the candidate; misfit: how far the stream is outside those five, as a factor"
    )
    reasons = [fitted.why, f"prompt: {fitted.prompt.why}", f"output: {fitted.output.why}"]
    missing = [f"not in the model: {line}" for line in fitted.notes]
    return Report(
        sections=[
            Section("Candidates", tables=[Table("Candidates", columns, rows, note, keys=2)]),
            Section("What was chosen", [*reasons, *missing, "", fitted.to_toml().rstrip("\n")]),
        ]
    )


def _dispersion(row: _Candidate, window: float) -> float | None:
    return row.dispersion.get(window)


def _number(value: Any) -> str:
    return f"{value:.3g}"


def prefix_report(study: PrefixStudy) -> Report:
    """Hit rates, a row for each cache size and a column for each order of eviction; or why there are none."""
    reuse = study.reuse
    if reuse is None:
        return Report(f"{study.scenario}: {study.reason}")
    names = list(dict.fromkeys(study.table["eviction"]))
    rates = study.table.pivot(index="blocks", columns="eviction", values="hit_rate")[names]
    columns = [
        Column("blocks", "blocks", whole),
        Column("tokens", lambda row: row["blocks"] * study.block_size, whole),
        *(Column(name, name, share) for name in names),
    ]
    if {"lru", "belady"} <= set(names):
        columns.append(
            Column(
                "lru / belady", lambda row: row["lru"] / row["belady"] if row["belady"] > 0 else None, "{:.0%}".format
            )
        )
    lines = [
        f"{study.requests:,} requests ask for {reuse.blocks:,} blocks of {study.block_size} tokens, "
        f"{reuse.distinct:,} of them distinct; infinite cache {share(study.infinite)}"
    ]
    if knees := ", ".join(f"{eviction} {n:,}" for eviction, n in study.knees.items()):
        lines.append(f"working set, where the curve flattens, in blocks: {knees}")
    if study.error is not None:
        lines.append(
            f"lru is counted on all blocks; other orders are estimated from two samples of 1 in {study.one_in:,}, "
            f"to within about {100 * study.error:.2g} points"
        )
    table = Table("Hit rates by cache size", columns, rates.reset_index().to_dict("records"))
    return Report(sections=[Section("Hit rates", tables=[table]), Section(text=lines)])
