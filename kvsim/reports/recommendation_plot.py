"""The figure of a recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure


def recommendation_figure(found: dict[str, Any]) -> Figure:
    """Draw each bounded measure of the finalists divided by its limit, and their largest loads, with intervals.

    ``found``: the object that ``--json`` prints (``Recommendation.to_dict``).
    """
    best = found["best"]
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(13, 2.2 + 0.75 * max(len(best), 1)), layout="constrained")
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
        if limits.get_legend_handles_labels()[0]:
            figure.legend(*limits.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=11)
        for i, finalist in enumerate(best):
            load = finalist["sustained_load"]
            if load is not None:
                loads.barh(i, load["value"], height=0.5, color="0.75", xerr=_ends(load, 1.0), capsize=3)
        loads.axvline(1, color="black", linewidth=1, linestyle="--")
        loads.set_xlabel("largest load that meets the service level / this load")
        figure.suptitle(f"{found['scenario']}: {found['slo']['text']}", fontsize=14)
    return figure


def _ends(interval: Mapping[str, Any], scale: float) -> list[list[float]] | None:
    """Distances of an interval's ends from its estimate, shape (2, 1); None if an end is infinite."""
    if interval["high"] is None or interval["low"] is None:
        return None
    return [[(interval["value"] - interval["low"]) / scale], [(interval["high"] - interval["value"]) / scale]]


def _name(place: int, label: str) -> str:
    head, _, rest = label.rpartition(", ")
    before, _, slots = head.rpartition(", ")
    return f"{place}. {before},\n{slots}, {rest}"
