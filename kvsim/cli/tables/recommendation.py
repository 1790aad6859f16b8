"""What ``kvsim recommend`` prints."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from kvsim.advice.candidates import REASONS
from kvsim.advice.recommendation import RULE, Recommendation, spoken
from kvsim.cli.tables.formats import new_table
from kvsim.experiments.estimates import Interval
from kvsim.model.storage_types import format_size


def show_recommendation(console: Console, found: Recommendation) -> None:
    """Print the conclusion, the best settings, what to type, what was ruled out, and the limits of the answer."""
    console.print(f"[bold]{found.conclusion}[/]", highlight=False, soft_wrap=True)
    if found.compared:
        console.print(found.compared, highlight=False, soft_wrap=True)
    if found.best:
        console.print()
        console.print(_best(found))
        console.print(f"{RULE}; ± is half of a 95 % interval", style="dim", highlight=False, soft_wrap=True)
    for place, f in enumerate(found.best, 1):
        c = f.candidate
        console.print(f"\n[bold]{place}.[/] {c.label}", highlight=False, soft_wrap=True)
        if c.flags:
            flags = " ".join(f"{name} {value}".strip() for name, value in c.flags)
            console.print(f"   {c.command} {flags}", highlight=False, soft_wrap=True)
        console.print(f"   again: kvsim run best-{place}.toml", highlight=False, soft_wrap=True)
        for note in c.notes(found.profile):
            console.print(f"   note: {note}", style="dim", highlight=False, soft_wrap=True)
    _show_ruled_out(console, found)
    for line in found.limits:
        console.print(f"note: {line}", style="dim", highlight=False, soft_wrap=True)


def _show_ruled_out(console: Console, found: Recommendation) -> None:
    n = len(found.space.candidates)
    console.print(
        f"\nOf {n:,} settings, {found.tried:,} were tried in {found.runs:,} runs; ruled out:", highlight=False
    )
    for reason, count in found.reasons.items():
        by = found.missed_by if reason == "slo" else None
        much = f", by {by[0]:.3g} x to {by[1]:.3g} x" if by else ""
        console.print(f"   {count:>5,}  {REASONS[reason]}{much}", highlight=False)
    for reason in ("engine", "forgets"):
        names = [name for name, (why, _) in found.space.policies_left_out.items() if why == reason]
        if names:
            console.print(f"   {REASONS[reason]}: {', '.join(names)}", highlight=False, soft_wrap=True)


def _best(found: Recommendation) -> Table:
    bounds = found.slo.asked
    heads = ("policy", "cells", "slots", "batch", "K/V", "memory", *(bound.text for bound in bounds))
    table = new_table("", *heads, "sustains", "met", left=("policy", "met"))
    table.columns[0].justify = "right"
    for place, f in enumerate(found.best, 1):
        c, server, cache = f.candidate, f.candidate.scenario.server, f.candidate.scenario.cache
        batch = str(server.n_batch) if c.engine == "vllm" else f"{server.n_batch}/{server.n_ubatch}"
        types = c.type_k if c.type_k == c.type_v else f"{c.type_k}/{c.type_v}"
        figures = [_short(f.measures.get(bound.measure), bound.is_share) for bound in bounds]
        sustains = "–"
        if f.sustained is not None:
            sustains = f"{'≥ ' * f.at_least}{f.sustained.value:.3g} x{_plus_minus(f.sustained)}"
        row = [str(place), c.family, f"{cache.cells:,}", str(server.slots), batch, types, format_size(c.memory_bytes)]
        table.add_row(*row, *figures, sustains, f.verdict)
    return table


def _short(interval: Interval | None, share: bool) -> str:
    if interval is None or share:
        return spoken(interval, share)
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    return f"{interval.value * scale:.3g} {unit}{_plus_minus(interval, scale)}"


def _plus_minus(interval: Interval, scale: float = 1.0) -> str:
    return f" ±{interval.half_width * scale:.2g}" if math.isfinite(interval.half_width) else ""
