"""Results of the llama.cpp studies: tables, fitted costs with intervals, and a summary in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.llama_studies.timing import most_runs
from kvsim import machine
from kvsim.experiments.estimates import LEVEL, Interval
from kvsim.experiments.interval_text import with_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

_RESAMPLES = 1000
_FITTED_SHARE = 0.9
"""Share of the runs that one pass can move, up to which passes are fitted; see ``Defragmentation``."""


class BootstrapMedians:
    """Median seconds of each case over the rounds, with bootstrap resamples of the rounds."""

    def __init__(self, cases: pd.MultiIndex, seconds: FloatArray):
        """``seconds`` has shape (rounds, cases)."""
        self.cases, self.rounds = cases, len(seconds)
        drawn = np.random.default_rng(0).integers(0, self.rounds, (_RESAMPLES, self.rounds))
        self.value: FloatArray = np.median(seconds, axis=0)
        """Shape (cases,)."""
        self._resampled: FloatArray = np.median(seconds[drawn], axis=1)

    @classmethod
    def of(cls, samples: pd.DataFrame, *by: str) -> BootstrapMedians:
        """Group the column ``seconds`` of ``samples`` by two or more columns ``by``, and by ``round``."""
        wide = samples.pivot(index="round", columns=list(by), values="seconds").sort_index(axis=1)
        assert isinstance(wide.columns, pd.MultiIndex)
        return cls(wide.columns, wide.to_numpy(dtype=float))

    def index_of(self, *case: Any) -> int:
        """Position of a case in ``value``."""
        where = self.cases.get_loc(case)
        assert isinstance(where, int)
        return where

    def interval(self, figure: Callable[[FloatArray], float]) -> Interval:
        """A figure computed from the medians, with its 95 % interval."""
        return self.intervals(lambda medians: np.array([figure(medians)]))[0]

    def intervals(self, figures: Callable[[FloatArray], FloatArray]) -> tuple[Interval, ...]:
        """Several figures computed from the medians, each with its 95 % interval."""
        tail = (1 - LEVEL) / 2
        resampled = np.array([figures(medians) for medians in self._resampled])
        low, high = np.quantile(resampled, (tail, 1 - tail), axis=0)
        return tuple(
            # With few rounds the median may lie outside of nearly all resampled ones.
            Interval(float(v), min(float(a), float(v)), max(float(b), float(v)))
            for v, a, b in zip(figures(self.value), low, high, strict=True)
        )


def fit_nonnegative(design: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative least squares on relative errors.

    ``design`` has shape (cases, k), ``seconds`` (cases,), the coefficients (k,).
    """
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(solution / scale, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class LlamaStudy:
    """What all studies of the real llama.cpp report."""

    model: str
    library: str
    """Name and version of the llama-cpp-python that was measured."""
    era: str
    """A: b4666 to b4880; B: since b6975."""
    layers: int
    """Layers of the model."""
    threads: int
    cpu_share: float
    """Share of its threads' cores that llama.cpp got during the measurements."""
    samples: pd.DataFrame
    """A row for each measurement: its case, its ``round``, and ``seconds``."""

    @property
    def busy(self) -> bool:
        """Whether other processes took a tenth of those cores or more; the figures then cannot be trusted."""
        return self.cpu_share < machine.BUSY_BELOW

    @property
    def busy_warning(self) -> str:
        """A line of its own if the machine was busy, else empty."""
        return f"\nBUSY MACHINE: it got {self.cpu_share:.0%} of its core" if self.busy else ""


@dataclass(frozen=True, eq=False)
class Holes(LlamaStudy):
    """Decode times of a sequence in the lowest cells, and at the top of a span that is otherwise empty.

    Columns of ``samples``: ``round``, ``flash_attention`` (bool), ``span`` (cells), ``place`` (``low`` or ``high``),
    ``n_kv`` (cells up to the highest used one, rounded up as llama.cpp does: what is attended to), ``seconds``.
    """

    tokens: int
    """Tokens that the sequence holds before the decode."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each kernel and span.

        ``flash_attention``; ``span`` in cells; ``low_n_kv`` and ``high_n_kv``: cells attended to; ``low_s`` and
        ``high_s``: median seconds of a decode; ``ratio`` of the medians, high over low, and ``ratio_low`` and
        ``ratio_high``, its 95 % interval.
        """
        medians = self.medians
        n_kv = self._n_kv
        rows = []
        for flash, span in dict.fromkeys((f, s) for f, s, _ in medians.cases):
            low, high = medians.index_of(flash, span, "low"), medians.index_of(flash, span, "high")
            ratio = medians.interval(lambda m, low=low, high=high: float(m[high] / m[low]))  # type: ignore[misc]
            rows.append(
                {
                    "flash_attention": flash,
                    "span": span,
                    "low_n_kv": n_kv[flash, span, "low"],
                    "high_n_kv": n_kv[flash, span, "high"],
                    "low_s": medians.value[low],
                    "high_s": medians.value[high],
                    "ratio": ratio.value,
                    "ratio_low": ratio.low,
                    "ratio_high": ratio.high,
                }
            )
        return pd.DataFrame(rows)

    def per_cell_s(self, flash_attention: bool) -> Interval:
        """Seconds that each attended cell, used or not, adds to a decode: the slope of a straight line."""
        cases = self.medians.cases
        chosen = np.flatnonzero(cases.get_level_values("flash_attention") == flash_attention)
        attended = np.asarray(self._n_kv[cases[chosen]], dtype=np.float64)
        design = np.column_stack((np.ones(len(chosen)), attended))
        return self.medians.interval(lambda medians: float(fit_nonnegative(design, medians[chosen])[1]))

    @property
    def summary(self) -> str:
        """The result in words, a line for each kernel."""
        lines = []
        for flash, rows in self.table.groupby("flash_attention"):
            last, cell = rows.iloc[-1], self.per_cell_s(bool(flash))
            lines.append(
                f"{self.library}, {'with' if flash else 'without'} flash attention: "
                f"at the top of {last['span']:,} cells x{last['ratio']:.2f} "
                f"({last['ratio_low']:.2f} to {last['ratio_high']:.2f}); "
                f"{_microseconds(cell)} for each cell attended to"
            )
        return "\n".join(lines) + self.busy_warning

    @cached_property
    def medians(self) -> BootstrapMedians:
        """By ``flash_attention``, ``span`` and ``place``."""
        return BootstrapMedians.of(self.samples, "flash_attention", "span", "place")

    @cached_property
    def _n_kv(self) -> pd.Series[int]:
        return self.samples.groupby(["flash_attention", "span", "place"])["n_kv"].first()

    def plot(self, axis: Axes | None = None) -> Figure:
        """Milliseconds of a decode over the span, high and low, for both kernels.

        Drawn on ``axis``, whose figure is returned, or else on a figure of its own.
        """
        from benchmarks.llama_studies.plots import holes_figure

        return holes_figure(self, axis)


@dataclass(frozen=True, eq=False)
class Defragmentation(LlamaStudy):
    """Times of defragmentation passes that move a given number of runs and cells.

    Costs are fitted to passes with at most nine tenths of the runs that one can move. Fuller passes cost more, by an
    amount that differs between processes: llama.cpp looks up each tensor of a pass by its address, in a hash table that
    is then nearly full.

    Columns of ``samples``: ``round``, ``runs`` and ``cells`` (as moved, by the cells before and after), ``seconds``.
    """

    @cached_property
    def base_s(self) -> Interval:
        """Seconds of a pass that moves nothing."""
        return self._fitted[0]

    @cached_property
    def per_run_s(self) -> Interval:
        """Seconds for each run."""
        return self._fitted[1]

    @cached_property
    def per_cell_s(self) -> Interval:
        """Seconds for each cell in a run."""
        return self._fitted[2]

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each kind of pass.

        ``runs`` and ``cells`` moved; ``seconds``: the median; ``low`` and ``high``, its 95 % interval; ``fitted_s``:
        the fit's prediction; ``error``: relative, fitted over median less 1; ``in_fit``: whether the pass was fitted;
        ``each_run_s``: seconds for each run beyond those of a pass that moves nothing, where there was one.
        """
        medians = self.medians
        intervals = medians.intervals(lambda m: m)
        runs, cells = (medians.cases.get_level_values(name).to_numpy() for name in ("runs", "cells"))
        fitted = self._design @ np.array([each.value for each in self._fitted])
        nothing = medians.value[runs == 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            each = (medians.value - nothing[0]) / np.where(runs == 0, np.nan, runs) if len(nothing) else np.nan
        return pd.DataFrame(
            {
                "runs": runs,
                "cells": cells,
                "seconds": medians.value,
                "low": [i.low for i in intervals],
                "high": [i.high for i in intervals],
                "fitted_s": fitted,
                "error": fitted / medians.value - 1,
                "in_fit": self._in_fit,
                "each_run_s": each,
            }
        )

    @property
    def summary(self) -> str:
        """The fitted costs in words, and how well they describe the passes."""
        errors = self.table.loc[self.table["in_fit"], "error"].abs()
        return (
            f"{self.library}: a pass takes {_microseconds(self.base_s)}, and {_microseconds(self.per_run_s)} for each "
            f"run and {_microseconds(self.per_cell_s)} for each cell; "
            f"mean error of that {errors.mean():.0%}, largest {errors.max():.0%}{self.busy_warning}"
        )

    @cached_property
    def medians(self) -> BootstrapMedians:
        """By ``runs`` and ``cells``."""
        return BootstrapMedians.of(self.samples, "runs", "cells")

    @cached_property
    def _design(self) -> FloatArray:
        """Shape (cases, 3): 1, runs, cells."""
        cases = self.medians.cases.to_frame().to_numpy(dtype=float)
        return np.column_stack((np.ones(len(cases)), cases))

    @cached_property
    def _fitted(self) -> tuple[Interval, ...]:
        chosen = self._in_fit
        return self.medians.intervals(lambda medians: fit_nonnegative(self._design[chosen], medians[chosen]))

    @cached_property
    def _in_fit(self) -> NDArray[np.bool_]:
        """Shape (cases,)."""
        runs = self.medians.cases.get_level_values("runs").to_numpy()
        return np.asarray(runs <= _FITTED_SHARE * most_runs(self.layers), dtype=np.bool_)

    def plot(self) -> Figure:
        """Milliseconds of a pass: over the cells of one run, and over the number of one-cell runs; with the fit."""
        from benchmarks.llama_studies.plots import defragmentation_figure

        return defragmentation_figure(self)


@dataclass(frozen=True, eq=False)
class KShift(LlamaStudy):
    """Times of one K-shift of one sequence, in caches of several sizes.

    Columns of ``samples``: ``round``, ``cells`` (of the cache), ``shifts`` (bool: whether there was one to carry out),
    ``seconds`` (era A: of an update alone, era B: of a decode, which carries out the shift first).
    """

    tokens: int
    """Tokens shifted."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each size of cache: ``cells``; ``seconds`` of the shift, a difference of medians; ``low`` and
        ``high``, its 95 % interval."""
        medians = BootstrapMedians.of(self.samples, "cells", "shifts")
        sizes = list(dict.fromkeys(cells for cells, _ in medians.cases))
        pairs = np.array([(medians.index_of(cells, True), medians.index_of(cells, False)) for cells in sizes])
        took = medians.intervals(lambda m: m[pairs[:, 0]] - m[pairs[:, 1]])
        return pd.DataFrame(
            {
                "cells": sizes,
                "seconds": [i.value for i in took],
                "low": [i.low for i in took],
                "high": [i.high for i in took],
            }
        )

    @property
    def summary(self) -> str:
        """The result in words."""
        rows = [f"{row['seconds'] * 1e3:.3g} ms for {row['cells']:,.0f} cells" for _, row in self.table.iterrows()]
        return f"{self.library}: a K-shift of {self.tokens} tokens takes {', '.join(rows)}{self.busy_warning}"

    def plot(self) -> Figure:
        """Milliseconds of a shift over the cells of the cache."""
        from benchmarks.llama_studies.plots import k_shift_figure

        return k_shift_figure(self)


def _microseconds(seconds: Interval) -> str:
    return with_ends(seconds, 1e6, " µs", least=None)
