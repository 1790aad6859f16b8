"""The figures of recorded servers and of points that others measured, predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from kvsim.reports import style

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.engines.published.validation import PublishedValidation
    from kvsim.engines.recordings.validation import RecordedValidation, ServerRun

_TITLES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2e_s": "End-to-end latency"}
_COLOURS = dict(zip(("measured", "predicted"), sns.color_palette("colorblind", 2), strict=True))
_ON_WHITE = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
_STYLES = {"measured": "-", "predicted": "--"}
_STEPS = {
    "decode": (False, sns.color_palette("colorblind")[0], "."),
    "prompt": (True, sns.color_palette("colorblind")[2], "^"),
}
"""Steps on the panel of the pace: whether they have a prompt, colour, mark."""
_ABOVE, _BELOW = 0.62, 0.38
"""Shares of the requests at which the curves are labelled, so that the labels lie on different heights."""


def recorded_figure(validation: RecordedValidation) -> Figure:
    """Draw a row for each recording: distributions of the latencies; requests, and the machine's pace, over time."""
    rows = len(validation.runs)
    with style.figure(20, 3.4 * rows + 0.5, "paper") as figure:
        panels = figure.subplots(rows, 6, squeeze=False)
        for axes, run in zip(panels, validation.runs, strict=True):
            for axis, (measure, title) in zip(axes, _TITLES.items(), strict=False):
                _distributions(axis, run, measure, title)
            for axis, load in zip(axes[3:5], ("running", "waiting"), strict=True):
                _over_time(axis, run, load)
            _pace(axes[5], run)
            axes[0].set_ylabel(f"{run.name}\n\nshare of requests")
        figure.suptitle("Recorded servers: measured (solid) and predicted (dashed)", fontsize=12)
    return figure


def _distributions(axis: Axes, run: ServerRun, measure: str, title: str) -> None:
    """The share of requests up to each latency."""
    scale, unit = (1e3, "ms") if run.requests[f"measured_{measure}"].median() < 1 else (1.0, "s")
    values_of = {side: run.requests[f"{side}_{measure}"].dropna().to_numpy() for side in _STYLES}
    curves = {side: np.sort(values) * scale for side, values in values_of.items()}
    for side, values in curves.items():
        if len(values):
            shares = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, shares, where="post", color=_COLOURS[side], linestyle=_STYLES[side], linewidth=1.6)
    if all(map(len, curves.values())):
        # The later curve is labelled to its right, the earlier one to its left.
        later = max(curves, key=lambda side: float(np.median(curves[side])))
        most = max(float(values[-1]) for values in curves.values())
        for side, values in curves.items():
            at = _BELOW if side == later else _ABOVE
            # Left of a curve that is near the edge, a label would leave the panel.
            right = side == later or float(np.quantile(values, at)) < most / 4
            axis.annotate(
                side,
                (float(np.quantile(values, at)), at),
                xytext=(9 if right else -9, 0),
                textcoords="offset points",
                color=_COLOURS[side],
                ha="left" if right else "right",
                va="center",
                fontsize=9,
                bbox=_ON_WHITE,
            )
    axis.set(title=title, xlabel=unit, ylim=(0, 1.02))
    axis.set_xlim(left=0)


def _over_time(axis: Axes, run: ServerRun, load: str) -> None:
    """The number of requests over time; a note where it was not recorded."""
    axis.set(title=f"Requests {load}", xlabel="seconds")
    if run.load.empty:
        _not_recorded(axis)
        return
    for side in ("measured", "predicted"):
        counts = run.load[f"{side}_{load}"]
        axis.plot(run.load["t"], counts, color=_COLOURS[side], linestyle=_STYLES[side], linewidth=1.4)
    most = max(1, int(run.load[[f"measured_{load}", f"predicted_{load}"]].to_numpy().max()))
    axis.set_ylim(-most / 5, 1.2 * most)  # The labels above and below the lines stay inside.
    axis.yaxis.set_major_locator(FixedLocator(list(MaxNLocator(5, integer=True).tick_values(0, most))[: most + 2]))
    axis.set_xlim(left=0)
    _label_lines(axis, run.load, load)


