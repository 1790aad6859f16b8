"""Fits efficiencies to measured parts of passes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from kvsim.costs.efficiency import Efficiency, Errors

LOW, HIGH = (0.05, 0.02, 1.0, 1e-9), (1.0, 1.0, 20.0, 1e-3)
"""Bounds of reading, computing, sharpness and seconds of a layer."""


def fit(rows: pd.DataFrame) -> Efficiency:
    """One efficiency for rows with reading_s, computing_s, layers and seconds."""
    reading, computing = rows["reading_s"].to_numpy(), rows["computing_s"].to_numpy()
    layers, seconds = rows["layers"].to_numpy(), rows["seconds"].to_numpy()

    def residuals(x: np.ndarray) -> np.ndarray:
        by_reading, by_computing, p, layer_s = np.exp(x)
        both = ((reading / by_reading) ** p + (computing / by_computing) ** p) ** (1 / p)
        found: np.ndarray = np.log((both + layers * layer_s) / seconds)
        return found

    start = np.log([0.8, 0.6, 2.0, 1e-5])
    found = least_squares(residuals, start, bounds=(np.log(LOW), np.log(HIGH)), loss="soft_l1", f_scale=0.1)
    by_reading, by_computing, p, layer_s = (float(f"{value:.4g}") for value in np.exp(found.x))
    return Efficiency(reading=min(by_reading, 1.0), computing=min(by_computing, 1.0), sharpness=p, layer_s=layer_s)


def errors(found: pd.DataFrame) -> Errors:
    """The errors of rows with device, phase (decode or prompt), seconds and predicted; each device counts alike."""
    numbers = {}
    for phase in ("decode", "prompt"):
        own = found[found["phase"] == phase]
        off = (own["predicted"] / own["seconds"] - 1).abs().to_numpy()
        weight = 1 / own.groupby("device")["seconds"].transform("size").to_numpy()
        order = np.argsort(off)
        reached = np.cumsum(weight[order]) / weight.sum()
        for name, share in (("median", 0.5), ("p90", 0.9)):
            numbers[f"{phase}_{name}"] = round(float(off[order][np.searchsorted(reached, share)]), 3)
    return Errors(passes=len(found), **numbers)
