"""Pictures of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from kvsim.comparison import Comparison


def comparison_figure(comparison: Comparison) -> Figure:
    """Four panels: TTFT and end-to-end latency as distributions; cells used and fragmentation over time."""
    results = comparison.results
    names = [result.policy for result in results]
    colours = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(12, 8), layout="constrained")
        (ttft, e2e), (used, holes) = figure.subplots(2, 2)
        requests = pd.concat(
            [r.requests[r.requests["status"] == "completed"].assign(policy=r.policy) for r in results],
            ignore_index=True,
        )
        for axis, measure, title in ((ttft, "ttft_s", "Time to first token"), (e2e, "e2e_s", "End-to-end latency")):
            if len(requests):
                sns.ecdfplot(requests, x=measure, hue="policy", palette=colours, ax=axis, legend=False)
            axis.set(title=title, xlabel="seconds", ylabel="share of requests")
            axis.set_xlim(left=0)
        for result in results:
            cache, colour = result.cache, colours[result.policy]
            capacity = cache["allocated"] + cache["free"]
            for axis, share in ((used, cache["stored"] / capacity), (holes, cache["external_fragmentation"])):
                smooth = _smooth(cache["time_s"], share)
                axis.plot(smooth.index, smooth, color=colour, label=result.policy, linewidth=1.4)
        used.set(
            title="Cells that hold a token", xlabel="simulated seconds", ylabel="share of the cache", ylim=(0, 1.02)
        )
        holes.set(
            title="External fragmentation",
            xlabel="simulated seconds",
            ylabel="share of free cells out of reach",
            ylim=(-0.02, 1.02),
        )
        handles, labels = used.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
        asked = f"{comparison.scenario.name}: {len(results[0].requests)} requests, seed {comparison.scenario.seed}"
        figure.suptitle(asked + "\n", fontsize=14)
        figure.text(0.5, 0.955, comparison.profile, ha="center", fontsize=8, color="0.4")
    return figure


def _smooth(times: pd.Series[float], values: pd.Series[float], points: int = 300) -> pd.Series[float]:
    """Time-weighted means over equal stretches of time, so that a long run stays readable."""
    end = float(times.iloc[-1])
    if len(times) <= points or end <= 0:
        return pd.Series(values.to_numpy(), index=times.to_numpy())
    lasted = times.diff().shift(-1).fillna(0.0)
    bins = (times / end * points).astype(int).clip(upper=points - 1)
    weight = lasted.groupby(bins).sum()
    mean = (values * lasted).groupby(bins).sum() / weight.where(weight > 0)
    mean.index = (mean.index + 0.5) * (end / points)
    return mean.dropna()
