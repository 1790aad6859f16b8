"""What holes, defragmentation and K-shifts cost in the real llama.cpp, measured here and told with intervals.

Each study runs llama.cpp in a process of its own (``real_engine/llama_studies.py``), so that one program can look at
several versions: ``library`` names a folder with another llama-cpp-python than the installed one (``pip install
--target FOLDER llama-cpp-python==0.3.8``). In each round everything has its turn; figures are of medians over rounds,
and intervals are of 1,000 bootstrap resamples of the rounds, 95 %.

``ELSEWHERE`` has the same figures from another machine, to be put beside: llama.cpp b4875 (llama-cpp-python 0.3.8),
SmolLM2-135M in Q4_1, one thread of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvsim import machine
from kvsim.errors import UserError
from kvsim.experiments.estimates import LEVEL, Interval
from kvsim.model.engine_shapes import gguf_path
from real_engine.llama_studies import StudyKind, StudyRequest, StudyResult, most_runs, run_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

ELSEWHERE: dict[str, dict[int, float]] = {
    "holes": {160: 12.2e-3, 512: 13.2e-3, 1024: 15.6e-3, 2048: 20.1e-3, 4096: 26.5e-3},
    "holes, flash attention": {160: 11.3e-3, 4096: 12.6e-3},
    "defragmentation": {0: 0.42e-3},
    "shift": {256: 2.7e-3, 1024: 9.0e-3, 4096: 34e-3},
}
"""Seconds. Holes: of a decode, by the cells attended to; with flash attention the least and the most over that range.
Defragmentation: of a pass that moves nothing. Shift: by cells of the cache."""
ELSEWHERE_PER_CELL_S = (5e-6, 6e-6)
"""A cell moved in one long run."""
ELSEWHERE_PER_RUN_S = (150e-6, 165e-6)
"""A run of one cell moved."""

SPANS = (256, 512, 1024, 2048, 4096)
PASSES = (
    (0, 0),
    *((1, cells) for cells in (1, 16, 64, 256, 512, 1024)),
    *((runs, 1) for runs in (2, 4, 8, 16, 24, 32, 40, 45)),
    *((runs, 16) for runs in (4, 16, 32)),
)
"""Runs, and cells in each; 45 are the most that one pass moves in a model of 30 layers."""
CACHES = (256, 1024, 4096)

_ELSEWHERE = "elsewhere (b4875)"
_RESAMPLES = 1000
_PAD = 256
_FULL = 0.9
"""Of the runs that a pass can move; see ``Defragmentation``."""
_TOKENS = 128


@dataclass(frozen=True, eq=False)
class _Measured:
    """What all studies have."""

    model: str
    library: str
    """Name and version of what was measured."""
    era: str
    """A: b4666 to b4880; B: since b6975."""
    layers: int
    """Of the model."""
    threads: int
    cpu_share: float
    """Share of its threads' cores that llama.cpp got while the clock ran."""
    samples: pd.DataFrame
    """A row for each measurement: what it was of, its ``round``, and ``seconds``."""

    @property
    def busy(self) -> bool:
        """Whether others ran on those cores for a tenth of the time or more: then do not trust the figures."""
        return self.cpu_share < machine.BUSY_BELOW

    @property
    def _warning(self) -> str:
        """A line of its own where the machine was busy, else empty."""
        return f"\nBUSY MACHINE: it got {self.cpu_share:.0%} of its core" if self.busy else ""

    def _medians(self, *by: str) -> _Medians:
        """Over rounds, of each case."""
        wide = self.samples.pivot(index="round", columns=list(by), values="seconds").sort_index(axis=1)
        return _Medians(pd.MultiIndex.from_tuples(map(_tuple, wide.columns), names=by), wide.to_numpy(dtype=float))


