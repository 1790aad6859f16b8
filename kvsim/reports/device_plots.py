"""Pictures of the profiles of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from kvsim.costs.profile import Profile, Regime
from kvsim.model.memory_shapes import shape_name

if TYPE_CHECKING:
    import pandas as pd

_TITLES: dict[Regime, str] = {"decode": "decode-only passes", "mixed": "passes with a prompt"}


def device_figure(profile: Profile, held_out: pd.DataFrame) -> Figure:
    """Draw predicted against tabled or measured time of each pass that was held out, one panel for each regime."""
    regimes = [regime for regime in _TITLES if regime in set(held_out["regime"])]
    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        figure = Figure(figsize=(13, 6), layout="constrained")
        for axis, regime in zip(np.atleast_1d(figure.subplots(1, len(regimes))), regimes, strict=True):
            own = held_out[held_out["regime"] == regime]
            times = own[["measured_s", "predicted_s"]].to_numpy() * 1e3
            ends = np.array([times.min() * 0.9, times.max() * 1.1])
            axis.plot(ends, ends, color="0.4", linewidth=1)
            axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.5", alpha=0.2, linewidth=0, label="within 10 %")
            points = axis.scatter(
                times[:, 0],
                times[:, 1],
                c=own["cells"].clip(lower=1),
                norm=mpl.colors.LogNorm(),
                cmap="viridis",
                s=14,
                alpha=0.7,
                linewidth=0,
            )
            figure.colorbar(points, ax=axis, label="cells that are scanned")
            known = "measured, ms" if profile.device is None else "tabled, ms"
            axis.set(xscale="log", yscale="log", xlabel=known, ylabel="predicted, ms", xlim=ends, ylim=ends)
            error = profile.held_out[regime]
            axis.set_title(
                f"{_TITLES[regime]}: median error {error.error_median:.1%}, P95 {error.error_p95:.1%}, "
                f"{error.samples:,} held out"
            )
            axis.legend(loc="upper left", frameon=True)
            for each in (axis.xaxis, axis.yaxis):
                each.set_major_locator(mpl.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                each.set_major_formatter(mpl.ticker.FuncFormatter(lambda ms, _: f"{ms:g}"))
                each.set_minor_locator(mpl.ticker.NullLocator())
        where = "" if profile.device is None else f" on {profile.device}"
        figure.suptitle(f"{shape_name(profile.model)}{where} under {profile.engine}")
    return figure
