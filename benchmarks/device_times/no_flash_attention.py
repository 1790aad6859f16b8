"""Fits llama.cpp's attention without flash attention to what longer contexts add to steps and prompts.

``no_flash_attention.csv`` has, of published llama-bench results without it, the seconds of a decode step or
of a micro-batch of 512 tokens of a prompt at a short and at a longer mean context. Rows of the older builds have other
times for matrices, so only their difference counts. Left out are rows in which the longer one took less time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.device_times.fitting import errors
from benchmarks.device_times.llamacpp_rows import FOLDER, UBATCH, row_devices
from kvsim.costs.efficiency import Efficiency, Unfused, make_of
from kvsim.costs.physics import Need, PassPhysics
from kvsim.model.memory_shapes import memory_shape

START, LOW, HIGH = (0.5, 0.4), (0.05, 0.02), (1.0, 1.0)
"""Of reading and computing."""


@cache
def rows() -> pd.DataFrame:
    """The rows, with the make of their devices and what attention needs at both contexts."""
    table = pd.read_csv(FOLDER / "no_flash_attention.csv")
    made = [_needs(row) for row in table.itertuples()]
    return table.assign(make=[make for make, *_ in made], needs=[needs for _, *needs in made])


def _needs(row: Any) -> tuple[str, Need, Need]:
    device = row_devices()[row.device]
    physics = PassPhysics(device, memory_shape(row.model), row.weights, engine="llamacpp", flash_attn=False)
    both = (
        physics.decode(1, seen) if row.test == "tg" else physics.prompt(UBATCH, seen)
        for seen in (row.seen, row.seen_longer)
    )
    return (make_of("llamacpp", device), *both)


def added(table: pd.DataFrame, found: Efficiency) -> np.ndarray:
    """Seconds that the longer context adds."""
    return np.array([float(found.seconds(longer, 1) - found.seconds(short, 1)) for short, longer in table["needs"]])


def fit(table: pd.DataFrame) -> Efficiency:
    """One efficiency for rows of one test; kernels run one behind the other, so that their times add up."""
    measured = (table["seconds_longer"] - table["seconds"]).to_numpy()
    often = 1 / np.sqrt(table.groupby("device")["seconds"].transform("size").to_numpy())

    def made(x: np.ndarray) -> Efficiency:
        reading, computing = np.exp(x)
        return Efficiency(reading=min(reading, 1.0), computing=min(computing, 1.0), sharpness=1.0)

    def residuals(x: np.ndarray) -> np.ndarray:
        off = np.log(added(table, made(x)) / measured) * often
        return np.concatenate([off, (x - np.log(START)) / 1.0 * 0.05])

    x = least_squares(residuals, np.log(START), bounds=(np.log(LOW), np.log(HIGH)), loss="soft_l1", f_scale=0.2).x
    return Efficiency(**{key: float(f"{value:.4g}") for key, value in made(x).model_dump().items()})


def unfused(make: str, layer_s: float) -> Unfused | None:
    """What is written for a make of devices; ``layer_s``: seconds of a layer whatever it reads. None without rows."""
    own = rows()[rows()["make"] == make]
    if own.empty:
        return None
    parts, tested = {}, []
    for phase, test in (("decode", "tg"), ("prompt", "pp")):
        table = own[own["test"] == test]
        parts[phase] = fit(table).model_copy(update={"layer_s": layer_s})
        for device in table["device"].unique():
            left = table[table["device"] == device]
            others = table[table["device"] != device]
            measured = left["seconds_longer"] - left["seconds"]
            predicted = added(left, fit(others if len(others) else left))
            tested.append(left.assign(phase=phase, seconds=measured, predicted=predicted))
    found = errors(pd.concat(tested))
    numbers = {key: value for key, value in found.model_dump().items() if key != "passes"}
    return Unfused(**parts, **numbers, devices=own["device"].nunique())