class _Medians:
    """Of each case the median over rounds, and what it would be in resamples of the rounds."""

    def __init__(self, cases: pd.MultiIndex, seconds: FloatArray):
        """``seconds`` has shape (rounds, cases)."""
        self.cases, self.rounds = cases, len(seconds)
        drawn = np.random.default_rng(0).integers(0, self.rounds, (_RESAMPLES, self.rounds))
        self.value: FloatArray = np.median(seconds, axis=0)
        """Shape (cases,)."""
        self._again: FloatArray = np.median(seconds[drawn], axis=1)

    def at(self, *case: Any) -> int:
        """The number of a case."""
        where = self.cases.get_loc(case)
        assert isinstance(where, int)
        return where

    def interval(self, figure: Callable[[FloatArray], float]) -> Interval:
        """A figure that is reckoned from the medians, and its interval."""
        return self.intervals(lambda medians: np.array([figure(medians)]))[0]

    def intervals(self, figures: Callable[[FloatArray], FloatArray]) -> tuple[Interval, ...]:
        """Several at once."""
        tail = (1 - LEVEL) / 2
        again = np.array([figures(medians) for medians in self._again])
        low, high = np.quantile(again, (tail, 1 - tail), axis=0)
        how = f"bootstrap over {self.rounds} rounds"
        return tuple(
            # The median of few rounds may lie outside of nearly all resamples'.
            Interval(float(v), min(float(a), float(v)), max(float(b), float(v)), LEVEL, self.rounds, how)
            for v, a, b in zip(figures(self.value), low, high, strict=True)
        )


