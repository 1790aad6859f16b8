"""In which part of the simulator its time goes, by samples of the processor's time."""

from __future__ import annotations

import functools
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import simpy

EVERY_S = 0.001
"""Processor seconds between two samples; where the system's own ticks are longer, it is these."""

OTHER = "other"
_REGIONS = ("paged", "sequence_regions", "ring")
_ARRIVALS = ("arrivals", "job")
_FIGURES = (
    *("recorder", "request_log", "distribution"),
    *("result", "run_tables", "snapshots", "summary", "time_breakdown"),
)
PARTS: dict[str, tuple[str, ...]] = {
    "step loop": ("policies/placement/", "kvsim/simulation/step_loop.py"),
    "scheduler": ("kvsim/simulation/schedulers/",),
    "blocks and regions": (
        "policies/paging/",
        "policies/content.py",
        *(f"policies/layouts/{name}.py" for name in _REGIONS),
    ),
    "arena cells": ("policies/cells/", "policies/layouts/", "policies/compaction/"),
    "prices": ("kvsim/costs/", "kvsim/simulation/backend.py"),
    "server": ("kvsim/simulation/",),
    "arrivals": ("workloads/", "benchmarks/speed.py", *(f"kvsim/simulation/{name}.py" for name in _ARRIVALS)),
    "SimPy": ("simpy/",),
    "figures": tuple(f"kvsim/simulation/{name}.py" for name in _FIGURES),
    OTHER: ("kvsim/", "policies/"),
}
"""Parts of the simulator with their files and folders; a file belongs where most of its path is named."""

_PREFIXES = sorted(
    ((prefix, part) for part, prefixes in PARTS.items() for prefix in prefixes), key=lambda p: -len(p[0])
)
_HOMES = (Path(__file__).resolve().parents[1], Path(simpy.__file__).resolve().parents[1])
"""The folders of our packages and of SimPy's."""


@functools.cache
def part_of(file: str) -> str | None:
    """The part that a file belongs to; None for files of Python and of other packages."""
    for home in _HOMES:
        if Path(file).is_relative_to(home):
            path = Path(file).relative_to(home).as_posix()
            return next((part for prefix, part in _PREFIXES if path.startswith(prefix)), None)
    return None


def sampled(work: Callable[[], object]) -> dict[str, Any]:
    """Do the work; return the samples in all, and for each part those in each of its functions.

    A sample belongs to the innermost function of a part: what Python, NumPy and others do for it is its own. What is in
    no part, or in this function, is left out.
    """
    found: dict[str, Counter[str]] = {part: Counter() for part in PARTS}

    def look(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not sampled.__code__:
            code: CodeType = frame.f_code
            part = part_of(code.co_filename)
            if part is not None:
                found[part][f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    return {"samples": sum(each.total() for each in found.values()), "parts": found}
