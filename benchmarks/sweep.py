"""Parallel efficiency of a sweep: ``python -m benchmarks.sweep [--points 64] [--workers 2] [--rounds 3]``.

The same points are run by one process and by several, alternately, each time into a new store. Parallel efficiency is
the median time with one worker over the median time with several, over their number. The processor seconds of all
processes are reported as well: on a shared machine only they show the overhead of the workers.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from joblib.externals.loky import get_reusable_executor

from kvsim import sweep
from kvsim.machine import system_load


def points(n: int, requests: int) -> dict[str, Any]:
    """A sweep of n settings of the scenario ``chat`` under one policy."""
    axes = {"cache.cells": {"from": 1024, "to": 4096}, "workload.rate": {"from": 2.0, "to": 6.0}}
    base = {
        "workload": {
            "requests": requests,
            "prompt_tokens": {"kind": "lognormal", "mu": 4.2, "sigma": 0.9, "min": 4, "max": 400},
            "output_tokens": {"kind": "lognormal", "mu": 4.0, "sigma": 0.8, "min": 1, "max": 300},
        },
        "server": {"slots": 8, "slot_context": 512},
    }
    return {"name": "efficiency", "base": base, "policies": ["paged"], "design": "sobol", "points": n, "axes": axes}


def processor_s() -> float:
    """Processor seconds of this process and all finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(sweep_file: dict[str, Any], workers: int) -> tuple[float, float]:
    """Wall and processor seconds of a sweep, including the start and end of the workers."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = processor_s(), time.perf_counter()
        sweep(sweep_file, out=Path(folder) / "sweep.sqlite", workers=workers)
        seconds = time.perf_counter() - began
        if workers > 1:
            get_reusable_executor().shutdown(wait=True)
        return seconds, processor_s() - before


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    sweep_file = points(given.points, given.requests)
    taken: dict[int, list[tuple[float, float]]] = {1: [], given.workers: []}
    busy = system_load()
    for _ in range(given.rounds):
        for workers, times in taken.items():
            times.append(measure(sweep_file, workers))
    wall = {workers: statistics.median(t[0] for t in times) for workers, times in taken.items()}
    processor = {workers: statistics.median(t[1] for t in times) for workers, times in taken.items()}
    report = {
        "points": given.points,
        "workers": given.workers,
        "seconds": wall,
        "processor_seconds": processor,
        "efficiency": wall[1] / wall[given.workers] / given.workers,
        "processor_overhead": processor[given.workers] / processor[1] - 1,
        "load_before": busy,
    }
    if given.json:
        print(json.dumps(report))
        return
    for workers in taken:
        print(f"{workers} workers: {wall[workers]:.1f} s, {processor[workers]:.1f} s of the processors")
    print(
        f"parallel efficiency {report['efficiency']:.2f}, processor seconds {report['processor_overhead']:+.1%}; "
        f"load before {busy:.1f}"
    )


if __name__ == "__main__":
    main()
