"""The tables of ``benchmarks.presets``, from its report, on the console and as Markdown for the documentation, beside
how fast other simulators are, scaled to this machine; they are not run here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.runs import LIGHT, NORMAL, OVERLOAD, interval, medians

NOTHING = "–"
_NAMES = {LIGHT: "light", NORMAL: f"{NORMAL:g}", OVERLOAD: "overload"}


@dataclass(frozen=True)
class Part:
    """A paragraph, and what follows it: a file, a table or nothing. A table's first column is of names."""

    text: str
    file: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def in_markdown(parts: Iterable[Part]) -> str:
    """The parts for a page of the documentation."""
    blocks = []
    for part in parts:
        blocks.append(part.text)
        if part.file:
            blocks.append(f"```toml\n{part.file}```")
        if part.heads:
            lines = [part.heads, ["---", *["---:"] * (len(part.heads) - 1)], *part.rows]
            blocks.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(blocks) + "\n"


def in_console(console: Console, parts: Iterable[Part]) -> None:
    """Print the parts."""
    for part in parts:
        console.print(part.text.replace("`", ""), markup=False, highlight=False)
        if part.file:
            console.print(f"\n{part.file}", markup=False, highlight=False)
        if part.heads:
            table = Table(box=None, header_style="bold", pad_edge=False)
            for head in part.heads:
                table.add_column(head, justify="left" if head == part.heads[0] else "right")
            for row in part.rows:
                table.add_row(*(cell.replace("`", "") for cell in row))
            console.print(table)
        console.print()


def preset_parts(report: dict[str, Any]) -> list[Part]:
    """What a report of the presets says."""
    rows, ratios = report["runs"], report["ratios"]
    schedulers = list(dict.fromkeys(row["scheduler"] for row in rows))
    tables = [_table(scheduler, rows, ratios) for scheduler in schedulers]
    notes = (" ".join(_spreads(ratios)), *_notes(rows), *_refused(report["refused"]))
    return [
        _measured(report, "python -m benchmarks.presets"),
        *tables,
        *(Part(note) for note in notes if note),
        _peers(rows, report["bare_timeouts_per_s"]),
    ]


def million_parts(report: dict[str, Any]) -> list[Part]:
    """What a report of a million requests says."""
    heads = ("policy", "requests", "seconds", "µs per request", "peak MB", "completed", "failed", "says")
    rows = [
        (
            f"`{row['policy']}`",
            f"{row['requests']:,}",
            f"{row['seconds']:,.1f}",
            f"{1e6 * row['seconds'] / row['requests']:,.1f}",
            f"{row['peak_mb']:,.0f}",
            f"{row['completed']:,}",
            f"{row['failed']:,}",
            "unstable" if row["unstable"] else "stable",
        )
        for row in report["runs"]
    ]
    text = "`kvsim run FILE --policy POLICY`, the whole process, with this `FILE`:"
    return [_measured(report, "python -m benchmarks.presets --million"), Part(text, report["file"], heads, rows)]


def _measured(report: dict[str, Any], command: str) -> Part:
    bare = report["bare_timeouts_per_s"]
    share = "" if report["share"] == 1 else f", {report['share']:g} of the usual requests"
    return Part(
        f"Measured by `{command}` ({report['processor']}, one core, {report['date'][:10]}, {medians(report['rounds'])}"
        f"{share}; Python {report['python']}, SimPy {report['versions']['simpy']}, kvsim's core {report['core']}). "
        f"Bare SimPy does {statistics.median(bare) / 1e6:.2f} million timeouts a second in the same rounds "
        f"({min(bare) / 1e6:.2f} to {max(bare) / 1e6:.2f})."
    )


