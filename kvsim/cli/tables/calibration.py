"""What ``kvsim calibrate`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.calibration.run import Calibration
from kvsim.cli.tables.formats import new_table, seconds
from kvsim.costs.profile import Coefficient


def show_calibration(console: Console, c: Calibration) -> None:
    """Print the fitted coefficients with their intervals, and how well they predict."""
    p = c.profile
    table = new_table("cost", "value", "95 % interval")

    def row(name: str, c: Coefficient) -> None:
        table.add_row(name, seconds(c.value), f"{seconds(c.low)} to {seconds(c.high)}")

    for low, high, slope in zip(p.matmul_knots, p.matmul_knots[1:], p.matmul_slopes_s, strict=False):
        row(f"a token more, {low} to {high} tokens", slope)
    for kernel, attention in p.kernels.items():
        row(f"{kernel} attention, a pass of one token", attention.base_s)
        row(f"{kernel} attention, a cell for one token", attention.per_cell_s)
        knots = p.attention_knots
        for low, high, slope in zip(knots, knots[1:], attention.further_token_s, strict=False):
            row(f"{kernel} attention, that cell for a token more, {low} to {high} tokens", slope)
        row(f"{kernel} attention, a chunk", attention.per_chunk_s)
        row(f"{kernel} attention, a run of cells", attention.per_run_s)
    if p.moves is not None:
        row("moves, each compaction", p.moves.per_pass_s)
        row("moves, per run of cells", p.moves.per_run_s)
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
