"""Figures of recommendations: of settings, and of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.reports import style
from kvsim.reports.recommendation_report import device_name


def recommendation_figure(found: dict[str, Any]) -> Figure:
    """Draw each bounded measure divided by its limit, and the largest loads, with intervals: of what runs now and the
    defaults, and then of the finalists.

    ``found``: the object that ``--json`` prints (``Recommendation.to_dict``).
    """
    best = [*found.get("fixed", ()), *found["best"]]
    with style.figure(13, 2.2 + 0.75 * max(len(best), 1)) as figure:
        limits, loads = figure.subplots(1, 2, sharey=True)
        bounds = [bound for bound in found["slo"]["bounds"] if bound["asked"] and bound["limit"] > 0]
        colours = sns.color_palette("colorblind", max(len(bounds), 1))
        for k, bound in enumerate(bounds):
            for i, finalist in enumerate(best):
                interval = finalist["measures"].get(bound["measure"])
                if interval is not None and interval["value"] is not None:
                    y = i + 0.5 * ((k + 0.5) / len(bounds) - 0.5)
                    limits.errorbar(
                        interval["value"] / bound["limit"],
                        y,
                        xerr=_ends(interval, bound["limit"]),
                        fmt="o",
                        color=colours[k],
                        capsize=3,
                        label=bound["text"] if i == 0 else None,
                    )
        limits.axvline(1, color="black", linewidth=1, linestyle="--")
        limits.set_xlabel("predicted / limit")
        limits.set_xlim(left=0)
        limits.set_yticks(range(len(best)), [_name(each["place"], each["label"]) for each in best])
        limits.invert_yaxis()
        style.legend_below(figure, limits, 4, fontsize=11, frameon=True)
        for i, finalist in enumerate(best):
            load = finalist["sustained_load"]
            if load is not None:
                loads.barh(i, load["value"], height=0.5, color="0.75", xerr=_ends(load, 1.0), capsize=3)
        loads.axvline(1, color="black", linewidth=1, linestyle="--")
        loads.set_xlabel("largest load that meets it / this load")
        figure.suptitle(f"{found['scenario']}: {found['slo']['text']}", fontsize=14)
    return figure


def _name(place: int, label: str) -> str:
    head, _, rest = label.rpartition(", ")
    before, _, slots = head.rpartition(", ")
    return f"{f'{place}. ' if place else ''}{before},\n{slots}, {rest}"


def _ends(interval: Mapping[str, Any], scale: float) -> list[list[float]] | None:
    """Distances of an interval's ends from its estimate, for an error bar."""
    ends = (None if end is None else end / scale for end in (interval["low"], interval["high"]))
    return style.error_bar(interval["value"] / scale, *ends)


def device_comparison_figure(found: dict[str, Any]) -> Figure:
    """Draw the largest load of each device and, where prices were given, what a million output tokens cost there.

    Bars: the largest load that every replication meets; points: the mean of the replications, with its interval. A
    device without a verdict has no bar. ``found``: the object that ``--json`` prints (``DeviceComparison.to_dict``).
    """
    answers = found["devices"]
    priced = any(answer["price_per_hour"] is not None for answer in answers)
    with style.figure(13 if priced else 8, 1.8 + 0.6 * len(answers)) as figure:
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
        axes[0].set_yticks(range(len(answers)), [device_name(each) for each in answers])
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
    axis.errorbar(interval["value"], at, xerr=_ends(interval, 1.0), fmt="o", color="0.2", capsize=3)
