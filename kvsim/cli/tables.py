"""What the command line prints for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsim.costs.profile import Coefficient
from kvsim.engines.conformance import Agreement, Disagreement
from kvsim.experiments.comparison import Comparison, against_oracle
from kvsim.experiments.prefix_cache import PrefixStudy
from kvsim.simulation.result import Result
from policies import Preset

if TYPE_CHECKING:
    from kvsim.advice.memory import MemoryReport
    from kvsim.calibration.run import Calibration
    from kvsim.engines.validation import Validation
    from real_engine.accuracy import Accuracy

_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}


def run(console: Console, result: Result, profile: str) -> None:
    """One run: counts, latencies, the cache."""
    s = result.summary
    console.print(f"[bold]{s['scenario']}[/] under [bold]{s['policy']}[/], seed {s['seed']}", highlight=False)
    counts = f"{s['completed']:,} of {s['requests']:,} requests completed, {s['failed']:,} failed"
    if s["truncated"]:
        counts += f", {s['truncated']:,} cut short by a full slot"
    console.print(f"{counts}; {_number(s['throughput_tokens_per_s'])} output tokens/s", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("", "mean", "P50", "P95", "P99"):
        table.add_column(head, justify="right" if head else "left")
    for key, name in _LATENCIES.items():
        table.add_row(name, *(_seconds(s[key][x]) for x in ("mean", "p50", "p95", "p99")))
    console.print(table)
    c = s["cache"]
    watched = ""
    if c["utilization_mean"] is not None:
        watched = (
            f"{_share(c['utilization_mean'])} of the cells used, external fragmentation "
            f"{_share(c['external_fragmentation_mean'])}, internal {_share(c['internal_fragmentation_mean'])}; "
        )
    console.print(
        f"cache: {watched}"
        f"{c['failed_allocations']:,} failed allocations, {c['batch_splits']:,} batch splits, "
        f"{_bytes(c['moved_bytes'])} moved",
        highlight=False,
    )
    if s["prefix"]["found"] or s["preemptions"]:
        console.print(
            f"prefixes: {_share(s['prefix']['hit_rate'])} of the tokens were in the cache already; "
            f"{s['preemptions']:,} preemptions, {s['recomputed_tokens']:,} tokens computed once more",
            highlight=False,
        )
    host = s["host"]
    if host["bytes_out"] or host["bytes_in"]:
        console.print(
            f"host tier: {_bytes(host['bytes_out'])} out, {_bytes(host['bytes_in'])} back, "
            f"{_bytes(host['bytes_prefetched'])} of them ahead of their use; steps waited "
            f"{_seconds(host['prefetch_wait_s'])} for what was on its way",
            highlight=False,
        )
    console.print(profile, style="dim", highlight=False)


def comparison(console: Console, compared: Comparison) -> None:
    """Two tables with a row for each policy: what users feel, and what the cache did."""
    summaries = [result.summary for result in compared.results]
    first = summaries[0]
    console.print(
        f"[bold]{compared.scenario.name}[/]: {first['requests']:,} requests, {compared.scenario.cache.cells:,} cells, "
        f"{compared.scenario.server.slots} slots, seed {compared.scenario.seed}",
        highlight=False,
    )
    bound = against_oracle(compared.results)
    users = [
        [
            s["policy"],
            f"{s['completed']:,}",
            f"{s['failed']:,}",
            _number(s["throughput_tokens_per_s"]),
            *(_milliseconds(s[key][x]) for key in _LATENCIES for x in ("p50", "p95", "p99")),
            f"{bound[s['policy']]:.2f}" if s["policy"] in bound else "–",
        ]
        for s in summaries
    ]
    quantiles = [f"{name}\n{x}" for name in ("TTFT", "TPOT", "e2e") for x in ("P50", "P95", "P99")]
    _print_rows(console, ["policy", "ok", "failed", "tokens\n/s", *quantiles, "e2e mean\n/ oracle"], users)
    caches = []
    for s in summaries:
        c = s["cache"]
        caches.append(
            [
                s["policy"],
                _share(c["utilization_mean"]),
                _share(c["external_fragmentation_mean"]),
                _share(c["internal_fragmentation_mean"]),
                _number(c["free_extents_mean"]),
                _number(c["largest_free_run_mean"]),
                _share(c["scored_useful"]),
                f"{c['failed_allocations']:,}",
                f"{c['batch_splits']:,}",
                f"{c['compactions']:,}",
                _bytes(c["moved_bytes"]),
                _share(s["prefix"]["hit_rate"]),
                f"{s['preemptions']:,}",
            ]
        )
    heads = ["cache\nused", "external\nfragm.", "internal\nfragm.", "free\nruns", "largest\nrun", "attended\nuseful"]
    heads += ["failed\nalloc.", "batch\nsplits", "compac-\ntions", "bytes\nmoved", "prefix\nhits", "preemp-\ntions"]
    _print_rows(console, ["policy", *heads], caches)
    console.print("TTFT, TPOT and end-to-end (e2e) latency in milliseconds, of completed requests", style="dim")
    console.print(compared.profile, style="dim", highlight=False)


def calibration(console: Console, c: Calibration) -> None:
    """The fitted coefficients with their intervals, and how well they predict."""
    p = c.profile
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("cost", "value", "95 % interval"):
        table.add_column(head, justify="left" if head == "cost" else "right")

    def row(name: str, c: Coefficient) -> None:
        table.add_row(name, _seconds(c.value), f"{_seconds(c.low)} to {_seconds(c.high)}")

    for low, high, slope in zip(p.matmul_knots, p.matmul_knots[1:], p.matmul_slopes_s, strict=False):
        row(f"a token more, {low} to {high} tokens", slope)
    for kernel, attention in p.kernels.items():
        row(f"{kernel} attention, a pass of one token", attention.base_s)
        row(f"{kernel} attention, a cell for one token", attention.per_cell_s)
        knots = p.attention_knots
        for low, high, slope in zip(knots, knots[1:], attention.further_token_s, strict=False):
            row(f"{kernel} attention, that cell for a token more, {low} to {high} tokens", slope)
        row(f"{kernel} attention, a chunk", attention.per_chunk_s)
        row(f"{kernel} attention, a run", attention.per_run_s)
    if p.moves is not None:
        row("moves, each compaction", p.moves.per_pass_s)
        row("moves, per run", p.moves.per_run_s)
        row("moves, per cell", p.moves.per_cell_s)
    console.print(table)
    console.print(
        f"held-out error over {p.held_out_samples} forward passes: median {p.held_out_error_median:.1%}, "
        f"P95 {p.held_out_error_p95:.1%}",
        highlight=False,
    )
    ended = "the intervals were tight" if c.tight else "the time was over"
    before = f", {c.resumed} of them measured before" if c.resumed else ""
    console.print(
        f"{c.rounds} rounds{before}, until {ended}: half of the passes are known to ±{c.half_width:.1%} or better",
        highlight=False,
    )
    console.print(p.describe(), style="dim", highlight=False)


def validation(console: Console, v: Validation) -> None:
    """Predicted, measured and error of each policy and measure."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    several = v.repeats > 1
    heads = ["policy", "measure", "predicted", "measured", *(["± run to run"] if several else []), "error"]
    for head in [*heads, *(["over the repeats"] if several else [])]:
        table.add_column(head, justify="left" if head in ("policy", "measure") else "right")
    before = None
    for row in v.table.to_dict("records"):
        policy = str(row["policy"]) if row["policy"] != before else ""
        before = row["policy"]
        if row["measure"] in _LATENCIES:
            measure = f"{_LATENCIES[str(row['measure'])]} {row['statistic']}"
            pair = (_seconds(row["predicted"]), _seconds(row["measured"]))
        else:
            measure, pair = "output tokens/s", (_number(row["predicted"]), _number(row["measured"]))
        error = "–" if row["error"] != row["error"] else f"{row['error']:+.1%}"
        cells = [policy, measure, *pair, *([f"{row['spread']:.1%}"] if several else []), error]
        if several:
            cells.append(f"{row['low']:+.1%} to {row['high']:+.1%}")
        table.add_row(*cells, end_section=row["measure"] not in _LATENCIES)
    console.print(table)
    console.print(
        "Both runs placed the same cells: schedule "
        + ", ".join(f"{policy} {digest[:8]}" for policy, digest in v.schedules.items()),
        highlight=False,
    )
    if v.compared:
        pictures = ", ".join(f"{policy} {n:,}" for policy, n in v.compared.items())
        console.print(f"llama.cpp showed its cells, and they were the policy's every time: {pictures}", highlight=False)
    tau, wrong = v.ranking
    if tau is not None:
        console.print(
            f"Ranking of the policies by mean end-to-end latency: Kendall's tau {tau:.2f}, {wrong} pairs ranked "
            "otherwise although they lie further apart than they spread",
            highlight=False,
        )
    low, high = min(pace[0] for pace in v.pace.values()), max(pace[1] for pace in v.pace.values())
    console.print(
        f"Largest error of end-to-end latency at P50 or P99: {v.worst:.1%}. Passes took {low:.3f} to {high:.3f} of the "
        f"time that they took in the calibration, and predictions are scaled by it; without that: "
        f"{v.worst_unscaled:.1%}",
        highlight=False,
    )
    if v.elsewhere:
        console.print("The profile was measured on another processor than this one.", style="bold", highlight=False)
    console.print(v.profile.describe(), style="dim", highlight=False)


