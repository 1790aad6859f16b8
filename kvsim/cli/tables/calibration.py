"""What ``kvsim calibrate`` prints."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvsim.calibration.run import Calibration
from kvsim.cli.tables.formats import new_table, seconds
from kvsim.costs.profile import Coefficient, PassCosts, Profile

if TYPE_CHECKING:
    from kvsim.engines.live.calibration import ServerCalibration


def show_calibration(console: Console, c: Calibration) -> None:
    """Print the fitted coefficients with their intervals, and how well they predict."""
    p = c.profile
    table = new_table("cost", "value", "95 % interval")
    row = partial(_add_row, table)
    _add_passes(table, p)
    if p.moves is not None:
        row("moves, each compaction", p.moves.per_pass_s)
        row("moves, per run of cells", p.moves.per_run_s)
        row("moves, per cell", p.moves.per_cell_s)
    if p.host_copies is not None:
        row("a sequence to the host", p.host_copies.out_per_copy_s)
        row("a sequence to the host, per run of cells", p.host_copies.out_per_run_s)
        row("a sequence to the host, per cell", p.host_copies.out_per_cell_s)
        row("a sequence back from the host", p.host_copies.in_per_copy_s)
        row("a sequence back from the host, per run of cells", p.host_copies.in_per_run_s)
        row("a sequence back from the host, per cell", p.host_copies.in_per_cell_s)
    console.print(table)
    console.print("\n".join(_how_well(c)), highlight=False)
    console.print(p.describe(), style="dim", highlight=False)


def show_server_calibration(console: Console, c: ServerCalibration) -> None:
    """Print the fitted coefficients of a server's passes by regime, and how well they predict."""
    p = c.profile
    table = new_table("cost", "value", "95 % interval")
    _add_passes(table, p.decode, "decode-only: ")
    if p.mixed is not None:
        _add_passes(table, p.mixed, "mixed: ")
    if p.front_end_s is not None:
        _add_row(table, "a request, before and behind its passes (front end)", p.front_end_s)
    console.print(table)
    lines = [
        f"held-out error over {error.samples:,} {regime} steps: median {error.error_median:.1%}, "
        f"P95 {error.error_p95:.1%}"
        for regime, error in p.held_out.items()
    ]
    ended = "the intervals were tight" if c.tight else "the time was over"
    before = f", {c.resumed:,} staircases of an earlier call included" if c.resumed else ""
    known = f": half of the kinds of steps are known to ±{c.half_width:.1%} or better" if c.half_width < 1 else ""
    lines.append(f"{p.samples:,} steps in {c.rounds:.1f} rounds of the load{before}, until {ended}{known}")
    lines.append(_reach(p))
    if c.left_out >= 0.01:
        lines.append(f"left out: {c.left_out:.0%} of the steps, since it is not certain how long they took")
    lines += [f"assumed: {line}" for line in p.assumed]
    console.print("\n".join(lines), highlight=False)
    console.print(p.describe(), style="dim", highlight=False)


def _add_row(table: Table, name: str, c: Coefficient) -> None:
    table.add_row(name, seconds(c.value), f"{seconds(c.low)} to {seconds(c.high)}")


def _add_passes(table: Table, costs: PassCosts, of: str = "") -> None:
    """Add the coefficients of passes; ``of``: of which, at the beginning of each line."""
    for low, high, slope in zip(costs.matmul_knots, costs.matmul_knots[1:], costs.matmul_slopes_s, strict=False):
        _add_row(table, f"{of}a token more, {low} to {high} tokens", slope)
    for kernel, attention in costs.kernels.items():
        _add_row(table, f"{of}{kernel} attention, a pass of one token", attention.base_s)
        _add_row(table, f"{of}{kernel} attention, a cell for one token", attention.per_cell_s)
        knots = costs.attention_knots
        for low, high, slope in zip(knots, knots[1:], attention.further_token_s, strict=False):
            _add_row(table, f"{of}{kernel} attention, that cell for a token more, {low} to {high} tokens", slope)
        if attention.tiles_from:
            large = f"of a chunk of {attention.tiles_from} tokens or more"
            _add_row(table, f"{of}{kernel} attention, a cell {large}, for one token", attention.tiled_cell_s)
            _add_row(table, f"{of}{kernel} attention, that cell for a token more", attention.tiled_token_s)
        _add_row(table, f"{of}{kernel} attention, a chunk", attention.per_chunk_s)
        _add_row(table, f"{of}{kernel} attention, a run of cells", attention.per_run_s)


def _reach(p: Profile) -> str:
    return f"measured up to {p.tokens.high:,} tokens in a pass, and {p.cells.high:,} cells for a token"


def _how_well(c: Calibration) -> list[str]:
    """How well the fit predicts, at what pace, and how much was measured."""
    p = c.profile
    lines = [
        f"held-out error over {p.held_out_samples:,} forward passes: median {p.held_out_error_median:.1%}, "
        f"P95 {p.held_out_error_p95:.1%}"
    ]
    if p.pace is not None and p.held_out_error_median_without_pace is not None:
        lines.append(
            f"the machine's pace was {p.pace.p5:.2f} to {p.pace.p95:.2f} of its median (P5 to P95); without dividing "
            f"by it the median error is {p.held_out_error_median_without_pace:.1%}"
        )
    ended = "the intervals were tight" if c.tight else "the time was over"
    before = f", {c.resumed:,} measurements of an earlier call included" if c.resumed else ""
    known = f": half of the passes are known to ±{c.half_width:.1%} or better" if c.half_width < 1 else ""
    lines.append(f"every pass was measured {c.rounds:.1f} times on average{before}, until {ended}{known}")
    lines.append(_reach(p))
    if c.left_out >= 0.01:
        lines.append(f"left out: {c.left_out:.0%} of the measurements, during which other work had the processor")
    return lines
