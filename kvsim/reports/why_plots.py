"""The figure of a diagnosis by ``kvsim why``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.reports import style

if TYPE_CHECKING:
    from kvsim.advice.why.contrast import Contrast
    from kvsim.advice.why.diagnosis import Diagnosis

_BINS = 60
"""Maximum number of points along the time axis, each the mean of equally many requests."""
# The order keeps similar colours apart in the stack.
_STACK = ("queueing", "own", "batch", "context", "holes", "compaction", "transfers", "prefix", "failures", "machine")
_COLOURS = {
    **dict(zip(_STACK, sns.color_palette("colorblind", 10), strict=True)),
    "cells": (0.25, 0.25, 0.45),
    "steps": (0.55, 0.6, 0.75),
    "mapping": (0.45, 0.3, 0.25),
    "drafting": (0.75, 0.7, 0.2),
}
_LABELS = {
    "queueing": "waiting for a slot",
    "cells": "waiting for cells",
    "steps": "waiting for a step",
    "own": "own tokens",
    "batch": "others' tokens",
    "context": "useful cells",
    "holes": "other cells",
    "compaction": "compaction",
    "failures": "batch splits, preemptions",
    "prefix": "prefix misses",
    "transfers": "host copies",
    "mapping": "mapping pages",
    "drafting": "drafts",
    "machine": "the machine",
}


def why_figure(diagnosis: Diagnosis) -> Figure:
    """Draw mean latency by arrival as a stack of causes and, below, the extra time of late and of slow requests."""
    causes = [c for c in _LABELS if diagnosis.requests[f"{c}_s"].abs().max() > 0]
    with style.figure(12, 8.5) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
        _stack(figure.add_subplot(grid[0, :]), diagnosis, causes)
        left = figure.add_subplot(grid[1, 0])
        _bars(left, diagnosis, diagnosis.over_time, causes, "Last quarter over the first")
        right = figure.add_subplot(grid[1, 1], sharey=left)
        _bars(right, diagnosis, diagnosis.across, causes, "Slowest quarter over the fastest")
        right.tick_params(labelleft=False)
        kind = "measured" if diagnosis.measured else "simulated"
        figure.suptitle(f"{diagnosis.scenario} under {diagnosis.policy}: what requests spend their time on ({kind})")
    return figure


def _unit(diagnosis: Diagnosis) -> tuple[float, str]:
    """Unit of time of the figure: how many make a second, and its name."""
    return (1.0, "seconds") if diagnosis.requests["e2e_s"].mean() >= 1 else (1e3, "milliseconds")


def _stack(axis: Axes, diagnosis: Diagnosis, causes: list[str]) -> None:
    requests = diagnosis.requests
    spread = requests["arrival_s"].iloc[-1] > requests["arrival_s"].iloc[0]
    bins = np.arange(len(requests)) * min(_BINS, len(requests)) // len(requests)
    means = requests.assign(order=np.arange(1, len(requests) + 1)).groupby(bins).mean()
    at = means["arrival_s"] if spread else means["order"]
    scale, unit = _unit(diagnosis)
    # Where the machine was faster than predicted, its part is negative; only the line of the total shows that.
    heights = [scale * means[f"{cause}_s"].clip(lower=0) for cause in causes]
    colours = [_COLOURS[cause] for cause in causes]
    axis.stackplot(at, *heights, labels=[_LABELS[c] for c in causes], colors=colours, linewidth=0, alpha=0.9)
    axis.plot(at, scale * means["e2e_s"], color="0.15", linewidth=1.3, label="end-to-end latency")
    each = f", means of {len(requests) / len(means):.3g} each" if len(means) < len(requests) else ""
    if (requests["machine_s"] < 0).any():
        each += "; where the line is below the stack, the machine was faster than predicted"
    axis.set(
        xlabel="arrival, seconds" if spread else "request (all arrived at once)",
        ylabel=unit,
        title=f"{len(requests):,} completed requests{each}",
        xlim=(at.iloc[0], at.iloc[-1]),
        ylim=(0, None),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False, reverse=True)


def _bars(axis: Axes, diagnosis: Diagnosis, contrast: Contrast, causes: list[str], title: str) -> None:
    rows: pd.DataFrame = contrast.table.loc[causes]
    scale, unit = _unit(diagnosis)
    values = scale * rows["difference"].to_numpy(dtype=float)
    axis.barh([_LABELS[c] for c in causes], values, color=[_COLOURS[c] for c in causes])
    axis.axvline(0, color="0.3", linewidth=1)
    reach = max(float(np.abs(values).max()), 0.01 * scale * contrast.means_s[0])
    if contrast.slower:
        for row, (value, share) in enumerate(zip(values, rows["share"], strict=True)):
            if value > 0:
                axis.annotate(
                    f"{share:.0%}",
                    (value, row),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    ha="left",
                    fontsize=10,
                )
    else:
        title += ": not slower"
    if contrast.slower and not contrast.adds_up:
        title += " (shares of what is added)"
    low = min(0.0, float(values.min()))
    axis.set(xlim=(low - 0.18 * reach if low < 0 else 0, max(float(values.max()), 0.0) + 0.2 * reach))
    axis.set(xlabel=f"mean difference, {unit}", title=title)
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
