"""Medians over rounds with bootstrap intervals, and the non-negative fit of what a llama.cpp study measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvsim.experiments.estimates import LEVEL, Interval

FloatArray = NDArray[np.float64]

_RESAMPLES = 1000


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
