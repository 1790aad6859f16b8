"""What ``kvsim workload`` prints for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvsim.advice.workload_fit import WorkloadFit
from workloads.fitting.statistics import Spread, Statistics


def statistics(console: Console, name: str, told: Statistics) -> None:
    """What a request stream is like."""
    rate = "all at once" if told.rate is None else f"{told.rate:.4g} a second"
    sessions = f" in {told.sessions:,} sessions" if told.sessions else ""
    console.print(
        f"[bold]{name}[/]: {told.requests:,} requests{sessions} over {told.duration_s:,.6g} s, {rate}", highlight=False
    )
    bursts = [f"{w:g} s {value:.3g}" for w, value in told.dispersion.items() if value is not None]
    if told.gap_cv is not None:
        line = f"gaps between arrivals: coefficient of variation {told.gap_cv:.3g}"
        if bursts:
            line += f"; variance over mean of the arrivals in windows of {', of '.join(bursts)} (Poisson: 1)"
        console.print(line, highlight=False)
    if told.tick_s is not None:
        console.print(
            f"the clock ticks every {told.tick_s:.3g} s, and many requests share a tick: burstiness below it cannot "
            "be read off",
            highlight=False,
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("tokens", "mean", "P50", "P95", "P99", "max", "lognormal mu", "sigma"):
        table.add_column(head, justify="left" if head == "tokens" else "right")
    for label, spread in (("prompt", told.prompt), ("output", told.output)):
        table.add_row(label, *_spread(spread))
    console.print(table)
    if told.correlation is not None:
        console.print(f"rank correlation of prompt and output: {told.correlation:.3f}", highlight=False)
    reuse = told.reuse
    if reuse is not None:
        console.print(
            f"an unbounded prefix cache finds {reuse.share:.3f} of {reuse.segments:,} pieces of prompts "
            f"({reuse.distinct:,} distinct), {reuse.found_tokens:.1%} of their tokens",
            highlight=False,
        )


def fit(console: Console, fitted: WorkloadFit) -> None:
    """The candidates, what was chosen and why, and the section to paste."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    heads = ("", "candidate", "AIC", "distance", "gaps' CV", *(f"{w:g} s" for w in fitted.statistics.dispersion))
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i > 1 else "left")
    wanted = fitted.statistics
    table.add_row("arrivals", "the stream", "", "", _number(wanted.gap_cv), *map(_number, wanted.dispersion.values()))
    for one in fitted.arrivals:
        c, mark = one.candidate, " *" if one is fitted.used else ""
        spread = (_number(one.gap_cv), *map(_number, one.dispersion.values()))
        table.add_row("", f"{one.label}{mark}", f"{c.aic:,.0f}", _number(c.distance), *spread)
    for label, lengths in (("prompt", fitted.prompt), ("output", fitted.output)):
        for i, c in enumerate(lengths.candidates):
            mark = " *" if c.kind == lengths.used["kind"] else ""
            table.add_row(label if i == 0 else "", f"{c.kind}{mark}", f"{c.aic:,.0f}", _number(c.distance), "", "", "")
        if lengths.used["kind"] not in {c.kind for c in lengths.candidates}:
            table.add_row("", f"{lengths.used['kind']} *", "", "", "", "", "")
    console.print(table)
    console.print("* used; distance: Kolmogorov's; at 1 s, 60 s: variance over mean of arrivals", style="dim")
    for line in (fitted.why, f"prompt: {fitted.prompt.why}", f"output: {fitted.output.why}"):
        console.print(line, highlight=False)
    for note in fitted.notes:
        console.print(f"not in the model: {note}", highlight=False)
    console.print()
    console.print(fitted.to_toml(), highlight=False, markup=False, soft_wrap=True, end="")


def _spread(spread: Spread) -> list[str]:
    whole = (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)
    return [*(f"{value:,.0f}" for value in whole), f"{spread.mu:.3f}", f"{spread.sigma:.3f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
