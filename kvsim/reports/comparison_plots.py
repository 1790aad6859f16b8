"""Figures of comparisons, of cells over time, and of prefix caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.model.storage_types import format_size
from kvsim.reports import style
from kvsim.reports.formats import LATENCIES
from kvsim.simulation.result import Result

if TYPE_CHECKING:
    from kvsim.experiments.comparison import Comparison
    from kvsim.experiments.prefix_cache import PrefixStudy


_LINES = 8
"""Maximum number of policies whose lines can be distinguished in one panel."""


def comparison_figure(comparison: Comparison) -> Figure:
    """Draw the distributions of TTFT and end-to-end latency, and cells used and fragmentation over time.

    Up to eight policies are drawn as lines, more as rows.
    """
    results = comparison.results
    few = len(results) <= _LINES
    width, height = (12, 8) if few else (13, 1.5 + 0.5 * len(results))
    with style.figure(width, height, "notebook" if few else "paper") as figure:
        (ttft, e2e), (used, holes) = figure.subplots(2, 2)
        draw_latency, draw_share = (_ecdf, _lines) if few else (_ranges, _heat)
        draw_latency(ttft, results, "ttft_s", "Time to first token")
        draw_latency(e2e, results, "e2e_s", "End-to-end latency")
        draw_share(used, results, "utilization", "Cells that hold a token, share of the cache")
        draw_share(holes, results, "external_fragmentation", "External fragmentation, share of free cells out of reach")
        if few:
            style.legend_below(figure, used, 4)
        scenario, n_requests = comparison.scenario, len(results[0].requests)
        title = f"{scenario.name}: {n_requests} requests, {scenario.cache.cells} cells, seed {scenario.seed}"
        figure.suptitle(title + "\n", fontsize=14)
        figure.text(0.5, 1 - 0.36 / figure.get_figheight(), comparison.profile, ha="center", fontsize=8, color="0.4")
    return figure


def _ecdf(axis: Axes, results: Sequence[Result], measure: str, title: str) -> None:
    completed = pd.concat(
        [r.requests[r.requests["status"] == "completed"].assign(policy=r.policy) for r in results], ignore_index=True
    )
    if len(completed):
        palette = style.palette(r.policy for r in results)
        sns.ecdfplot(completed, x=measure, hue="policy", palette=palette, ax=axis, legend=False)
    axis.set(title=title, xlabel="seconds", ylabel="share of completed requests")
    axis.set_xlim(left=0)


def _ranges(axis: Axes, results: Sequence[Result], measure: str, title: str) -> None:
    """P50, P95 and P99, with a row per policy, on a logarithmic axis."""
    for row, result in enumerate(results):
        quantiles = [result.summary[measure][x] for x in ("p50", "p95", "p99")]
        if None in quantiles:
            continue
        axis.plot(quantiles, [row] * 3, color="0.6", linewidth=1.2, zorder=1)
        for value, marker, colour in zip(quantiles, "o|x", sns.color_palette("colorblind", 3), strict=True):
            axis.scatter(value, row, marker=marker, color=colour, s=36, zorder=2)
    axis.set(title=f"{title}: P50 (dot), P95 (bar), P99 (cross)", xlabel="seconds", xscale="log")
    axis.set_yticks(range(len(results)), [result.policy for result in results])
    axis.invert_yaxis()


def _lines(axis: Axes, results: Sequence[Result], share: str, title: str) -> None:
    for result, colour in zip(results, style.colours(len(results)), strict=True):
        smooth = _smooth(result.cache["time_s"], result.cache[share])
        axis.plot(smooth.index, smooth, color=colour, label=result.policy, linewidth=1.4)
    axis.set(title=title, xlabel="simulated seconds", ylabel="share", ylim=(-0.02, 1.02))


def _heat(axis: Axes, results: Sequence[Result], share: str, title: str, columns: int = 200) -> None:
    """A row per policy over time, dark where the share is high."""
    end = max(float(result.cache["time_s"].iloc[-1]) for result in results) or 1.0
    at = (np.arange(columns) + 0.5) * end / columns
    rows = np.full((len(results), columns), np.nan)
    for row, result in enumerate(results):
        smooth = _smooth(result.cache["time_s"], result.cache[share], columns)
        lasts = at <= float(result.cache["time_s"].iloc[-1])
        rows[row, lasts] = np.interp(at[lasts], smooth.index.to_numpy(dtype=float), smooth.to_numpy())
    image = axis.imshow(
        rows,
        aspect="auto",
        interpolation="nearest",
        extent=(0, end, len(results) - 0.5, -0.5),
        vmin=0,
        vmax=1,
        cmap="rocket_r",
    )
    axis.set(title=title, xlabel="simulated seconds")
    axis.set_yticks(range(len(results)), [result.policy for result in results])
    axis.grid(visible=False)
    axis.figure.colorbar(image, ax=axis, shrink=0.9)


def cell_maps_figure(results: Sequence[Result]) -> Figure:
    """Draw the cells of each policy across and time down: a colour per sequence, white for free cells."""
    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    with mpl.rc_context(sns.plotting_context("notebook" if len(results) == 1 else "paper")):
        size = (9, 6) if len(results) == 1 else (3.6 * columns, 2.9 * rows)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(results) :]:
            axis.set_visible(False)
        for axis, result in zip(axes.flat, results, strict=False):
            picture, end = _picture(result)
            axis.imshow(
                picture, aspect="auto", interpolation="nearest", extent=(0, result.frames[0].owners.size, end, 0)
            )
            summary = result.summary["cache"]
            fragmented = summary["external_fragmentation_mean"]
            note = (
                "" if fragmented is None else f"fragmentation {fragmented:.0%}, moved {summary['moved_cells']:,} cells"
            )
            if result.summary["host"]["most_bytes"]:
                note += f"\nhost cache at most {format_size(result.summary['host']['most_bytes'])}"
            axis.set_title(f"{result.policy}\n{note}", fontsize=9 if len(results) > 1 else 12)
            axis.tick_params(labelsize=7 if len(results) > 1 else 10)
        figure.supxlabel("cell", fontsize=10)
        figure.supylabel("simulated seconds", fontsize=10)
        title = "which slot holds each cell (a colour per slot, white if free)"
        figure.suptitle(f"{results[0].summary['scenario']}: {title}", fontsize=12)
    return figure


def _picture(result: Result, rows: int = 500, columns: int = 1024) -> tuple[NDArray[np.float64], float]:
    """Pixels of shape (rows, columns or fewer, 3), and the time at the lower edge in seconds.

    A row shows the state at its time; if several cells share a pixel, one of them is shown.
    """
    times = np.array([frame.time_s for frame in result.frames])
    end = float(result.cache["time_s"].iloc[-1]) or 1.0
    shown = np.searchsorted(times, (np.arange(rows) + 0.5) * end / rows, side="right") - 1
    frames = np.stack([frame.owners for frame in result.frames])[np.maximum(shown, 0)]
    frames[shown < 0] = -1
    picked = np.linspace(0, frames.shape[1] - 1, min(columns, frames.shape[1])).astype(int)
    owners = frames[:, picked]
    palette = np.array([(1.0, 1.0, 1.0), *sns.color_palette("husl", max(int(owners.max()) + 1, 1))])
    return palette[owners + 1], end


def prefix_figure(study: PrefixStudy) -> Figure:
    """Draw hit rate over cache size, with a line per eviction policy, the infinite cache and the working set."""
    with style.figure(10, 6) as figure:
        axis = figure.subplots()
        names = list(dict.fromkeys(study.table["eviction"]))
        palette = style.palette(names)
        sns.lineplot(
            study.table,
            x="blocks",
            y="hit_rate",
            hue="eviction",
            style="eviction",
            markers=True,
            dashes=False,
            palette=palette,
            markersize=7,
            ax=axis,
        )
        infinite = study.infinite or 0.0
        axis.axhline(infinite, color="0.35", linestyle="--", linewidth=1.2)
        axis.annotate(
            f"infinite cache: {infinite:.1%}",
            (0.01, infinite),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            color="0.35",
        )
        top = max(infinite, float(study.table["hit_rate"].max()))
        axis.set(
            xscale="log",
            ylim=(0, 1.12 * top or 1),
            ylabel="hit rate, share of the prompt tokens",
            xlabel=f"cache size, blocks of {study.block_size} tokens",
        )
        for at, (eviction, blocks) in enumerate((e, n) for e, n in study.knees.items() if e in ("lru", "belady")):
            axis.axvline(blocks, color=palette[eviction], linestyle=":", linewidth=1.6)
            axis.annotate(
                f"working set of {eviction}:\n{blocks:,} blocks",
                (blocks, 0.02 + 0.09 * at),
                xycoords=("data", "axes fraction"),
                xytext=(-6, 0),
                textcoords="offset points",
                ha="right",
                fontsize=10,
                color=palette[eviction],
            )
        axis.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axis.legend(title="eviction", loc="lower right", frameon=True)
        blocks = 0 if study.reuse is None else study.reuse.blocks
        axis.set_title(f"{study.scenario}: prefix hits of {study.requests:,} requests, {blocks:,} blocks looked up")
    return figure


def _smooth(times: pd.Series[float], values: pd.Series[float], points: int = 300) -> pd.Series[float]:
    """Time-weighted means over intervals of equal length, so that a long run stays readable."""
    end = float(times.iloc[-1])
    if len(times) <= points or end <= 0:
        return pd.Series(values.to_numpy(), index=times.to_numpy())
    lasted = times.diff().shift(-1).fillna(0.0)
    bins = (times / end * points).astype(int).clip(upper=points - 1)
    weight = lasted.groupby(bins).sum()
    mean = (values * lasted).groupby(bins).sum() / weight.where(weight > 0)
    mean.index = (mean.index + 0.5) * (end / points)
    return mean.dropna()


def latency_ranges(runs: list[dict[str, Any]]) -> Figure:
    """P50, P95 and P99 of each latency, with a row per policy; tall rather than wide, for small screens."""
    rows = [
        {"policy": run["policy"], "measure": name, "quantile": x.upper(), "ms": 1e3 * run[key][x]}
        for run in runs
        for key, name in LATENCIES.items()
        for x in ("p50", "p95", "p99")
        if run[key][x] is not None
    ]
    table = pd.DataFrame(rows, columns=["policy", "measure", "quantile", "ms"])
    names = [run["policy"] for run in runs]
    with style.figure(7.5, 3 * (0.9 + 0.27 * len(names))) as figure:
        for axis, name in zip(figure.subplots(3), LATENCIES.values(), strict=True):
            part = table[table["measure"] == name]
            sns.lineplot(part, x="ms", y="policy", units="policy", estimator=None, color="0.75", sort=False, ax=axis)
            sns.scatterplot(
                part,
                x="ms",
                y="policy",
                hue="quantile",
                style="quantile",
                palette="colorblind",
                s=55,
                zorder=3,
                ax=axis,
            )
            axis.set(title=name, xlabel="milliseconds" if name == "end to end" else "", ylabel="", xscale="log")
            style.plain_log(axis.xaxis, part["ms"])
            axis.set_ylim(len(names) - 0.5, -0.5)
            if axis.get_legend() is not None:
                handles, labels = axis.get_legend_handles_labels()
                axis.get_legend().remove()
        # Above the axes: in them it would cover the line of a policy.
        if len(table):
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure
