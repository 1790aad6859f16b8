"""Pictures of sweeps, and of the trade between latency and memory; drawn without any window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.sweep_file import Span, SweepPlan

_MOST_PANELS = 6
_WIDE = 16.0
"""Largest over smallest value of an axis from which on it is drawn on a logarithmic scale."""


def sweep_figure(table: pd.DataFrame, plan: SweepPlan, measure: str) -> Figure:
    """A measure over the axes, a colour for each policy, intervals where there are several replications.

    A grid of one axis is one panel; of two or three, a panel for each value of the others, if they are few. Other
    designs, and larger grids, are drawn once over each axis, every point a dot.
    """
    drawn = table[table[measure].notna()] if len(table) else table
    numeric = [key for key in plan.axes if pd.api.types.is_numeric_dtype(table[key])]
    across = max(numeric or plan.axes, key=lambda key: table[key].nunique(), default=None)
    others = [key for key in plan.axes if key != across]
    columns, rows = [*others, None, None][:2]
    few = all(table[key].nunique() <= _MOST_PANELS for key in others)
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        if plan.file.design == "grid" and len(plan.axes) <= 3 and few:
            figure = _panels(drawn, plan, measure, across, columns, rows)
        else:
            figure = _dots(drawn, plan, measure)
        figure.suptitle(f"{plan.name}: {measure}{_unit(measure)}", fontsize=14)
    return figure


def _panels(
    table: pd.DataFrame, plan: SweepPlan, measure: str, across: str | None, columns: str | None, rows: str | None
) -> Figure:
    column_values, row_values = _values(table, columns), _values(table, rows)
    size = (3.2 + 3.4 * len(column_values), 1.6 + 3.2 * len(row_values))
    figure = Figure(figsize=(max(size[0], 7.5), size[1]), layout="constrained")
    axes = figure.subplots(len(row_values), len(column_values), squeeze=False, sharex=True, sharey=True)
    palette = _palette(plan.policies)
    for i, row in enumerate(row_values):
        for j, column in enumerate(column_values):
            axis, part = axes[i, j], table
            said = [(key, value) for key, value in ((columns, column), (rows, row)) if key is not None]
            for key, value in said:
                part = part[part[key] == value]
            axis.set_title(", ".join(f"{key} = {_said(value)}" for key, value in said), fontsize=11)
            for at, (policy, colour) in enumerate(palette.items()):
                _line(axis, part[part["policy"] == policy], measure, across, policy, colour, at)
            _scale(axis, table, across)
    axes[0, 0].set_ylabel(measure)
    _legend(figure, axes[0, 0])
    return figure


def _line(axis: Axes, part: pd.DataFrame, measure: str, across: str | None, policy: str, colour: Any, at: int) -> None:
    part = part if across is None else part.sort_values(across)
    if across is None:
        x: list[Any] = [policy] * len(part)
    elif pd.api.types.is_numeric_dtype(part[across]) and part[across].dtype != bool:
        x = part[across].tolist()
    else:
        x = [str(value) for value in part[across]]
    ends = np.abs(part[[f"{measure}_low", f"{measure}_high"]].to_numpy(dtype=float).T - part[measure].to_numpy())
    known = np.isfinite(ends).all()
    axis.errorbar(
        x,
        part[measure],
        yerr=ends if known and len(part) else None,
        color=colour,
        label=policy,
        marker="osD^vPX*"[at % 8],
        markersize=5,
        linewidth=1.4,
        elinewidth=1.0,
        capsize=2.5,
    )


def _dots(table: pd.DataFrame, plan: SweepPlan, measure: str) -> Figure:
    keys = plan.axes
    columns = min(len(keys), 3)
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(max(4.6 * columns, 7.5), 1.4 + 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, keys, strict=False):
        text = table if pd.api.types.is_numeric_dtype(table[key]) else table.astype({key: str})
        sns.scatterplot(
            text, x=key, y=measure, hue="policy", style="policy", palette=_palette(plan.policies), s=34, ax=axis
        )
        spec = plan.file.axes[key]
        if isinstance(spec, Span) and spec.scale == "log":
            axis.set_xscale("log")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    for axis in axes.flat:
        if axis.get_legend() is not None:
            axis.get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(max(len(labels), 1), 6), frameon=False)
    return figure


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(max(len(labels), 1), 6), frameon=False)


def _scale(axis: Axes, table: pd.DataFrame, across: str | None) -> None:
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
        axis.set_xticks(known, [_said(value) for value in known])
        axis.minorticks_off()


def _values(table: pd.DataFrame, key: str | None) -> list[Any]:
    return [None] if key is None or not len(table) else sorted(table[key].unique())


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) and not isinstance(value, bool) else str(value)


def _palette(policies: Sequence[str]) -> dict[str, Any]:
    colours = sns.color_palette("colorblind" if len(policies) <= 10 else "husl", len(policies))
    return dict(zip(policies, colours, strict=True))


def _unit(measure: str) -> str:
    if measure.split("_")[0] in ("ttft", "tpot", "e2e"):
        return ", seconds"
    return ", share" if measure.endswith(("share", "rate")) else ""


def pareto_figure(
    points: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]], front: Sequence[str], title: str
) -> Figure:
    """Latency against memory: of each policy (value, low, high) of both, and who is on the front."""
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(10, 6.5), layout="constrained")
        axis = figure.subplots()
        palette = _palette(list(points))
        for at, (policy, (latency, memory)) in enumerate(points.items()):
            x, y = np.array(memory) / 1e6, np.array(latency)
            axis.errorbar(
                x[0],
                y[0],
                xerr=_ends(x),
                yerr=_ends(y),
                marker="osD^vPX*"[at % 8],
                markersize=9 if policy in front else 6,
                markeredgecolor="0.1" if policy in front else "none",
                color=palette[policy],
                capsize=2.5,
                linestyle="none",
                label=policy,
            )
        ordered = sorted((points[policy][1][0] / 1e6, points[policy][0][0]) for policy in front if policy in points)
        if ordered:
            axis.step(*zip(*ordered, strict=True), where="post", color="0.4", linewidth=1, linestyle="--", zorder=0)
        axis.set(
            xlabel="MB of cells that no other sequence could take, mean over time",
            ylabel="mean end-to-end latency, seconds",
        )
        latencies = [latency[0] for latency, _ in points.values() if latency[0] > 0]
        if latencies and max(latencies) / min(latencies) > _WIDE / 2:
            axis.set_yscale("log")
            for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                ticks(mpl.ticker.FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        axis.set_title(title, fontsize=12)
        figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return figure


def _ends(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[list[float]] | None:
    value, low, high = (float(each) for each in values)
    return [[value - low], [high - value]] if math.isfinite(low) and math.isfinite(high) else None
