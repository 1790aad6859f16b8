"""Figures of sweeps, and of latency against memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from kvsim.experiments.measures import is_latency
from kvsim.experiments.ranking import BOUND
from kvsim.experiments.sweep_design import Span
from kvsim.experiments.sweep_file import SweepFile
from kvsim.reports import style

_MOST_PANELS = 6
_MARKERS = "osD^vPX*"
_WIDE = 16.0
"""Ratio of an axis's largest to smallest value from which its scale is logarithmic."""
_LETTER_IN = 0.1
"""Maximum width of a letter of a tick label, in inches."""


def sweep_figure(table: pd.DataFrame, file: SweepFile, measures: Sequence[str]) -> Figure:
    """Draw measures of a table (``SweepResult.table``) over the axes, with a colour per policy and intervals.

    For each measure a grid of one axis takes one panel; a grid of two or three has a panel for each value of the other
    axes, if they have few values. Other designs and larger grids are drawn as points over each axis in turn. Points
    with failed requests are hollow.
    """
    drawn = {measure: table[table[measure].notna()] if len(table) else table for measure in measures}
    keys, palette = list(file.axes), style.palette(list(dict.fromkeys(table["policy"])))
    numeric = [key for key in keys if pd.api.types.is_numeric_dtype(table[key])]
    across = max(numeric or keys, key=lambda key: table[key].nunique(), default=None)
    others = [key for key in keys if key != across]
    columns, rows = [*others, None, None][:2]
    few = all(table[key].nunique() <= _MOST_PANELS for key in others)
    grid = file.design == "grid" and len(keys) <= 3 and few
    width, height = _panels_size(table, columns, rows) if grid else _dots_size(len(keys))
    # Measures with a single panel stand side by side, others one above the other.
    beside = 2 if len(measures) > 1 and grid and columns is None else 1
    with style.figure(width * beside, height * -(-len(measures) // beside)) as figure:
        for measure, part in zip(measures, _parts(figure, len(measures), beside), strict=False):
            if grid:
                _panels(part, width, drawn[measure], palette, measure, across, columns, rows)
            else:
                _dots(part, drawn[measure], file, palette, measure)
            if len(measures) > 1:
                part.suptitle(f"{measure}{_unit(measure)}", fontsize=12)
                for axis in part.axes:
                    axis.set_ylabel("")  # The title says it.
            _spread(part.axes, drawn[measure][measure])
        style.legend_below(figure, figure.axes[0], 6)
        hollow = "; hollow: requests failed" if any(_failed(each).any() for each in drawn.values()) else ""
        what = f": {measures[0]}{_unit(measures[0])}" if len(measures) == 1 else ""
        figure.suptitle(f"{file.name}{what}{hollow}", fontsize=14)
    return figure


def _parts(figure: Figure, n: int, beside: int) -> list[Figure | SubFigure]:
    """A part of the figure for each of ``n`` measures; the whole of it for a single one."""
    if n == 1:
        return [figure]
    return list(figure.subfigures(-(-n // beside), beside, squeeze=False).flat)


def _spread(axes: Iterable[Axes], values: pd.Series[float]) -> None:
    """Make the vertical axes logarithmic if the values spread widely."""
    if not _is_wide(values):
        return
    for axis in axes:
        axis.set_yscale("log")
        # An interval that reaches down to 0 would squeeze everything else.
        axis.set_ylim(values.min() / 2, values.max() * 2)
        style.plain_log(axis.yaxis, values)


def _panels_size(table: pd.DataFrame, columns: str | None, rows: str | None) -> tuple[float, float]:
    """Width and height of a grid of panels, in inches."""
    return max(3.2 + 3.4 * len(_values(table, columns)), 7.5), 1.6 + 3.2 * len(_values(table, rows))


def _dots_size(n_axes: int) -> tuple[float, float]:
    """Width and height of a panel for each axis, in inches."""
    return max(4.6 * min(n_axes, 3), 7.5), 1.4 + 3.6 * -(-n_axes // 3)


def _panels(
    figure: Figure | SubFigure,
    width: float,
    table: pd.DataFrame,
    palette: dict[str, Any],
    measure: str,
    across: str | None,
    columns: str | None,
    rows: str | None,
) -> None:
    column_values, row_values = _values(table, columns), _values(table, rows)
    room = (width - 1.0) / len(column_values)
    axes = figure.subplots(len(row_values), len(column_values), squeeze=False, sharex=True, sharey=True)
    for i, row in enumerate(row_values):
        for j, column in enumerate(column_values):
            axis, part = axes[i, j], table
            fixed = [(key, value) for key, value in ((columns, column), (rows, row)) if key is not None]
            for key, value in fixed:
                part = part[part[key] == value]
            axis.set_title(", ".join(f"{key} = {_label(value)}" for key, value in fixed), fontsize=11)
            for at, (policy, colour) in enumerate(palette.items()):
                _line(axis, part[part["policy"] == policy], measure, across, policy, colour, at)
            _scale(axis, table, across, room)
    axes[0, 0].set_ylabel(measure)


def _line(axis: Axes, part: pd.DataFrame, measure: str, across: str | None, policy: str, colour: Any, at: int) -> None:
    part = part if across is None else part.sort_values(across)
    if across is None:
        x: list[Any] = [policy] * len(part)
    elif pd.api.types.is_numeric_dtype(part[across]) and part[across].dtype != bool:
        x = part[across].tolist()
    else:
        x = [str(value) for value in part[across]]
    ends = None
    if f"{measure}_low" in part.columns:  # A flag has no interval.
        ends = np.abs(part[[f"{measure}_low", f"{measure}_high"]].to_numpy(dtype=float).T - part[measure].to_numpy())
    marker = _MARKERS[at % len(_MARKERS)]
    axis.errorbar(
        x,
        part[measure],
        yerr=ends if ends is not None and np.isfinite(ends).all() and len(part) else None,
        color=colour,
        label=policy,
        marker=marker,
        markersize=5,
        linewidth=1.4,
        elinewidth=1.0,
        capsize=2.5,
    )
    failed = _failed(part).tolist()
    x_failed = [value for value, hollow in zip(x, failed, strict=True) if hollow]
    axis.plot(x_failed, part[measure][failed], marker, markersize=6, markerfacecolor="white", color=colour, zorder=5)


def _dots(
    figure: Figure | SubFigure, table: pd.DataFrame, file: SweepFile, palette: dict[str, Any], measure: str
) -> None:
    keys = list(file.axes)
    columns = min(len(keys), 3)
    rows = -(-len(keys) // columns)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, keys, strict=False):
        text = table if pd.api.types.is_numeric_dtype(table[key]) else table.astype({key: str})
        markers = {policy: _MARKERS[at % len(_MARKERS)] for at, policy in enumerate(palette)}
        sns.scatterplot(
            text, x=key, y=measure, hue="policy", style="policy", palette=palette, markers=markers, s=34, ax=axis
        )
        for policy, part in text[_failed(text)].groupby("policy", sort=False):
            look = {"marker": markers[str(policy)], "edgecolor": palette[str(policy)]}
            axis.scatter(part[key], part[measure], s=34, facecolor="white", zorder=5, **look)
        spec = file.axes[key]
        if isinstance(spec, Span) and spec.scale == "log":
            axis.set_xscale("log")
    for axis in axes.flat:
        if axis.get_legend() is not None:
            axis.get_legend().remove()


def _failed(table: pd.DataFrame) -> pd.Series[bool]:
    """Mask of the points where requests or whole runs failed."""
    return (table["failed_share"] > 0) | (table["failed"] > 0)


def _is_wide(values: pd.Series[float]) -> bool:
    return bool(len(values)) and values.min() > 0 and bool(values.max() / values.min() > style.NARROW)


def _scale(axis: Axes, table: pd.DataFrame, across: str | None, room: float) -> None:
    """Set the scale and ticks of the horizontal axis, which is ``room`` inches wide."""
    if across is None:
        axis.tick_params(axis="x", rotation=30)
        return
    axis.set_xlabel(across)
    values = table[across]
    if not pd.api.types.is_numeric_dtype(values) or values.dtype == bool or not len(values):
        return
    if values.min() > 0 and values.max() / values.min() >= _WIDE:
        axis.set_xscale("log")
    known = sorted(values.unique())
    if len(known) <= 8:
        axis.set_xticks(known, [_label(value) for value in known])
        axis.minorticks_off()
        at = np.log(known) if axis.get_xscale() == "log" else np.array(known, dtype=float)
        # Labels at the ends extend into the neighbouring panels.
        between = room * np.diff(at).min() / max(float(np.ptp(at)), 1e-300) if len(at) > 1 else room
        beyond = _LETTER_IN * (2 + len(_label(known[0])) + len(_label(known[-1]))) / 2 > 0.09 * room
        if beyond or between < _LETTER_IN * (2 + max(len(_label(value)) for value in known)):
            axis.tick_params(axis="x", rotation=90 if between < 4 * _LETTER_IN else 45)


def _values(table: pd.DataFrame, key: str | None) -> list[Any]:
    return [None] if key is None or not len(table) else sorted(table[key].unique())


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) and not isinstance(value, bool) else str(value)


def _unit(measure: str) -> str:
    if is_latency(measure):
        return ", seconds"
    return ", share" if measure.endswith(("share", "rate")) else ""


def pareto_figure(
    points: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]],
    front: Sequence[str],
    title: str,
    failing: Sequence[str] = (),
) -> Figure:
    """Draw latency against memory: (value, low, high) of both for each policy, and the Pareto front.

    ``failing``: policies that failed requests, drawn hollow.
    """
    with style.figure(10, 6.5) as figure:
        axis = figure.subplots()
        palette = style.palette(list(points))
        for at, (policy, (latency, memory)) in enumerate(points.items()):
            x, y = np.array(memory) / 1e6, np.array(latency)
            axis.errorbar(
                x[0],
                y[0],
                xerr=style.error_bar(*x.tolist()),
                yerr=style.error_bar(*y.tolist()),
                marker=_MARKERS[at % len(_MARKERS)],
                markersize=9 if policy in front else 6,
                markeredgecolor="0.1" if policy in front else palette[policy],
                markerfacecolor="white" if policy in failing else palette[policy],
                color=palette[policy],
                capsize=2.5,
                linestyle="none",
                label=policy,
            )
        ordered = sorted((points[policy][1][0] / 1e6, points[policy][0][0]) for policy in front if policy in points)
        if ordered:
            axis.step(*zip(*ordered, strict=True), where="post", color="0.4", linewidth=1, linestyle="--", zorder=0)
        axis.set(
            xlabel="KV memory, MB: cells that no other sequence could take, mean over time",
            ylabel="mean end-to-end latency, seconds",
        )
        latencies = [latency[0] for latency, _ in points.values() if latency[0] > 0]
        if latencies and max(latencies) / min(latencies) > _WIDE / 2:
            axis.set_yscale("log")
            style.plain_log(axis.yaxis, latencies)
        figure.suptitle(title, fontsize=13)
        axis.set_title(_legend_text(points, front, failing), fontsize=10, loc="left")
        if points:
            figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return figure


def _legend_text(points: Mapping[str, Any], front: Sequence[str], failing: Sequence[str]) -> str:
    """Explanation of the markers and lines that the Pareto figure has."""
    without = "" if set(front) & set(failing) else " without failed requests"
    lines = [f"dashed: policies{without} that no other beats in both"] if front else []
    lines += ["hollow: failed requests"] if any(policy in points for policy in failing) else []
    lines += [f"the {BOUND} is a bound and not part of the front"] if BOUND in points else []
    return "\n".join(filter(None, ("; ".join(lines[:2]), "; ".join(lines[2:]))))