def _pace(axis: Axes, run: ServerRun) -> None:
    """How much slower than its profile the server was: the pace as a line, and the steps that were compared."""
    axis.set(title="Seconds of a step over the profile's", xlabel="seconds")
    if run.by_step.empty:
        _not_recorded(axis)
        return
    compared = run.by_step[run.by_step["compared"]]
    for name, (mixed, colour, mark) in _STEPS.items():
        steps = compared[compared["mixed"] == mixed]
        axis.plot(steps["t"], steps["took"], mark, color=colour, markersize=3, alpha=0.45, label=name, zorder=2)
    axis.plot(run.by_step["t"], run.by_step["pace"], color="black", linewidth=1.4, label="pace", zorder=3)
    low, high = np.quantile(compared["took"], [0.01, 0.99])  # One disturbed step would hide all others.
    pace = run.by_step["pace"]
    low, high = min(low, pace.min()), max(high, pace.max())
    room = max(0.1, 0.1 * (high - low))
    axis.set(xlim=(0, None), ylim=(low - room, high + 3 * room))
    axis.legend(
        loc="upper center", ncols=3, fontsize=8, frameon=False, handlelength=1.2, handletextpad=0.3, columnspacing=1.0
    )


def _not_recorded(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", va="center", color="0.4")


def _label_lines(axis: Axes, table: pd.DataFrame, load: str) -> None:
    """Name each line beside it, where the two lie furthest apart."""
    sides = {side: table[f"{side}_{load}"] for side in ("measured", "predicted")}
    apart = (sides["measured"] - sides["predicted"]).abs().to_numpy()
    edge = len(apart) // 6  # A label at the edge would leave the panel.
    at = edge + int(apart[edge : len(apart) - edge].argmax())
    above = max(sides, key=lambda side: int(sides[side].iloc[at]))
    for side, counts in sides.items():
        axis.annotate(
            side,
            (float(table["t"].iloc[at]), float(counts.iloc[at])),
            xytext=(0, 16 if side == above else -16),
            textcoords="offset points",
            color=_COLOURS[side],
            ha="center",
            va="center",
            fontsize=9,
            bbox=_ON_WHITE,
        )


_PANELS = (("ttft", "Time to first token", "ms", 1e3), ("tpot", "Time per output token", "ms", 1e3))
_RATE = ("throughput", "Output tokens/s", "tokens/s", 1.0)


def published_figure(validation: PublishedValidation) -> Figure:
    """A panel for TTFT, TPOT and throughput: a mark for each point, coloured by model; open where memory decides."""
    table = validation.table
    colours = style.palette(sorted(table["model"].unique()))
    with style.figure(15, 5.6, "paper") as figure:
        axes = figure.subplots(1, 3)
        for axis, (measure, title, unit, scale) in zip(axes, (*_PANELS, _RATE), strict=True):
            _panel(axis, table, measure, scale, colours)
            axis.set(title=title, xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        style.legend_below(figure, axes[0], 5)
        figure.suptitle(f"{len(table):,} measured points of real servers, predicted", fontsize=12)
    return figure


def _panel(axis: Axes, table: pd.DataFrame, measure: str, scale: float, colours: dict[str, style.Colour]) -> None:
    sides = [scale * table[f"{side}_{measure}"].to_numpy() for side in ("measured", "predicted")]
    both = np.concatenate(sides)
    style.within_ten_percent(axis, np.array([0.8 * both.min(), 1.25 * both.max()]), 0.25)
    decides = (table["memory"] == "decides").to_numpy()
    for model, colour in colours.items():
        of_model = (table["model"] == model).to_numpy()
        for which, face in ((of_model & ~decides, colour), (of_model & decides, "none")):
            label = model if face != "none" or not (of_model & ~decides).any() else None
            if which.any():
                axis.scatter(
                    sides[0][which],
                    sides[1][which],
                    s=16,
                    facecolors=face,
                    edgecolors=[colour],
                    linewidths=0.8,
                    label=label,
                )
    style.plain_log(axis.xaxis, both)
    style.plain_log(axis.yaxis, both)
