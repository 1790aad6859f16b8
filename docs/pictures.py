"""Draws the pictures of the README and the documentation from the built-in scenarios: ``make pictures``.

The same commit draws the same pictures, byte for byte, with the same versions of Matplotlib and NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import kvsim

IMAGES = Path(__file__).parent / "images"
FREE, DONE = (1.0, 1.0, 1.0), (0.90, 0.91, 0.93)
COLUMNS, ROWS = 520, 512
"""Pixels of one cell map: moments in time, and cells shown."""


def cell_map(result: Any, until_s: float) -> NDArray[np.float64]:
    """A picture of shape (ROWS, COLUMNS, 3): cells from bottom to top, time from left to right.

    White cells are free; each slot's sequences have one colour; grey is the time after the run has ended.
    """
    times = np.array([frame.time_s for frame in result.frames])
    at = (np.arange(COLUMNS) + 0.5) * until_s / COLUMNS
    index = np.searchsorted(times, at, side="right") - 1
    owners = np.stack([frame.owners for frame in result.frames])[np.maximum(index, 0)]
    owners[index < 0] = -1
    shown = np.linspace(0, owners.shape[1] - 1, min(ROWS, owners.shape[1])).astype(int)
    palette = np.array([FREE, *sns.color_palette("husl", 16)])
    owners = np.where(owners < 0, -1, owners % 16)
    picture = palette[owners[:, shown].T + 1]
    picture[:, at > result.ended_s] = DONE
    return picture


def draw(axis: Axes, result: Any, until_s: float) -> None:
    """One cell map, with the policy's name above it and the end of the run marked."""
    cells = result.scenario.cache.cells
    axis.imshow(
        cell_map(result, until_s),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, until_s, 0, cells),
    )
    axis.set(xlim=(0, until_s), ylim=(0, cells))
    for spine in axis.spines.values():
        spine.set(color="0.6", linewidth=0.8)
    axis.tick_params(length=2, color="0.6", labelcolor="0.35", labelsize=8)


def at_a_glance() -> Figure:
    """One burst of requests under ``contiguous``, ``paged`` and ``oracle``, side by side on one time axis."""
    scenario = kvsim.load_scenario("batch", workload__requests=80)
    results = [
        kvsim.run(scenario, policy=policy, detail="tables", snapshots=True)
        for policy in ("contiguous", "paged", "oracle")
    ]
    until = max(result.ended_s for result in results)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.2, 3.6), dpi=200, facecolor="white")
        axes = figure.subplots(1, 3, sharey=True)
        figure.subplots_adjust(left=0.06, right=0.99, top=0.82, bottom=0.25, wspace=0.06)
        for axis, result, said in zip(axes, results, _captions(results), strict=True):
            draw(axis, result, until)
            axis.set_title(f"{result.policy}: {result.ended_s:.1f} s", fontsize=12, fontweight="bold", loc="left")
            if result.ended_s < until:
                axis.text(
                    (result.ended_s + until) / 2,
                    scenario.cache.cells / 2,
                    "all served",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="0.45",
                )
            axis.set_xlabel(said, fontsize=8.3, color="0.15", linespacing=1.35, labelpad=5, loc="left")
        axes[0].set_ylabel("cell of the KV cache", fontsize=8.3, color="0.35")
        figure.suptitle(
            f"The same {results[0].summary['requests']} requests and the same {scenario.cache.cells:,} cells under "
            "three allocation policies",
            x=0.06,
            y=0.975,
            ha="left",
            fontsize=12.5,
        )
        figure.text(
            0.99,
            0.015,
            "time in simulated seconds; one colour for each slot; white: free",
            ha="right",
            fontsize=7.8,
            color="0.4",
        )
    return figure


def _captions(results: list[Any]) -> list[str]:
    contiguous, paged, _ = (result.summary["cache"] for result in results)
    return [
        f"{contiguous['external_fragmentation_mean']:.0%} of free cells lie in gaps too short to use;\n"
        f"attention reads {1 / contiguous['scored_useful']:.0f} cells for each it needs",
        "Any free block will do: no cell is out of reach,\n"
        f"{paged['internal_fragmentation_mean']:.0%} of them are lost in part-filled blocks",
        "Knows every length ahead: one stretch for each\nsequence. A bound that no real policy can meet",
    ]


LAYOUTS = ("contiguous", "full-compaction", "llama.cpp-b6975", "streams", "paged", "hf-reserved", "growing", "oracle")
PAPERS = ("vattention", "radix-tree", "h2o", "h2o-compacted", "h2o-refilled", "streaming-llm", "buddy", "slab")


def layouts(names: tuple[str, ...], **keys: Any) -> Figure:
    """One burst of requests under eight policies, each on its own time axis: what each layout looks like."""
    scenario = kvsim.load_scenario("batch", workload__requests=60, **keys)
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.2, 4.6), dpi=200, facecolor="white", layout="constrained")
        for axis, policy in zip(figure.subplots(2, 4, sharey=True).flat, names, strict=True):
            result = kvsim.run(scenario, policy=policy, detail="tables", snapshots=True)
            draw(axis, result, result.ended_s)
            axis.set_title(policy, fontsize=10, fontweight="bold", loc="left")
        figure.supxlabel("simulated seconds", fontsize=8.3, color="0.35")
        figure.supylabel("cell of the KV cache", fontsize=8.3, color="0.35")
    return figure


def answer() -> Figure:
    """The question at the head of the README, which takes two minutes."""
    users = {"users": 12, "prompt": 6000, "shared": 2000, "output": 300, "think": "30s"}
    served = {"model": "qwen3-14b", "weights": "q4_K_M", "kv": "q8_0", "device": "rtx4090", "engine": "llamacpp"}
    figure: Figure = kvsim.recommend(users=users, slo="ttft_p95<4s,tpot_p95<60ms", **served).plot()
    return figure


def main() -> None:
    """Draw them all."""
    IMAGES.mkdir(exist_ok=True)
    figures = {
        "answer": answer(),
        "cells": at_a_glance(),
        "layouts": layouts(LAYOUTS),
        "papers": layouts(PAPERS, cache__budget=64),
    }
    for name, figure in figures.items():
        figure.savefig(IMAGES / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
