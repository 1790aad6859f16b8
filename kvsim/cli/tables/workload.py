"""What ``kvsim workload`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.advice.workload_fit.fit import WorkloadFit
from kvsim.cli.tables.formats import new_table, share
from kvsim.scenario.prefixes import UNKNOWN_PREFIXES
from workloads.fitting.statistics import Spread, Statistics


def show_statistics(console: Console, name: str, found: Statistics) -> None:
    """Print the statistics of a request stream."""
    rate = "all at once" if found.rate is None else f"{found.rate:.4g} a second"
    sessions = f" in {found.sessions:,} sessions" if found.sessions else ""
    console.print(
        f"[bold]{name}[/]: {found.requests:,} requests{sessions} over {found.duration_s:,.6g} s, {rate}",
        highlight=False,
    )
    bursts = [f"{w:g} s {value:.3g}" for w, value in found.dispersion.items() if value is not None]
    if found.gap_cv is not None:
        line = f"gaps between arrivals: coefficient of variation {found.gap_cv:.3g}"
        if bursts:
            line += f"; variance over mean of the arrivals in windows of {', of '.join(bursts)} (Poisson: 1)"
        console.print(line, highlight=False)
    if found.tick_s is not None:
        console.print(
            f"the clock ticks every {found.tick_s:.3g} s, and many requests share a tick: burstiness on a finer scale "
            "cannot be measured",
            highlight=False,
        )
    table = new_table("tokens", "mean", "P50", "P95", "P99", "max", "lognormal mu", "sigma")
    for label, spread in (("prompt", found.prompt), ("output", found.output)):
        table.add_row(label, *_spread(spread))
    console.print(table)
    if found.correlation is not None:
        console.print(f"rank correlation of prompt and output: {found.correlation:.3f}", highlight=False)
    reuse = found.reuse
    if reuse is None:
        console.print(f"prefix hits: {UNKNOWN_PREFIXES}", highlight=False)
    else:
        console.print(
            f"prefix hits in an infinite cache: {share(reuse.hit_rate)} of the prompt tokens, "
            f"in {reuse.blocks:,} blocks of {reuse.block_size} tokens, {reuse.distinct:,} of them distinct",
            highlight=False,
        )


def show_fit(console: Console, fitted: WorkloadFit) -> None:
    """Print the candidates, what was chosen and why, and the section to paste."""
    windows = (f"{w:g} s" for w in fitted.statistics.dispersion)
    table = new_table("", "candidate", "AIC", "distance", "gaps' CV", *windows, left=("candidate",))
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
    tokens = (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)
    return [*(f"{value:,.0f}" for value in tokens), f"{spread.mu:.3f}", f"{spread.sigma:.3f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
