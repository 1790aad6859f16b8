"""What ``kvsim recommend`` prints of several devices."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvsim.advice.memory.engine_flags import command_line
from kvsim.advice.recommend.device_comparison import DeviceAnswer, DeviceComparison
from kvsim.cli.tables.formats import print_rows, show_basis
from kvsim.cli.tables.recommendation import short
from kvsim.experiments.interval_text import plain, plus_minus


def show_device_comparison(console: Console, found: DeviceComparison, folder: Path) -> None:
    """Print what the times rest on, the conclusion, a line for each device, what to type, and what else to know.

    ``folder``: where the results are saved.
    """
    for basis in found.bases:
        show_basis(console, basis)
    console.print(f"[bold]{found.conclusion}[/]", highlight=False, soft_wrap=True)
    for line in found.no_verdicts:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    priced = any(answer.price_per_hour is not None for answer in found.answers)
    bounds = [bound.text for bound in found.slo.asked]
    heads = ["device", "met", *bounds, "up to, in\nevery run", "on average", "requests/s"]
    heads += ["per hour", "1M output\ntokens", "at the\nlargest load"] if priced else []
    print_rows(console, heads, [_row(found, answer, priced) for answer in found.ranked], left=("met",))
    for answer in found.ranked:
        best = answer.best
        if best is None:
            continue
        c = best.candidate
        typed = f"{c.command} {command_line(c.flags)}" if c.flags else f"{c.label} (which no engine has)"
        console.print(f"[bold]{answer.device}[/]: {typed}", highlight=False, soft_wrap=True)
        repeat = f"   to repeat: kvsim run {folder / f'best-{answer.device}.toml'}"
        console.print(repeat, highlight=False, soft_wrap=True)
    for line in found.limits:
        console.print(f"note: {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _row(found: DeviceComparison, answer: DeviceAnswer, priced: bool) -> list[str]:
    """The line of a device; multiples are of the load asked about, requests/s those of the largest load."""
    best, none = answer.best, "–"
    name = answer.device if answer.tensor_parallel == 1 else f"{answer.tensor_parallel} x {answer.device}"
    row = [name, answer.verdict or "no verdict"]
    row += [none if best is None else short(best.measures.get(b.measure), b.is_share) for b in found.slo.asked]
    row.append(none if answer.load is None else f"{'≥ ' * answer.at_least}{plain(answer.load, 3)} x")
    row.append(none if answer.mean_load is None else plus_minus(answer.mean_load, unit=" x"))
    row.append(none if answer.largest is None else plain(answer.largest.requests_per_s, 2))
    if priced:
        cost = answer.cost_at_largest
        row.append(none if answer.price_per_hour is None else plain(answer.price_per_hour))
        row.append(none if answer.cost is None else plain(answer.cost, 3))
        row.append(none if cost is None else f"{'≤ ' * answer.at_least}{plain(cost, 3)}")
    return row
