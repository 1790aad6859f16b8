"""The figure of measured points of others: predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.reports import style

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.engines.published.validation import PublishedValidation

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
