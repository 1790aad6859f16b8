"""Predicted measures in words."""

from __future__ import annotations

from kvsim.advice.recommend.finalists import Finalist
from kvsim.experiments.estimates import Interval
from kvsim.experiments.interval_text import with_ends


def figures(found: Finalist) -> str:
    """The bounded measures of a setting, with intervals."""
    return ", ".join(
        f"{title(bound.measure)} {spoken(found.measures.get(bound.measure), bound.is_share)}"
        for bound in found.slo.asked
    )


def spoken(interval: Interval | None, share: bool = False) -> str:
    """Format a time in seconds, or a share, with its interval."""
    if interval is None:
        return "unknown"
    if share:
        return f"{interval.value:.1%}"
    unit, scale = ("s", 1.0) if interval.value >= 1 else ("ms", 1000.0)
    return with_ends(interval, scale, f" {unit}")


def spoken_load(interval: Interval) -> str:
    """Format a multiple of the load with its interval."""
    return with_ends(interval, unit=" ×")


def title(measure: str) -> str:
    """The name of a measure."""
    if measure.endswith("_share"):
        return measure.removesuffix("_share")
    latency, statistic = measure.split("_")
    return f"{latency.upper()} {statistic if statistic == 'mean' else statistic.upper()}"
