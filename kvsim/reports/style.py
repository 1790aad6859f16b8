"""What all figures share: their look, colours, intervals and the labels of their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure

Colour = tuple[float, float, float]

NARROW = 10**1.5
"""Ratio of largest to smallest value up to which a logarithmic axis has ticks at 1, 2 and 5."""


@contextmanager
def figure(width: float, height: float, context: str = "notebook", style: str = "whitegrid") -> Iterator[Figure]:
    """An empty figure of a size in inches, to be drawn on within the context."""
    with mpl.rc_context({**sns.axes_style(style), **sns.plotting_context(context)}):
        yield Figure(figsize=(width, height), layout="constrained")


def colours(n: int) -> list[Colour]:
    """Colours that can be told apart."""
    return list(sns.color_palette("colorblind" if n <= 10 else "husl", n))


def palette(names: Iterable[Any]) -> dict[Any, Colour]:
    """A colour for each name."""
    names = list(names)
    return dict(zip(names, colours(len(names)), strict=True))


def error_bar(value: float, low: float | None, high: float | None) -> list[list[float]] | None:
    """Distances of an interval's ends from its estimate, shape (2, 1); None if an end is unknown or infinite."""
    if low is None or high is None or not math.isfinite(low) or not math.isfinite(high):
        return None
    return [[value - low], [high - value]]


def legend_below(figure: Figure, axis: Axes, columns: int, **options: Any) -> None:
    """A legend of what an axis has, below all axes, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        columns = min(len(labels), columns)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **{"frameon": False, **options})


def plain_numbers(*axes: XAxis | YAxis, minor: bool = False) -> None:
    """Label axes with plain numbers; smaller ticks have labels only with ``minor``."""
    for axis in axes:
        axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        if not minor:
            axis.set_minor_formatter(mpl.ticker.NullFormatter())


def within_ten_percent(axis: Axes, ends: Any, alpha: float) -> None:
    """The line on which predicted and measured are equal, and a band around it."""
    axis.plot(ends, ends, color="0.4", linewidth=1)
    axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.5", alpha=alpha, linewidth=0, label="within 10 %")
    axis.set(xscale="log", yscale="log", ylabel="predicted, ms", xlim=ends, ylim=ends)


def plain_log(axis: XAxis | YAxis, values: Iterable[float]) -> None:
    """Label a logarithmic axis with plain numbers.

    The ticks are at powers of ten; at 1, 2 and 5 if the values span less than 1.5 decades or fewer than two powers of
    ten; and evenly spaced if the values span less than a factor of 6.
    """
    known = [value for value in values if value > 0]
    span = max(known) / min(known) if known else 1.0
    powers = math.floor(math.log10(max(known))) - math.ceil(math.log10(min(known))) + 1 if known else 0
    if span < 6:
        axis.set_major_locator(mpl.ticker.MaxNLocator(5))
    else:
        narrow = span < NARROW or powers < 2
        axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=12))
    plain_numbers(axis)