def names(console: Console, described: dict[str, str]) -> None:
    """Names with a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in described.items():
        table.add_row(f"[bold]{name}[/]", line)
    console.print(table)


def prefixes(console: Console, study: PrefixStudy) -> None:
    """Hit rates, a row for each cache size and a column for each eviction policy."""
    names = list(dict.fromkeys(study.table["eviction"]))
    rates = study.table.pivot(index="blocks", columns="eviction", values="hit_rate")[names]
    table = _table("blocks", "tokens", *names, *(["lru of belady"] if {"lru", "belady"} <= set(names) else []))
    for blocks, row in rates.iterrows():
        n = int(str(blocks))
        cells = [f"{n:,}", f"{n * study.block_size:,}", *(f"{row[name]:.1%}" for name in names)]
        if {"lru", "belady"} <= set(names):
            cells.append(f"{row['lru'] / row['belady']:.0%}" if row["belady"] > 0 else "–")
        table.add_row(*cells)
    console.print(table)
    knees = ", ".join(f"{eviction} {n:,}" for eviction, n in study.knees.items())
    console.print(
        f"{study.requests:,} requests ask for {study.references:,} blocks of {study.block_size} tokens, "
        f"{study.distinct:,} of them different; infinite cache {study.infinite:.1%}",
        highlight=False,
    )
    if knees:
        console.print(f"working set, where the curve turns flat, in blocks: {knees}", highlight=False)
    console.print(
        f"{study.lookups_per_s:,.0f} blocks looked up per second of processor time", style="dim", highlight=False
    )


def accuracy(console: Console, found: Accuracy) -> None:
    """A row for each pair of types."""
    table = _table("K", "V", "bytes\nper cell", "logits\nRMSE", "top-1\nagreement", "perplexity", "perplexity\n/ f32")
    for row in found.table.to_dict("records"):
        table.add_row(
            row["k"],
            row["v"],
            f"{row['cell_bytes']:,.0f}",
            f"{row['logits_rmse']:.3g}",
            f"{row['top1_agreement']:.1%}",
            f"{row['perplexity']:,.3f}",
            f"{row['perplexity_over_f32']:.4f}",
        )
    console.print(table)
    console.print(
        f"{found.model}, weights as {found.weights}, reads {found.tokens:,} tokens ({found.text}); "
        f"perplexity with f32 {found.reference_perplexity:,.3f}",
        style="dim",
        highlight=False,
    )


def memory(console: Console, report: MemoryReport) -> None:
    """A row for each set-up: what each part takes, and of what it needs; then what the columns mean."""
    heads = [
        "weights\n/ needed",
        "cache\n/ needed",
        "work\n/ needed",
        "runtime",
        "resident",
        "peak",
        "measured\n/ needed",
    ]
    table = _table("set-up", *heads, "with\nruntime")
    for row in report.table.reset_index().to_dict("records"):
        parts = [f"{_bytes(row[part])} / {_bytes(row[f'needed_{part}'])}" for part in ("weights", "cache", "work")]
        sizes = [_bytes(row[key]) for key in ("runtime", "resident", "peak")]
        table.add_row(row["setup"], *parts, *sizes, f"{row['ratio']:.2f}x", f"{row['ratio_with_runtime']:.2f}x")
    console.print(table)
    first, *_, last = report.table["ratio"]
    one = report.setups["naive"]
    console.print(
        f"{report.model}: {one.slots} slots of {one.context:,} tokens, {one.tokens:,} held in each; "
        f"from {first:.2f}x to {last:.2f}x of what is needed",
        highlight=False,
    )
    console.print(
        "needed: weights once, K and V of the tokens held, activations of the largest pass. measured / needed leaves "
        "the runtime out;\nwith runtime: all that is resident over the same need. resident: at the peak of the run. "
        "peak: while loading, too.",
        style="dim",
        highlight=False,
    )


def agreements(console: Console, found: Sequence[Agreement]) -> None:
    """Agreement of each recording, and of the first disagreement both cell maps side by side."""
    table = _table("recording", "era", "agree/total")
    for a in found:
        colour = "green" if a.first is None else "red"
        table.add_row(a.file, a.era, f"[{colour}]{a.agree}/{a.total}[/]")
    total, agree = sum(a.total for a in found), sum(a.agree for a in found)
    if len(found) > 1:
        table.add_row("in all", "", f"{agree}/{total}")
    console.print(table)
    for a in found:
        if a.first is not None:
            _disagreement(console, a.file, a.first)


def _disagreement(console: Console, file: str, d: Disagreement) -> None:
    console.print(f"\n[bold]{file}[/], record {d.record}: {json.dumps(d.operation)}", highlight=False)
    table = _table("field", "recorded", "ours")
    for name in d.fields:
        if not name.endswith("map"):
            table.add_row(name, str(d.recorded[name]), str(d.ours.get(name)))
    if table.row_count:
        console.print(table)
    for name in d.fields:
        if name.endswith("map"):
            _both_maps(console, name, d.recorded[name], d.ours.get(name) or [])


def _both_maps(console: Console, name: str, recorded: list[list[Any]], ours: list[list[Any]]) -> None:
    """Rows of 32 cells, the recording left and ours right; a digit or letter for each sequence, red where they part."""
    width = 32
    left, right = _cells(recorded), _cells(ours)
    end = max([*left, *right], default=0) + 1
    table = _table(name, "recorded", "ours")
    for start in range(0, end, width):
        cells = range(start, min(start + width, end))
        row = []
        for own, other in ((left, right), (right, left)):
            text = Text()
            for cell in cells:
                holds = own.get(cell)
                symbol = "·" if holds is None else _SYMBOLS[holds[0][0] % len(_SYMBOLS)]
                text.append(symbol, style="bold white on red" if holds != other.get(cell) else _style(holds))
            row.append(text)
        if any(left.get(cell) != right.get(cell) for cell in cells):
            table.add_row(str(start), *row)
    console.print(table)
    parted = [cell for cell in range(end) if left.get(cell) != right.get(cell)]
    for cell in parted[:4]:
        console.print(
            f"  cell {cell}: recorded {_says(left.get(cell))}, ours {_says(right.get(cell))}", highlight=False
        )
    if len(parted) > 4:
        console.print(f"  and {len(parted) - 4} more cells", highlight=False)


_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Held = tuple[tuple[int, ...], int]


def _cells(runs: list[list[Any]]) -> dict[int, _Held]:
    """Sequences and position of each used cell."""
    return {first + i: (tuple(seqs), position + i) for first, length, seqs, position in runs for i in range(length)}


def _style(holds: _Held | None) -> str:
    return "dim" if holds is None else f"color({1 + holds[0][0] % 6})"


def _says(holds: _Held | None) -> str:
    if holds is None:
        return "nothing"
    return f"position {holds[1]} of sequence {', '.join(map(str, holds[0]))}"


def preset(console: Console, p: Preset) -> None:
    """One policy: its four choices, parameters, source."""
    console.print(f"[bold]{p.name}[/]: {p.summary}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    heeds = ", ".join(f"cache.{key}" for key in p.parameters) or "none"
    for name, value in (
        ("layout", p.layout),
        ("compactor", p.compactor),
        ("trigger", p.trigger),
        ("storage", "any: cache.type_k, cache.type_v"),
        ("attention", p.kernel),
        ("parameters", f"cache.cells; {heeds}" if p.parameters else "cache.cells"),
        ("source", p.source),
    ):
        table.add_row(f"[bold]{name}[/]", value)
    console.print(table)


def _print_rows(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, cut into as many below one another as the width asks for, each with the first column."""
    widths = [
        max(*(len(line) for line in head.split("\n")), *(len(row[i]) for row in rows)) for i, head in enumerate(heads)
    ]
    at = 1
    while at < len(heads):
        end, room = at, console.width - widths[0]
        while end < len(heads) and (room >= widths[end] + 2 or end == at):
            room -= widths[end] + 2
            end += 1
        table = _table(heads[0], *heads[at:end])
        for row in rows:
            table.add_row(row[0], *row[at:end])
        console.print(table)
        console.print()
        at = end


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, head in enumerate(columns):
        table.add_column(head, justify="right" if i else "left")
    return table


def _milliseconds(value: Any) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:,.0f}" if value >= 0.1 else f"{1000 * value:.3g}"


def _seconds(value: Any) -> str:
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale or unit == "µs":
            return f"{value / scale:.3g} {unit}"
    return ""


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: Any) -> str:
    return "–" if value is None else f"{value:.1%}"


def _bytes(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value} B"
