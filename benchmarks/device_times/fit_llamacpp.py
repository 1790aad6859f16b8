"""Fits what llama.cpp reaches of devices to published results of llama-bench and llama-batched-bench.

    python -m benchmarks.device_times.fit_llamacpp

writes the part of efficiencies.json that is of llama.cpp: for each make of devices two numbers for each group of
storage types, and some that all types share. Left out to find errors: each device in turn, and each model in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.device_times.fitting import errors
from benchmarks.device_times.llamacpp_rows import rows
from benchmarks.device_times.writing import write
from kvsim.costs.efficiency import Efficiency, EngineEfficiency

SHARED = (
    "sharpness",
    "layer_s",
    "expert_reading",
    "expert_computing",
    "expert_layer_s",
    "attention_reading",
    "attention_computing",
    "attention_layer_s",
)
START = dict(zip(SHARED, (2.0, 2e-5, 0.8, 0.6, 2e-5, 0.6, 0.3, 1e-6), strict=True))
LIMITS = {
    "sharpness": (1.0, 20.0),
    "layer_s": (1e-7, 1e-3),
    "expert_reading": (0.1, 1.0),
    "expert_computing": (0.05, 1.0),
    "expert_layer_s": (1e-7, 1e-3),
    "attention_reading": (0.05, 1.0),
    "attention_computing": (0.01, 1.0),
    "attention_layer_s": (1e-8, 1e-3),
}
LOOSE = 0.3
"""How far, in logarithms, the numbers of one group of types are let from those of all, per measurement that differs."""


class Fit:
    """The numbers of one make of devices."""

    def __init__(self, table: pd.DataFrame):
        self.groups = sorted(table["group"].unique())
        x0 = np.log([0.8, 0.3] * (len(self.groups) + 1) + [START[name] for name in SHARED])
        low = np.log([0.05, 0.01] * (len(self.groups) + 1) + [LIMITS[name][0] for name in SHARED])
        high = np.log([1.0, 1.0] * (len(self.groups) + 1) + [LIMITS[name][1] for name in SHARED])

        # Of some devices there are hundreds of rows, of most a few.
        often = table.groupby(["device", "phase"])["seconds"].transform("size").to_numpy()
        weight = (1 / np.sqrt(often)) / 0.1

        def residuals(x: np.ndarray) -> np.ndarray:
            off = np.log(self.predict(table, x) / table["seconds"].to_numpy())
            apart = (x[2 : 2 * len(self.groups) + 2].reshape(-1, 2) - x[:2]).ravel() / LOOSE
            prior = (x[-len(SHARED) :] - np.log([START[name] for name in SHARED])) / 0.7
            return np.concatenate([off * weight, apart, prior])

        self.x = least_squares(residuals, x0, bounds=(low, high), loss="soft_l1").x

    def predict(self, table: pd.DataFrame, x: np.ndarray | None = None) -> np.ndarray:
        """Seconds of rows."""
        x = self.x if x is None else x
        shared = dict(zip(SHARED, np.exp(x[-len(SHARED) :]), strict=True))
        index = (
            table["group"].map({group: i + 1 for i, group in enumerate(self.groups)}).fillna(0).astype(int).to_numpy()
        )
        reading, computing = np.exp(x[2 * index]), np.exp(x[2 * index + 1])
        t = {
            name: table[name].to_numpy() for name in table.columns if name.endswith("_s") or name in ("times", "layers")
        }
        p = shared["sharpness"]

        def norm(read: np.ndarray, compute: np.ndarray, order: float = p) -> np.ndarray:
            found: np.ndarray = (read**order + compute**order) ** (1 / order)
            return found

        seconds = norm(t["matrices_reading_s"] / reading, t["matrices_computing_s"] / computing)
        seconds += norm(t["head_reading_s"] / reading, t["head_computing_s"] / computing)
        moe = t["experts_reading_s"] > 0
        by = shared["expert_reading"], shared["expert_computing"]
        seconds += norm(t["experts_reading_s"] / reading / by[0], t["experts_computing_s"] / computing / by[1], 1.0)
        seconds += t["layers"] * (shared["layer_s"] + moe * shared["expert_layer_s"])
        attention = norm(
            t["attention_reading_s"] / shared["attention_reading"],
            t["attention_computing_s"] / shared["attention_computing"],
            2.0,
        )
        found: np.ndarray = t["times"] * (seconds + t["layers"] * shared["attention_layer_s"]) + attention
        return found

    def efficiency(self, found: dict[str, Any], source: str) -> EngineEfficiency:
        """As it is written."""
        shared = dict(zip(SHARED, np.exp(self.x[-len(SHARED) :]), strict=True))
        both = np.exp(self.x[2 : 2 * len(self.groups) + 2]).reshape(-1, 2)

        def one(reading: float, computing: float, sharpness: float, layer_s: float) -> Efficiency:
            reading, computing, sharpness, layer_s = (
                float(f"{v:.4g}") for v in (reading, computing, sharpness, layer_s)
            )
            return Efficiency(reading=reading, computing=computing, sharpness=sharpness, layer_s=layer_s)

        p, by = shared["sharpness"], (shared["expert_reading"], shared["expert_computing"])
        attention = shared["attention_reading"], shared["attention_computing"], 2.0
        return EngineEfficiency(
            matrices={g: one(r, c, p, shared["layer_s"]) for g, (r, c) in zip(self.groups, both, strict=True)},
            experts={
                g: one(r * by[0], c * by[1], 1.0, shared["expert_layer_s"])
                for g, (r, c) in zip(self.groups, both, strict=True)
            },
            head=one(*np.exp(self.x[:2]), p, 0.0),
            decode=one(*attention, shared["attention_layer_s"]),
            prompt=one(*attention, shared["attention_layer_s"]),
            errors=found,
            source=source,
        )


def left_out(table: pd.DataFrame) -> pd.DataFrame:
    """All rows with their predicted seconds, by fits without their device, and without their model."""
    found = []
    for by in ("device", "model"):
        for name in table[by].unique():
            own = table[table[by] == name]
            if len(own) < len(table):
                found.append(own.assign(predicted=Fit(table[table[by] != name]).predict(own), left_out=by))
    return pd.concat(found)


def fitted(table: pd.DataFrame) -> EngineEfficiency:
    """What is written for a make of devices."""
    tested = left_out(table)
    tested = tested[tested["phase"] != "chunk"]
    source = (
        f"published llama-bench and llama-batched-bench results ({len(table)} of {table['device'].nunique()} devices "
        f"with {table['model'].nunique()} models)"
    )
    return Fit(table).efficiency({"all": errors(tested)}, source)


if __name__ == "__main__":
    everything = rows()
    write("llamacpp", {str(make): fitted(own) for make, own in everything.groupby("make")})
