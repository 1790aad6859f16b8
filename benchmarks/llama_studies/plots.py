"""Pictures of the llama.cpp studies, with the same figures from another machine for comparison.

The other machine ran llama.cpp b4875 (llama-cpp-python 0.3.8) with SmolLM2-135M in Q4_1 on one thread of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.reports import style

if TYPE_CHECKING:
    from benchmarks.llama_studies.results import Defragmentation, Holes, KShift, LlamaStudy

OTHER_MACHINE_S: dict[str, dict[int, float]] = {
    "holes": {160: 12.2e-3, 512: 13.2e-3, 1024: 15.6e-3, 2048: 20.1e-3, 4096: 26.5e-3},
    "holes, flash attention": {160: 11.3e-3, 4096: 12.6e-3},
    "defragmentation": {0: 0.42e-3},
    "shift": {256: 2.7e-3, 1024: 9.0e-3, 4096: 34e-3},
}
"""Seconds. Holes: of a decode, by the cells attended to; with flash attention the lowest and highest over that range.
Defragmentation: of a pass that moves nothing. Shift: by cells of the cache."""
OTHER_MACHINE_PER_CELL_S = (5e-6, 6e-6)
"""For each cell moved in one long run, lowest and highest."""
OTHER_MACHINE_PER_RUN_S = (150e-6, 165e-6)
"""For each one-cell run moved, lowest and highest."""

_OTHER_MACHINE = "elsewhere (b4875)"


def holes_figure(study: Holes, axis: Axes | None = None) -> Figure:
    """Milliseconds of a decode over the span, high and low, for both kernels; on ``axis`` or a new figure."""
    with style.figure(8, 5.5) as new:
        axis = axis or new.subplots()
        colours = sns.color_palette("colorblind", 2)
        intervals = study.medians.intervals(lambda medians: 1e3 * medians)
        for flash, rows in study.table.groupby("flash_attention"):
            for place, line in (("high", "-o"), ("low", "--s")):
                found = [intervals[study.medians.index_of(flash, span, place)] for span in rows["span"]]
                ms = np.array([[each.value, each.low, each.high] for each in found]).T
                axis.errorbar(
                    rows["span"],
                    ms[0],
                    yerr=np.abs(ms[1:] - ms[0]),
                    fmt=line,
                    color=colours[int(bool(flash))],
                    mfc=None if place == "high" else "white",
                    capsize=3,
                    label=f"{place}, {'with' if flash else 'without'} flash attention",
                )
        there = OTHER_MACHINE_S["holes"]
        axis.plot(list(there), _ms(there.values()), ":x", color="0.4", label=f"high, without, {_OTHER_MACHINE}")
        there = OTHER_MACHINE_S["holes, flash attention"]
        axis.fill_between(
            [min(there), max(there)],
            *_ms(there.values()),
            color="0.6",
            alpha=0.4,
            linewidth=0,
            label=f"with, {_OTHER_MACHINE}",
        )
        axis.set(xlabel="span: cells up to the highest used one", ylabel="a decode, ms", ylim=(0, None))
        axis.legend(frameon=True, fontsize=9)
        axis.set_title(_title(study))
    figure = axis.get_figure()
    assert figure is not None
    return figure.figure


def defragmentation_figure(study: Defragmentation) -> Figure:
    """Milliseconds of a pass: over the cells of one run, and over the number of one-cell runs; with the fit."""
    with style.figure(12, 5) as figure:
        long, many = figure.subplots(1, 2)
        table, colour = study.table, sns.color_palette("colorblind", 1)[0]
        single = table[table["runs"] == table["cells"]]
        for axis, x, own in ((long, "cells", table[table["runs"] == 1]), (many, "runs", single)):
            own = own.sort_values(x)
            for fitted, rows in own.groupby("in_fit", sort=False):
                label, fill = ("measured", colour) if fitted else ("measured, not in the fit", "white")
                axis.errorbar(rows[x], *_ms_and_errors(rows), fmt="o", color=colour, mfc=fill, capsize=3, label=label)
            axis.plot(own[x], _ms(own["fitted_s"]), color=colour, linewidth=1.2, label="the fit")
        base = OTHER_MACHINE_S["defragmentation"][0]
        for axis, costs in ((long, OTHER_MACHINE_PER_CELL_S), (many, OTHER_MACHINE_PER_RUN_S)):
            ends = np.array([0.0, axis.get_xlim()[1]])
            between = [_ms(base + cost * ends) for cost in costs]
            axis.fill_between(ends, *between, color="0.6", alpha=0.4, linewidth=0, label=_OTHER_MACHINE)
            axis.set(xlim=(0, ends[1]), ylim=(0, None), ylabel="a pass, ms")
            axis.legend(frameon=True, loc="upper left")
        long.set(xlabel="cells", title="one run, by its cells")
        many.set(xlabel="runs", title="runs of one cell each")
        figure.suptitle(f"One pass of defragmentation: {_title(study)}")
    return figure


def k_shift_figure(study: KShift) -> Figure:
    """Milliseconds of a shift over the cells of the cache."""
    with style.figure(8, 5) as figure:
        axis = figure.subplots()
        table, there = study.table, OTHER_MACHINE_S["shift"]
        colour = sns.color_palette("colorblind", 1)[0]
        axis.errorbar(table["cells"], *_ms_and_errors(table), fmt="-o", color=colour, capsize=3, label="measured")
        axis.plot(list(there), _ms(there.values()), ":x", color="0.4", label=_OTHER_MACHINE)
        axis.set(xlabel="cells of the cache", ylabel="a K-shift, ms", xlim=(0, None), ylim=(0, None))
        axis.legend(frameon=True)
        axis.set_title(f"{study.tokens} tokens shifted: {_title(study)}")
    return figure


def _title(study: LlamaStudy) -> str:
    threads = "1 thread" if study.threads == 1 else f"{study.threads} threads"
    return f"{study.library}, {study.model}, {threads}{study.busy_warning}"


def _ms(seconds: Iterable[float]) -> NDArray[np.float64]:
    return 1e3 * np.array(list(seconds))


def _ms_and_errors(table: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Milliseconds of shape (n,), and error bars down and up of shape (2, n)."""
    value, low, high = (_ms(table[name]) for name in ("seconds", "low", "high"))
    return value, np.array([value - low, high - value])
