"""What ``kvsim recommend --verify`` prints."""

from __future__ import annotations

from rich.console import Console

from kvsim.cli.tables.formats import print_rows
from kvsim.engines.live.verification import CheckedBound, Verification
from kvsim.errors import counted


def show_verification(console: Console, done: Verification) -> None:
    """Print what was started, and each bound of the service level as it was predicted and measured."""
    sent = counted(done.requests, "request")
    console.print(
        f"\nVerified place {done.place} on {done.engine} at {done.url}: {sent} in {done.seconds:,.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    rows = [
        [
            each.bound.text or f"{each.bound.measure.removesuffix('_share')}≤{each.bound.limit:.0%}",
            _figure(each, each.predicted),
            _figure(each, each.measured),
            "yes" if each.met else "no",
        ]
        for each in done.checked
    ]
    print_rows(console, ["bound", "predicted", "measured", "met"], rows, left=("bound", "met"))
    if done.first_error is not None:
        console.print(f"the first that failed: {done.first_error}", highlight=False, markup=False, soft_wrap=True)
    verdict = "The service level was met." if done.met else "The service level was not met."
    console.print(f"[bold]{verdict}[/]", highlight=False)


def _figure(each: CheckedBound, value: float | None) -> str:
    """A time or a share, in its unit."""
    if value is None:
        return "–"
    if each.bound.is_share:
        return f"{value:.1%}"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