def _table(scheduler: str, rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> Part:
    mine = [row for row in rows if row["scheduler"] == scheduler]
    details = list(dict.fromkeys(row["detail"] for row in mine))
    us = {(row["policy"], row["detail"], row["load"]): row["us_per_request"] for row in mine}
    policies = list(dict.fromkeys(row["policy"] for row in mine))
    policies.sort(key=lambda policy: us.get((policy, details[0], NORMAL), float("inf")))
    above = {
        (each["policy"], each["above"]["detail"], each["above"]["load"], each["below"]["load"]): interval(each)
        for each in ratios
        if each["scheduler"] == scheduler
    }
    cells = []
    for policy in policies:
        own = [row for row in mine if row["policy"] == policy]
        times = [us.get((policy, detail, load)) for detail in details for load in _NAMES]
        cells.append(
            [
                f"`{policy}`",
                f"{own[0]['requests']:,}",
                *(NOTHING if each is None else f"{each:,.0f}" for each in times),
                above.get((policy, details[0], OVERLOAD, NORMAL), NOTHING),
                *([above.get((policy, "cache", NORMAL, NORMAL), NOTHING)] if len(details) > 1 else []),
                f"{max(row['peak_mb'] for row in own):,.0f}",
            ]
        )
    heads = ["preset", "requests", *(f"{name}, {detail}" for detail in details for name in _NAMES.values())]
    heads += [f"overload / {NORMAL:g}", *(["cache / requests"] if len(details) > 1 else []), "peak MB"]
    return Part(f"Microseconds per request under `{scheduler}`, by load and detail:", heads=heads, rows=cells)


def _spreads(ratios: Sequence[dict[str, Any]]) -> list[str]:
    """From what to what the ratios go, of overload and of the cache."""
    return [
        text.format(*(f"{each['ratio']:.2f} ({_run({**each, **each['above']})})" for each in (some[0], some[-1])))
        for changed, text in (
            ("load", f"Overload takes {{}} to {{}} times as long per request as load {NORMAL:g}."),
            ("detail", "A run with the cache watched takes {} to {} times as long as one without."),
        )
        if (some := sorted((each for each in ratios if each["above"][changed] != each["below"][changed]), key=_ratio))
    ]


def _ratio(each: dict[str, Any]) -> float:
    return float(each["ratio"])


def _server(row: dict[str, Any]) -> str:
    return f"`{row['policy']}` under `{row['scheduler']}`"


def _run(row: dict[str, Any]) -> str:
    return f"{_server(row)}, {_NAMES[row['load']]}, {row['detail']}"


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must be known of the runs to read the table."""
    lossy = [
        f"{_run(row)}: {row['failed']:,} failed, {row['truncated']:,} cut short"
        for row in rows
        if row["failed"] or row["truncated"]
    ]
    losses = (
        f"Requests failed or were cut short ({'; '.join(lossy)})." if lossy else "No request failed or was cut short."
    )
    unstable = (
        f"at load {load:g}: {_which([row for row in rows if row['load'] == load], lambda row: bool(row['unstable']))}"
        for load in _NAMES
    )
    return [
        f"{losses} Runs that say that arrivals outpace service, {'; '.join(unstable)}.",
        f"Others had the core for more than a tenth of some run: {_which(rows, lambda row: bool(row['disturbed']))}.",
    ]


def _which(rows: Sequence[dict[str, Any]], said: Callable[[dict[str, Any]], bool]) -> str:
    """The servers that it is said of in some run: all, none, or by name."""
    true = dict.fromkeys(_server(row) for row in rows if said(row))
    false = [name for name in dict.fromkeys(map(_server, rows)) if name not in true]
    if not true or not false:
        return "all" if true else "none"
    return ", ".join(true) if len(true) <= len(false) else f"all but {', '.join(false)}"


def _refused(refused: dict[str, str]) -> list[str]:
    return [f"Not run: {'; '.join(f'{name}: {why}' for name, why in refused.items())}."] if refused else []


def _peers(rows: Sequence[dict[str, Any]], bare: Sequence[float]) -> Part:
    """Other simulators beside our own runs that are most like theirs."""
    scale = machines(bare)
    ours = [
        (
            f"kvsim, `{row['policy']}`, {_NAMES[row['load']]}",
            f"{row['requests_per_s']:,.0f}",
            f"{row['tokens_per_s'] / 1e6:.2f}",
            f"{row['peak_mb']:,.0f}",
            "run here",
        )
        for row in rows
        if (row["policy"], row["scheduler"], row["detail"])
        in (("paged", "vllm", "requests"), ("vllm", "vllm", "requests"))
        and row["load"] != LIGHT
    ]
    theirs = [
        (
            peer.name,
            f"{peer.requests_per_s * scale:,.0f}",
            NOTHING if peer.tokens_per_s is None else f"{peer.tokens_per_s * scale / 1e6:.2f}",
            NOTHING if peer.peak_mb is None else f"{peer.peak_mb:,.0f}",
            f"{peer.requests_per_s:,.0f}",
        )
        for peer in PEERS
    ]
    text = (
        "Other simulators on 10,000 requests like those of the Azure conversation trace, each on a server and a model "
        f"of its own. They were not run here: they were measured {WHERE}, where bare SimPy does "
        f"{BARE_THERE / 1e6:.2f} million timeouts a second. Here it does {statistics.median(bare) / 1e6:.2f} million, "
        f"so their speeds are scaled by {scale:.2f}; memory is not."
    )
    heads = ("", "requests/s, scaled", "million tokens/s, scaled", "peak MB", "requests/s as measured there")
    return Part(text, heads=heads, rows=[*ours, *theirs])


WHERE = "in autumn 2026 on two cores of an AMD EPYC, medians of 3"
BARE_THERE = 1.52e6
"""Timeouts per second of bare SimPy, one process, on the machine of these figures."""


@dataclass(frozen=True)
class Peer:
    """Another simulator on 10,000 requests like those of the Azure conversation trace, as measured ``WHERE``."""

    name: str
    requests_per_s: float
    tokens_per_s: float | None
    """Tokens of prompts and answers; None: not measured."""
    peak_mb: float | None


PEERS = (
    Peer("BLIS, cache-signal delay 0", 3890, 5.6e6, None),
    Peer("splitwise-sim, light load", 1553, 2.27e6, 207),
    Peer("TokenSim, cost model stubbed", 1034, 1.42e6, 504),
    Peer("Vidur, vLLM scheduler, no plots, after its start", 709, None, 987),
    Peer("Vidur, vLLM scheduler, no plots", 560, 0.76e6, 987),
    Peer("BLIS, defaults, 24,000 blocks", 547, 0.78e6, 407),
    Peer("Vidur, default output", 288, 0.39e6, 987),
    Peer("splitwise-sim, overloaded", 14, 0.02e6, 209),
)


def machines(bare: Sequence[float]) -> float:
    """How many times as fast this machine is as that of the figures, by bare SimPy's timeouts per second here."""
    return statistics.median(bare) / BARE_THERE
