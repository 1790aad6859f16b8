"""Non-negative least squares on relative errors, with bootstrap intervals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvsim.costs.profile import Coefficient
from kvsim.costs.tables import FloatArray

_RESAMPLES = 200
_CLIP = 2.0
"""Bound on measured over predicted seconds in a fit: a pass that took longer was disturbed, and counts as if at it."""


def weighted(design: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rows and right-hand side whose plain least squares are those of the relative errors.

    Relative to what is predicted by a first fit: relative to what was measured, passes that by chance were slow would
    count less than those that were fast, and the fit would come out below the mean.
    """
    first = np.maximum(design @ non_negative(design / seconds[:, None], np.ones(len(seconds))), seconds / 10)
    return design / first[:, None], np.minimum(seconds / first, _CLIP)


def non_negative(rows: FloatArray, aims: FloatArray) -> FloatArray:
    """Non-negative least squares, columns scaled to the same size."""
    scale = _sizes(rows)
    solution, _ = nnls(rows / scale, aims)
    return np.asarray(solution / scale)


def _sizes(rows: FloatArray) -> FloatArray:
    """Size of each column, 1 for columns of zeros; shape (n_columns,)."""
    sizes: FloatArray = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0] = 1.0
    return sizes


def with_intervals(
    design: FloatArray,
    seconds: FloatArray,
    member: NDArray[np.intp],
    rng: np.random.Generator,
) -> list[Coefficient]:
    """The coefficients of all samples, with intervals from resampled origins."""
    rows, aims = weighted(design, seconds)
    value = non_negative(rows, aims)
    # Least squares know the rows only by their products, which are added up by origin once.
    scale = _sizes(rows)
    both = np.hstack([rows / scale, aims[:, None]])
    n_origins, width = member.max() + 1, both.shape[1]
    products = np.zeros((n_origins, width, width))
    for origin in range(n_origins):
        own = both[member == origin]
        products[origin] = own.T @ own
    others = np.zeros((_RESAMPLES, width - 1))
    for other in others:
        times = np.bincount(rng.integers(0, n_origins, n_origins), minlength=n_origins)
        product = np.tensordot(times, products, axes=1)
        asked = np.flatnonzero(product.diagonal()[:-1] > 0)
        size, axes = np.linalg.eigh(product[np.ix_(asked, asked)])
        kept = size > size[-1] * 1e-13
        root, axes = np.sqrt(size[kept]), axes[:, kept]
        solution, _ = nnls((axes * root).T, axes.T @ product[asked, -1] / root)
        other[asked] = solution / scale[asked]
    low, high = np.quantile(others, [0.025, 0.975], axis=0)
    triples = zip(value.tolist(), np.minimum(low, value).tolist(), np.maximum(high, value).tolist(), strict=True)
    return [Coefficient(value=v, low=lo, high=hi) for v, lo, hi in triples]


def simple_fit(design: list[list[int]], seconds: list[float], rng: np.random.Generator) -> list[Coefficient]:
    """Fit a few samples, each with an origin of its own."""
    rows = np.array(design, dtype=float)
    return with_intervals(rows, np.array(seconds), np.arange(len(rows)), rng)


def predict_held_out(design: FloatArray, seconds: FloatArray, held: NDArray[np.bool_]) -> FloatArray:
    """Seconds of the samples that are held out, from a fit of the others."""
    predicted: FloatArray = design[held] @ non_negative(*weighted(design[~held], seconds[~held]))
    return predicted
