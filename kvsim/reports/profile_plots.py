"""Figures of profiles: predicted against measured or tabled times of passes that were held out of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.costs.profile import Profile, Regime
from kvsim.model.memory_shapes import shape_name
from kvsim.reports import style

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.calibration.run import Calibration

_TITLES: dict[Regime, str] = {"decode": "decode-only passes", "mixed": "passes with a prompt"}


def device_figure(profile: Profile, held_out: pd.DataFrame) -> Figure:
    """Draw predicted against tabled or measured time of each pass that was held out, one panel for each regime."""
    regimes = [regime for regime in _TITLES if regime in set(held_out["regime"])]
    with style.figure(13, 6) as figure:
        for axis, regime in zip(np.atleast_1d(figure.subplots(1, len(regimes))), regimes, strict=True):
            own = held_out[held_out["regime"] == regime]
            times = own[["measured_s", "predicted_s"]].to_numpy() * 1e3
            ends = np.array([times.min() * 0.9, times.max() * 1.1])
            style.within_ten_percent(axis, ends, alpha=0.2)
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
            axis.set_xlabel(known)
            error = profile.held_out[regime]
            axis.set_title(
                f"{_TITLES[regime]}: median error {error.error_median:.1%}, P95 {error.error_p95:.1%}, "
                f"{error.samples:,} held out"
            )
            axis.legend(loc="upper left", frameon=True)
            for each in (axis.xaxis, axis.yaxis):
                each.set_major_locator(mpl.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                style.plain_numbers(each)
                each.set_minor_locator(mpl.ticker.NullLocator())
        where = "" if profile.device is None else f" on {profile.device}"
        figure.suptitle(f"{shape_name(profile.model)}{where} under {profile.engine}")
    return figure


_MEASURED = ["by itself", "in a running server"]
"""How a pass was measured: alone, or within the steps of a server."""


def calibration_figure(calibration: Calibration) -> Figure:
    """Draw predicted against measured time of every held-out pass, and the distribution of the errors."""
    held_out = calibration.held_out.assign(
        error=calibration.held_out["predicted_s"] / calibration.held_out["measured_s"] - 1,
        measured=np.where(calibration.held_out["mixed"], _MEASURED[1], _MEASURED[0]),
        ms=1e3 * calibration.held_out["measured_s"],
        predicted_ms=1e3 * calibration.held_out["predicted_s"],
    )
    profile = calibration.profile
    palette = style.palette(sorted(profile.kernels))
    with style.figure(13, 6) as figure:
        against, errors = figure.subplots(1, 2, width_ratios=(3, 2))
        _predicted_against_measured(against, held_out, palette)
        _relative_errors(errors, held_out, sorted(profile.kernels))
        figure.suptitle(
            f"{profile.model}, K in {profile.type_k}, V in {profile.type_v}: median error "
            f"{profile.held_out_error_median:.1%}, P95 {profile.held_out_error_p95:.1%} "
            f"over {profile.held_out_samples:,} passes"
        )
    return figure


def _predicted_against_measured(axis: Axes, held_out: pd.DataFrame, palette: Mapping[Any, style.Colour]) -> None:
    times = held_out[["ms", "predicted_ms"]].to_numpy()
    ends = np.array([times.min() * 0.9, times.max() * 1.1])
    style.within_ten_percent(axis, ends, alpha=0.15)
    sns.scatterplot(
        held_out,
        x="ms",
        y="predicted_ms",
        hue="kernel",
        style="measured",
        palette=palette,
        style_order=_MEASURED,
        s=22,
        alpha=0.6,
        linewidth=0,
        ax=axis,
    )
    axis.set(xlabel="measured, ms", ylabel="predicted, ms", title="Forward passes that were not used in the fit")
    style.plain_numbers(axis.xaxis, axis.yaxis, minor=True)


def _relative_errors(axis: Axes, held_out: pd.DataFrame, kernels: list[str]) -> None:
    sns.boxplot(
        held_out,
        x="error",
        y="kernel",
        hue="measured",
        hue_order=_MEASURED,
        order=kernels,
        whis=(5, 95),
        showfliers=False,
        palette=["0.75", "0.92"],
        ax=axis,
    )
    axis.axvline(0, color="0.4", linewidth=1)
    axis.set(xlabel="predicted / measured − 1", ylabel="")
    axis.set_title("Relative error: median, quartiles, P5 to P95")
    axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    axis.legend(title="", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