def _tuple(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def _fit(design: FloatArray, seconds: FloatArray) -> FloatArray:
    """Coefficients, none below 0, with the least squares of relative errors; shapes (cases, k) and (cases,) to (k,)."""
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(solution / scale, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Holes(_Measured):
    """One decode of a sequence that lies in the lowest cells, or at the top of a span that is empty otherwise.

    Columns of ``samples``: ``round``, ``flash_attention`` (bool), ``span`` (cells), ``place`` (``low`` or ``high``),
    ``n_kv`` (cells up to the highest used one, rounded up as llama.cpp does: what is attended to), ``seconds``.
    """

    tokens: int
    """That the sequence holds before the decode."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each kernel and span.

        ``flash_attention``; ``span`` in cells; ``low_n_kv`` and ``high_n_kv``: cells attended to; ``low_s`` and
        ``high_s``: median seconds of a decode; ``ratio`` of the medians, high over low, and ``ratio_low`` and
        ``ratio_high``, its 95 % interval.
        """
        medians = self._by_case
        n_kv = self.samples.groupby(["flash_attention", "span", "place"])["n_kv"].first()
        rows = []
        for flash, span in dict.fromkeys((f, s) for f, s, _ in medians.cases):
            low, high = medians.at(flash, span, "low"), medians.at(flash, span, "high")
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
        """Seconds that a decode takes longer for each cell attended to, used or not: a straight line through all."""
        n_kv = self.samples.groupby(["flash_attention", "span", "place"])["n_kv"].first()
        cases = self._by_case.cases
        ours = np.flatnonzero(cases.get_level_values("flash_attention") == flash_attention)
        attended = n_kv[cases[ours]].to_numpy(dtype=float)
        design = np.column_stack((np.ones(len(ours)), attended))
        return self._by_case.interval(lambda medians: float(_fit(design, medians[ours])[1]))

    @property
    def said(self) -> str:
        """In words, a line for each kernel."""
        lines = []
        for flash, rows in self.table.groupby("flash_attention"):
            last, cell = rows.iloc[-1], self.per_cell_s(bool(flash))
            lines.append(
                f"{self.library}, {'with' if flash else 'without'} flash attention: "
                f"at the top of {last['span']:,} cells x{last['ratio']:.2f} "
                f"({last['ratio_low']:.2f} to {last['ratio_high']:.2f}); "
                f"{_micro(cell)} for each cell attended to"
            )
        return "\n".join(lines) + self._warning

    @cached_property
    def _by_case(self) -> _Medians:
        return self._medians("flash_attention", "span", "place")

    def plot(self, axis: Axes | None = None) -> Figure:
        """Milliseconds of a decode over the span, high and low, both kernels, and what was measured elsewhere.

        Drawn on ``axis``, whose figure is returned, or else on a figure of its own.
        """
        with _style():
            if axis is None:
                axis = _figure(8, 5.5).subplots()
            colours = _colours(2)
            intervals = self._by_case.intervals(lambda medians: 1e3 * medians)
            for flash, rows in self.table.groupby("flash_attention"):
                for place, line in (("high", "-o"), ("low", "--s")):
                    at = [self._by_case.at(flash, span, place) for span in rows["span"]]
                    ms = np.array([[intervals[i].value, intervals[i].low, intervals[i].high] for i in at]).T
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
            there = ELSEWHERE["holes"]
            axis.plot(list(there), _ms(there.values()), ":x", color="0.4", label=f"high, without, {_ELSEWHERE}")
            there = ELSEWHERE["holes, flash attention"]
            axis.fill_between(
                [min(there), max(there)],
                *_ms(there.values()),
                color="0.6",
                alpha=0.4,
                linewidth=0,
                label=f"with, {_ELSEWHERE}",
            )
            axis.set(xlabel="span: cells up to the highest used one", ylabel="a decode, ms", ylim=(0, None))
            axis.legend(frameon=True, fontsize=9)
            axis.set_title(_title(self))
        figure = axis.get_figure()
        assert figure is not None
        return figure.figure


@dataclass(frozen=True, eq=False)
class Defragmentation(_Measured):
    """Passes of defragmentation that move a given number of runs and cells.

    Costs are fitted to passes with at most nine tenths of the runs that one can move. Fuller ones are dearer, and by
    how much differs from one process to the next: llama.cpp looks each tensor of a pass up by its address, in a table
    that is nearly full then.

    Columns of ``samples``: ``round``, ``runs`` and ``cells`` (really moved, as cells before and after show),
    ``seconds``.
    """

    @cached_property
    def base_s(self) -> Interval:
        """Seconds of a pass as such."""
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
        what the fit says; ``error``: that over the median, less 1; ``in_fit``: whether it was fitted; ``each_run_s``:
        what it takes longer than a pass that moves nothing (where there was one), for each run.
        """
        medians = self._by_case
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
    def said(self) -> str:
        """In words: the fit, and how well it describes the passes."""
        errors = self.table.loc[self.table["in_fit"], "error"].abs()
        return (
            f"{self.library}: a pass takes {_micro(self.base_s)}, and {_micro(self.per_run_s)} for each run and "
            f"{_micro(self.per_cell_s)} for each cell; "
            f"mean error of that {errors.mean():.0%}, largest {errors.max():.0%}{self._warning}"
        )

    @cached_property
    def _by_case(self) -> _Medians:
        return self._medians("runs", "cells")

    @cached_property
    def _design(self) -> FloatArray:
        """Shape (cases, 3): 1, runs, cells."""
        cases = self._by_case.cases.to_frame().to_numpy(dtype=float)
        return np.column_stack((np.ones(len(cases)), cases))

    @cached_property
    def _fitted(self) -> tuple[Interval, ...]:
        ours = self._in_fit
        return self._by_case.intervals(lambda medians: _fit(self._design[ours], medians[ours]))

    @cached_property
    def _in_fit(self) -> NDArray[np.bool_]:
        """Shape (cases,)."""
        runs = self._by_case.cases.get_level_values("runs").to_numpy()
        return np.asarray(runs <= _FULL * most_runs(self.layers), dtype=np.bool_)

    def plot(self) -> Figure:
        """Milliseconds of a pass: one run over its cells, and runs of a cell each over their number, with the fit and
        what was measured elsewhere."""
        with _style():
            figure = _figure(12, 5)
            long, many = figure.subplots(1, 2)
            table, colour = self.table, _colours(1)[0]
            single = table[table["runs"] == table["cells"]]
            for axis, x, own in ((long, "cells", table[table["runs"] == 1]), (many, "runs", single)):
                own = own.sort_values(x)
                for fitted, rows in own.groupby("in_fit", sort=False):
                    label, fill = ("measured", colour) if fitted else ("measured, not in the fit", "white")
                    axis.errorbar(
                        rows[x], *_ms_and_reach(rows), fmt="o", color=colour, mfc=fill, capsize=3, label=label
                    )
                axis.plot(own[x], _ms(own["fitted_s"]), color=colour, linewidth=1.2, label="the fit")
            base = ELSEWHERE["defragmentation"][0]
            for axis, costs in ((long, ELSEWHERE_PER_CELL_S), (many, ELSEWHERE_PER_RUN_S)):
                ends = np.array([0.0, axis.get_xlim()[1]])
                between = [_ms(base + cost * ends) for cost in costs]
                axis.fill_between(ends, *between, color="0.6", alpha=0.4, linewidth=0, label=_ELSEWHERE)
                axis.set(xlim=(0, ends[1]), ylim=(0, None), ylabel="a pass, ms")
                axis.legend(frameon=True, loc="upper left")
            long.set(xlabel="cells", title="one run of so many cells")
            many.set(xlabel="runs", title="so many runs of one cell each")
            figure.suptitle(f"One pass of defragmentation: {_title(self)}")
        return figure


@dataclass(frozen=True, eq=False)
class KShift(_Measured):
    """One shift of one sequence, in caches of several sizes.

    Columns of ``samples``: ``round``, ``cells`` (of the cache), ``shifts`` (bool: whether there was one to carry out),
    ``seconds`` (era A: of an update alone, era B: of a decode, which does it first).
    """

    tokens: int
    """That were shifted."""

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each size of cache: its ``cells``; ``seconds`` that the shift takes, a difference of medians;
        ``low`` and ``high``, its 95 % interval."""
        medians = self._medians("cells", "shifts")
        sizes = list(dict.fromkeys(cells for cells, _ in medians.cases))
        pairs = np.array([(medians.at(cells, True), medians.at(cells, False)) for cells in sizes])
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
    def said(self) -> str:
        """In words."""
        rows = [f"{row['seconds'] * 1e3:.3g} ms for {row['cells']:,.0f} cells" for _, row in self.table.iterrows()]
        return f"{self.library}: a K-shift of {self.tokens} tokens takes {', '.join(rows)}{self._warning}"

    def plot(self) -> Figure:
        """Milliseconds of a shift over the cells of the cache, and what was measured elsewhere."""
        with _style():
            figure = _figure(8, 5)
            axis = figure.subplots()
            table, there = self.table, ELSEWHERE["shift"]
            axis.errorbar(
                table["cells"], *_ms_and_reach(table), fmt="-o", color=_colours(1)[0], capsize=3, label="measured"
            )
            axis.plot(list(there), _ms(there.values()), ":x", color="0.4", label=_ELSEWHERE)
            axis.set(xlabel="cells of the cache", ylabel="a K-shift, ms", xlim=(0, None), ylim=(0, None))
            axis.legend(frameon=True)
            axis.set_title(f"{self.tokens} tokens shifted: {_title(self)}")
        return figure


def measure_holes(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    spans: Sequence[int] = SPANS,
    rounds: int = 20,
) -> Holes:
    """Measure what a decode takes where the sequence's 128 tokens lie low, and at the top of each span.

    ``model``: ``smollm2`` or a GGUF file. ``library``: a folder with another llama-cpp-python than the installed one.
    ``spans`` in cells, multiples of 256; in each round a decode low and one high, for each span and kernel; ten
    seconds for 20 rounds of ``smollm2``. Raises ``UserError`` where llama.cpp is missing or cannot do it.
    """
    for span in spans:
        if span < _PAD or span % _PAD:
            raise UserError(f"a span of {span} cells; multiples of {_PAD} are accepted")
    asked = tuple((span,) for span in dict.fromkeys(spans))
    answer, samples = _ask("holes", model, library, threads, rounds, asked)
    samples["flash_attention"] = samples["flash_attention"] == 1
    samples["place"] = np.where(samples.pop("high") == 1, "high", "low")
    return Holes(*_common(model, answer, threads), samples, _TOKENS)


def measure_defragmentation(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    passes: Sequence[tuple[int, int]] = PASSES,
    rounds: int = 20,
) -> Defragmentation:
    """Measure what one pass of defragmentation takes, by what it moves: ``passes`` of (runs, cells in each run).

    (0, 0) moves nothing; (1, n) and one with several runs must be there, as costs of runs and cells are told apart by
    them. Needs era A: without ``library``, llama-cpp-python 0.3.8 must be the installed one. Raises ``UserError`` where
    llama.cpp is missing, has no defragmentation, or moves fewer runs in a pass (with L layers, (8192 - 2 L) / (6 L)).
    """
    asked = tuple(dict.fromkeys((int(runs), int(cells)) for runs, cells in passes))
    for runs, cells in asked:
        if (runs < 1 or cells < 1) and (runs, cells) != (0, 0):
            raise UserError(f"a pass of {runs} runs of {cells} cells; 1 and more of both are accepted, or 0 and 0")
    if len({(runs, runs * cells) for runs, cells in asked}) < 3 or not any(runs > 1 for runs, _ in asked):
        raise UserError("passes: at least three are needed, one of them with several runs")
    answer, samples = _ask("defragmentation", model, library, threads, rounds, asked)
    return Defragmentation(*_common(model, answer, threads), samples)


def measure_shift(
    model: str = "smollm2",
    *,
    library: str | Path | None = None,
    threads: int = 1,
    cells: Sequence[int] = CACHES,
    rounds: int = 20,
) -> KShift:
    """Measure what one K-shift of 128 tokens takes in caches of so many ``cells``, multiples of 256.

    Raises ``UserError`` where llama.cpp is missing or cannot do it.
    """
    for size in cells:
        if size < _PAD or size % _PAD:
            raise UserError(f"a cache of {size} cells; multiples of {_PAD} are accepted")
    asked = tuple((size,) for size in dict.fromkeys(cells))
    answer, samples = _ask("shift", model, library, threads, rounds, asked)
    samples["shifts"] = samples["shifts"] == 1
    return KShift(*_common(model, answer, threads), samples, _TOKENS)


def _ask(
    study: StudyKind,
    model: str,
    library: str | Path | None,
    threads: int,
    rounds: int,
    cases: tuple[tuple[int, ...], ...],
) -> tuple[StudyResult, pd.DataFrame]:
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{name} is {value}; 1 and more are accepted")
    if not cases:
        raise UserError("nothing to measure is named")
    path = gguf_path(model)
    if path is None:
        raise UserError(f"model {model}: llama.cpp needs a GGUF file (FILE.gguf, or smollm2)")
    folder = None if library is None else str(library)
    answer = run_study(StudyRequest(study, str(path), folder, threads, rounds, cases, _TOKENS))
    return answer, pd.DataFrame(answer.rows)


def _common(model: str, answer: StudyResult, threads: int) -> tuple[str, str, str, int, int, float]:
    name = Path(model).name
    return name, answer.library, answer.era, answer.layers, threads, answer.cpu_share


def _title(study: _Measured) -> str:
    threads = "1 thread" if study.threads == 1 else f"{study.threads} threads"
    return f"{study.library}, {study.model}, {threads}{study._warning}"


def _micro(seconds: Interval) -> str:
    return f"{1e6 * seconds.value:.3g} µs ({1e6 * seconds.low:.3g} to {1e6 * seconds.high:.3g})"


def _ms(seconds: Iterable[float]) -> FloatArray:
    return 1e3 * np.array(list(seconds))


def _ms_and_reach(table: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Milliseconds, and how far their intervals reach down and up."""
    value, low, high = (_ms(table[name]) for name in ("seconds", "low", "high"))
    return value, np.array([value - low, high - value])


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl
    import seaborn as sns

    with mpl.rc_context({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")}):
        yield


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _colours(n: int) -> list[tuple[float, float, float]]:
    import seaborn as sns

    return list(sns.color_palette("colorblind", n))
