"""Fits what llama.cpp reaches of devices to published results of llama-bench and llama-batched-bench.

    python -m benchmarks.device_times.fit_llamacpp

writes the part of efficiencies.json that is of llama.cpp: for each make of devices two numbers for each group of
storage types, and some that all types share; attention without flash attention is fitted apart. Left out to find
errors: each device in turn, and each model in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.device_times.fitting import errors
from benchmarks.device_times.llamacpp_rows import rows
from benchmarks.device_times.no_flash_attention import unfused
from benchmarks.device_times.writing import write
from kvsim.costs.efficiency import Efficiency, EngineEfficiency
from kvsim.errors import counted
from kvsim.model.memory_shapes import memory_shape

SHARED = (
    "sharpness",
    "layer_s",
    "expert_reading",
    "expert_computing",
    "expert_layer_s",
    "attention_reading",
    "attention_computing",
    "attention_layer_s",
    "quantised_computing",
    "quantised_layer_s",
)
START = dict(zip(SHARED, (2.0, 2e-5, 0.8, 0.6, 2e-5, 0.6, 0.3, 1e-6, 0.005, 1e-5), strict=True))
LIMITS = {
    "sharpness": (1.0, 20.0),
    "layer_s": (1e-7, 1e-3),
    "expert_reading": (0.1, 1.0),
    "expert_computing": (0.05, 1.0),
    "expert_layer_s": (1e-7, 1e-3),
    "attention_reading": (0.05, 1.0),
    "attention_computing": (0.01, 1.0),
    "attention_layer_s": (1e-8, 1e-3),
    "quantised_computing": (1e-4, 1.0),
    "quantised_layer_s": (1e-8, 1e-3),
}


class Fit:
    """The numbers of one make of devices."""

    def __init__(self, table: pd.DataFrame):
        self.groups = sorted(table["group"].unique())
        self.quantised = bool(table["quantised_layers"].any())
        n = len(self.groups) + 1  # The first ones are of all groups.
        x0 = np.log([*np.tile([0.85, 0.3, 3.0], n), *(START[name] for name in SHARED)])
        low = np.log([*np.tile([0.05, 0.01, 1e-3], n), *(LIMITS[name][0] for name in SHARED)])
        high = np.log([*np.tile([1.0, 1.0, 100.0], n), *(LIMITS[name][1] for name in SHARED)])
        # Of some devices there are hundreds of rows, of most a few.
        often = table.groupby(["device", "phase"])["seconds"].transform("size").to_numpy()
        weight = (1 / np.sqrt(often)) / 0.1
        seconds = np.log(table["seconds"].to_numpy())
        loose, columns = np.array([0.3, 0.3, 0.5]), self._columns(table)

        def residuals(x: np.ndarray) -> np.ndarray:
            groups = x[: 3 * n].reshape(-1, 3)
            apart = ((groups[1:] - groups[0]) / loose).ravel()
            prior = (x[3 * n :] - x0[3 * n :]) / 0.7
            return np.concatenate([(np.log(self._seconds(columns, np.exp(x))) - seconds) * weight, apart, prior])

        self.x = least_squares(residuals, x0, bounds=(low, high), loss="soft_l1").x

    def predict(self, table: pd.DataFrame) -> np.ndarray:
        """Seconds of rows."""
        return self._seconds(self._columns(table), np.exp(self.x))

    def _columns(self, table: pd.DataFrame) -> dict[str, np.ndarray]:
        numbers = {group: i + 1 for i, group in enumerate(self.groups)}
        found = {name: table[name].to_numpy() for name in ("times", "layers", "quantised_layers")}
        found |= {name: table[name].to_numpy() for name in table.columns if name.endswith("_s")}
        return found | {"group": table["group"].map(numbers).fillna(0).astype(int).to_numpy()}

    def _seconds(self, t: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        shared = dict(zip(SHARED, x[-len(SHARED) :], strict=True))
        reading, computing, unpacking = x[: -len(SHARED)].reshape(-1, 3)[t["group"]].T

        def part(name: str, by: tuple[float, float], p: float) -> np.ndarray:
            read = t[f"{name}_reading_s"] / reading / by[0] + t[f"{name}_unpacking_s"] * unpacking
            found: np.ndarray = (read**p + (t[f"{name}_computing_s"] / computing / by[1]) ** p) ** (1 / p)
            return found

        seconds = part("matrices", (1, 1), shared["sharpness"]) + part("head", (1, 1), shared["sharpness"])
        seconds += part("experts", (shared["expert_reading"], shared["expert_computing"]), 1.0)
        moe = t["experts_reading_s"] > 0
        by_layer = shared["layer_s"] + moe * shared["expert_layer_s"] + shared["attention_layer_s"]
        read = t["attention_reading_s"] / shared["attention_reading"]
        rate = np.where(t["quantised_layers"] > 0, shared["quantised_computing"], shared["attention_computing"])
        attention = np.hypot(read, t["attention_computing_s"] / rate)
        attention += t["quantised_layers"] * shared["quantised_layer_s"]
        found: np.ndarray = t["times"] * (seconds + t["layers"] * by_layer) + attention
        return found

    def efficiency(self, found: dict[str, Any], source: str) -> EngineEfficiency:
        """As it is written."""
        shared = dict(zip(SHARED, np.exp(self.x[-len(SHARED) :]), strict=True))
        every, *of_groups = np.exp(self.x[: -len(SHARED)]).reshape(-1, 3)
        p, by = shared["sharpness"], (shared["expert_reading"], shared["expert_computing"])
        attention = (shared["attention_reading"], shared["attention_computing"], 2.0, 0.0, shared["attention_layer_s"])
        slower = (shared["quantised_computing"], 2.0, 0.0, shared["attention_layer_s"] + shared["quantised_layer_s"])
        groups = list(zip(self.groups, of_groups, strict=True))
        return EngineEfficiency(
            matrices={g: _one(r, c, p, u, shared["layer_s"]) for g, (r, c, u) in groups},
            experts={g: _one(r * by[0], c * by[1], 1.0, u, shared["expert_layer_s"]) for g, (r, c, u) in groups},
            head=_one(every[0], every[1], p, every[2], 0.0),
            decode=_one(*attention),
            quantised=_one(shared["attention_reading"], *slower) if self.quantised else None,
            prompt=_one(*attention),
            errors=found,
            source=source,
        )


def _one(*values: float) -> Efficiency:
    return Efficiency(**dict(zip(Efficiency.model_fields, (float(f"{v:.4g}") for v in values), strict=True)))


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
    whose = "our own" if (table["make"] == "hopper").all() else "published"
    source = (
        f"{whose} llama-bench and llama-batched-bench results ({len(table)} of "
        f"{counted(table['device'].nunique(), 'device')} with {table['model'].nunique()} models)"
    )
    states = tested["model"].map(lambda name: bool(memory_shape(name).states))
    found = {"all": errors(tested)} | ({"states": errors(tested[states])} if states.any() else {})
    return Fit(table).efficiency(found, source)


def with_unfused(make: str, found: EngineEfficiency) -> EngineEfficiency:
    """With attention without flash attention, which was published for some makes."""
    return found.model_copy(update={"unfused": unfused(make, found.decode.layer_s)})


if __name__ == "__main__":
    everything = rows()
    made = {str(make): fitted(own) for make, own in everything.groupby("make")}
    write("llamacpp", {make: with_unfused(make, found) for make, found in made.items()})
