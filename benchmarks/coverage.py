"""How often intervals of latencies' percentiles over short replications contain the percentile of all requests.

    python -m benchmarks.coverage --runs 1500 --replications 5

runs a small server on several kinds of traffic, each time with a seed of its own, takes groups of those runs at random,
and counts how many of the groups' intervals contain the percentile of all requests of all runs together, lie below it,
and lie above it: as ``measure_interval`` gives them, and beside it t intervals of the runs' own percentiles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import typer

import kvsim
from kvsim.experiments.measures import LATENCIES, STATISTICS, FloatArray, measure_interval
from kvsim.experiments.pooled_percentiles import sketch

TRAFFIC: dict[str, dict[str, Any]] = {
    "poisson": {"kind": "poisson", "rate": 8.0},
    "gamma arrivals of CV 3": {"kind": "gamma", "rate": 8.0, "cv": 3.0},
    "gamma arrivals of CV 4": {"kind": "gamma", "rate": 8.0, "cv": 4.0},
    "on and off": {"kind": "mmpp", "rates": [16.0, 0.01], "dwell_s": [5.0, 5.0]},
}


def coverage(measure: str, runs: list[FloatArray], groups: FloatArray) -> tuple[float, dict[str, str]]:
    """The percentile of all requests of all runs, seconds, and how each kind of interval covers it, in words.

    ``runs``: the latencies of each; ``groups``: indices of runs, shape (groups, replications).
    """
    latency, _, statistic = measure.partition("_")
    truth = float(np.quantile(np.concatenate(runs), STATISTICS[statistic]))
    own = np.array([np.quantile(run, STATISTICS[statistic]) for run in runs])
    sketches = [{latency: sketch(run)} for run in runs]
    ways = {
        "kvsim": [measure_interval(measure, own[g], sketches=[sketches[i] for i in g]) for g in groups],
        "t": [measure_interval(measure, own[g]) for g in groups],
    }
    said = {}
    for way, intervals in ways.items():
        below = float(np.mean([interval.high < truth for interval in intervals]))
        above = float(np.mean([interval.low > truth for interval in intervals]))
        inside = 1 - below - above
        error = math.sqrt(inside * (1 - inside) / len(groups))
        said[way] = f"in {inside:.1%} (±{error:.1%}), below {below:.1%}, above {above:.1%}"
    return truth, said


def run_of(seed: int, workload: dict[str, Any]) -> dict[str, FloatArray]:
    """The latencies of a run's requests with a seed, seconds."""
    requests = kvsim.run(kvsim.load({"seed": seed, "workload": workload}), policy="paged", detail="rows").requests
    return {key: requests[f"{key}_s"].dropna().to_numpy() for key in LATENCIES}


def main(runs: int = 1500, replications: int = 5, groups: int = 1000, requests: int = 150) -> None:
    """Print the coverage of 95 % intervals."""
    for traffic, workload in TRAFFIC.items():
        made = [run_of(seed, workload | {"requests": requests}) for seed in range(runs)]
        typer.echo(f"{traffic}: {runs:,} runs of {requests} requests; {groups:,} groups of {replications}")
        drawn = np.random.default_rng(0).integers(0, runs, (groups, replications))
        for measure in (f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS):
            truth, said = coverage(measure, [run[measure.split("_")[0]] for run in made], drawn)
            for way, words in said.items():
                typer.echo(f"{measure}  {1e3 * truth:8.2f} ms  {way:5}  {words}")


if __name__ == "__main__":
    typer.run(main)
