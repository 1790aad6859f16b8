"""Figures of request streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.reports import style
from workloads.fitting.statistics import RequestColumns, dispersion

if TYPE_CHECKING:
    from kvsim.advice.workload_fit.fit import WorkloadFit

_BINS = 60
"""Number of intervals in which arrivals are counted."""
_SHORTEST_S, _FEWEST_WINDOWS = 0.05, 12
_TENTHS = 10


def fit_figure(fit: WorkloadFit) -> Figure:
    """Draw arrivals, gaps, burstiness by window, prompts, outputs, and outputs by prompt length, in six panels."""
    both = {"stream": fit.stream, "model": fit.model}
    colours = style.palette(both)
    with style.figure(15, 8.5) as figure:
        (over_time, gaps, bursts), (prompts, outputs, joint) = figure.subplots(2, 3)
        for name, columns in both.items():
            look = {"color": colours[name], "label": name, "linestyle": "-" if name == "stream" else "--"}
            _rate(over_time, columns, **look)
            _gaps(gaps, columns, **look)
            _bursts(bursts, columns, **look)
            _share(prompts, columns.prompt_tokens, **look)
            _share(outputs, columns.output_tokens, **look)
            _joint(joint, columns, **look)
        over_time.set(title="Arrivals", xlabel="seconds", ylabel="requests/s")
        over_time.set_ylim(bottom=0)
        gaps.set(title="Gaps between arrivals", xlabel="seconds", ylabel="share that is longer")
        gaps.set(xscale="log", yscale="log")
        bursts.set(title="Burstiness: 1 is Poisson", xlabel="window, seconds", ylabel="variance over mean of arrivals")
        bursts.set(xscale="log", yscale="log")
        bursts.axhline(1, color="0.5", linewidth=1)
        prompts.set(title="Prompts", xlabel="tokens", ylabel="cumulative share", xscale="log")
        outputs.set(title="Outputs", xlabel="tokens", ylabel="cumulative share", xscale="log")
        joint.set(title="Median output by prompt length", xlabel="prompt tokens", ylabel="output tokens")
        joint.set(xscale="log")
        joint.set_ylim(bottom=0)
        style.plain_numbers(bursts.xaxis, bursts.yaxis, prompts.xaxis, outputs.xaxis, joint.xaxis)
        style.legend_below(figure, prompts, 2)
        kinds = f"{fit.section['kind']} arrivals, {fit.prompt.used['kind']} prompts, {fit.output.used['kind']} outputs"
        figure.suptitle(f"{fit.name}: {fit.statistics.requests:,} requests, and a model of them: {kinds}")
    return figure


def _rate(axis: Axes, columns: RequestColumns, **look: Any) -> None:
    if columns.duration_s > 0:
        counts, edges = np.histogram(columns.arrivals_s, bins=_BINS)
        axis.plot((edges[:-1] + edges[1:]) / 2, counts / np.diff(edges), linewidth=1.4, **look)


def _gaps(axis: Axes, columns: RequestColumns, **look: Any) -> None:
    gaps = np.sort(np.diff(columns.arrivals_s))
    gaps = gaps[gaps > 0]
    if len(gaps):
        axis.plot(gaps, 1 - np.arange(len(gaps)) / len(gaps), **look)


def _bursts(axis: Axes, columns: RequestColumns, **look: Any) -> None:
    if columns.duration_s <= 0:
        return
    longest = max(columns.duration_s / _FEWEST_WINDOWS, 2 * _SHORTEST_S)
    windows = np.geomspace(_SHORTEST_S, longest, 40)
    found = [(w, value) for w in windows.tolist() if (value := dispersion(columns.arrivals_s, w))]
    axis.plot([w for w, _ in found], [value for _, value in found], **look)


def _share(axis: Axes, tokens: np.ndarray, **look: Any) -> None:
    sns.ecdfplot(x=tokens, ax=axis, **look)


def _joint(axis: Axes, columns: RequestColumns, **look: Any) -> None:
    """Draw the median and the quartiles of the outputs in each tenth of the prompts by length."""
    order = np.argsort(columns.prompt_tokens, kind="stable")
    tenths = [part for part in np.array_split(order, _TENTHS) if len(part)]
    at = [float(np.median(columns.prompt_tokens[part])) for part in tenths]
    low, middle, high = np.array([np.quantile(columns.output_tokens[part], (0.25, 0.5, 0.75)) for part in tenths]).T
    axis.plot(at, middle, marker="o", markersize=4, **look)
    axis.fill_between(at, low, high, color=look["color"], alpha=0.12, linewidth=0)
