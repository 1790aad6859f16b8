"""The figure of a recommendation that compares devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def device_comparison_figure(found: dict[str, Any]) -> Figure:
    """Draw the largest load of each device and, where prices were given, what a million output tokens cost there.

    Bars: the largest load that every replication meets; points: the mean of the replications, with its interval. A
    device without a verdict has no bar. ``found``: the object that ``--json`` prints (``DeviceComparison.to_dict``).
    """
    answers = found["devices"]
    priced = any(answer["price_per_hour"] is not None for answer in answers)
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(13 if priced else 8, 1.8 + 0.6 * len(answers)), layout="constrained")
        axes = figure.subplots(1, 1 + priced, sharey=True, squeeze=False)[0]
        for i, answer in enumerate(answers):
            _bar(axes[0], i, answer["load"], "0.75", "no verdict" if answer["met"] is None else "none that was tried")
            if answer["mean_load"] is not None:
                _point(axes[0], i, answer["mean_load"])
            if priced:
                unknown = "no price" if answer["price_per_hour"] is None else ""
                _bar(axes[1], i, answer["cost_per_million_at_largest"], sns.color_palette("colorblind")[0], unknown)
        axes[0].axvline(1, color="black", linewidth=1, linestyle="--")
        axes[0].set_xlabel(
            "largest load that meets the service level / this load\n(bar: in every run; point: on average)"
        )
        axes[0].set_yticks(range(len(answers)), [_name(a["device"], a["tensor_parallel"]) for a in answers])
        axes[0].set_ylim(len(answers) - 0.5, -0.5)
        if priced:
            axes[1].set_xlabel("price of a million output tokens\nat the largest load in every run")
        for axis in axes:
            axis.set_xlim(left=0)
        figure.suptitle(f"{found['scenario']}, {found['model']}: {found['slo']['text']}", fontsize=14)
    return figure


def _bar(axis: Axes, at: int, value: float | None, colour: object, unknown: str) -> None:
    """A bar, or in its place why there is none."""
    if value is None:
        plain = {"facecolor": "white", "linewidth": 0, "pad": 1}
        axis.text(0, at, f" {unknown} ", va="center", color="0.4", bbox=plain)
    else:
        axis.barh(at, value, height=0.5, color=colour)


def _point(axis: Axes, at: int, interval: Mapping[str, Any]) -> None:
    """The mean of the replications, with its interval."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    ends = None if low is None or high is None else [[value - low], [high - value]]
    axis.errorbar(value, at, xerr=ends, fmt="o", color="0.2", capsize=3)


def _name(device: str, tensor_parallel: int) -> str:
    return device if tensor_parallel == 1 else f"{tensor_parallel} x {device}"
