"""The figure of a recommendation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from kvsim.advice.recommendation import Recommendation
    from kvsim.experiments.estimates import Interval


def recommendation_figure(found: Recommendation) -> Figure:
    """Draw each bounded measure of the finalists divided by its limit, and their largest loads, with intervals."""
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(13, 2.2 + 0.75 * max(len(found.best), 1)), layout="constrained")
        limits, loads = figure.subplots(1, 2, sharey=True)
        bounds = [bound for bound in found.slo.asked if bound.limit > 0]
        colours = sns.color_palette("colorblind", max(len(bounds), 1))
        for k, bound in enumerate(bounds):
            for i, f in enumerate(found.best):
                interval = f.measures.get(bound.measure)
                if interval is not None:
                    y = i + 0.5 * ((k + 0.5) / len(bounds) - 0.5)
                    limits.errorbar(
                        interval.value / bound.limit,
                        y,
                        xerr=_ends(interval, bound.limit),
                        fmt="o",
                        color=colours[k],
                        capsize=3,
                        label=bound.text if i == 0 else None,
                    )
        limits.axvline(1, color="black", linewidth=1, linestyle="--")
        limits.set_xlabel("predicted / limit")
        limits.set_xlim(left=0)
        limits.set_yticks(range(len(found.best)), [_name(i, f.candidate.label) for i, f in enumerate(found.best, 1)])
        limits.invert_yaxis()
        if limits.get_legend_handles_labels()[0]:
            figure.legend(*limits.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=11)
        for i, f in enumerate(found.best):
            if f.sustained is not None:
                value = f.sustained.value
                loads.barh(i, value, height=0.5, color="0.75", xerr=_ends(f.sustained, 1.0), capsize=3)
        loads.axvline(1, color="black", linewidth=1, linestyle="--")
        loads.set_xlabel("largest load that meets the service level / this load")
        figure.suptitle(f"{found.scenario.name}: {found.slo.text}", fontsize=14)
    return figure


def _ends(interval: Interval, scale: float) -> list[list[float]] | None:
    """Distances of an interval's ends from its estimate, shape (2, 1); None if an end is infinite."""
    if not math.isfinite(interval.high) or not math.isfinite(interval.low):
        return None
    return [[(interval.value - interval.low) / scale], [(interval.high - interval.value) / scale]]


def _name(place: int, label: str) -> str:
    head, _, rest = label.rpartition(", ")
    before, _, slots = head.rpartition(", ")
    return f"{place}. {before},\n{slots}, {rest}"
