"""The machine that runs this process, and how much of it the process gets."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BUSY_BELOW = 0.9
"""Smallest share of a core's time at which a measurement can be trusted."""


@dataclass(slots=True)
class Stopwatch:
    """Wall and processor seconds of a ``measuring`` block, set when the block ends."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        """Processor seconds per wall second, at most 1: lower if other processes used the core."""
        return min(self.cpu_s / self.wall_s, 1.0) if self.wall_s > 0 else 1.0


@contextmanager
def measuring() -> Iterator[Stopwatch]:
    """Measure the time of a block, and let BLAS use one thread in it.

    One thread, since on a shared machine a second core is free at some times and not at others.
    """
    from threadpoolctl import threadpool_limits

    watch = Stopwatch()
    with threadpool_limits(1):
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield watch
        finally:
            watch.wall_s = time.perf_counter() - wall
            watch.cpu_s = time.process_time() - cpu


def processor() -> str:
    """The name of the processor as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # Not Linux: the platform's name for it has to do.
    return platform.processor() or platform.machine()


def blas() -> str:
    """Name and version of the BLAS library that NumPy uses."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    loaded = [library for library in threadpool_info() if library.get("user_api") == "blas"]
    # SciPy may have loaded a BLAS of its own.
    for library in sorted(loaded, key=lambda library: "numpy" not in str(library.get("filepath"))):
        return f"{library.get('internal_api')} {library.get('version')}"
    return "unknown BLAS"


def processor_ticks() -> tuple[int, ...] | None:
    """Ticks of all processors since the start, by what they were used for; None where the system does not say.

    user, nice, system, idle, iowait, irq, softirq and steal, of ``proc_stat(5)``.
    """
    try:
        with open("/proc/stat", encoding="utf-8") as lines:
            ticks = tuple(int(n) for n in lines.readline().split()[1:9])
    except (OSError, ValueError):
        return None  # Not Linux.
    return ticks if len(ticks) == 8 else None


def ticks_per_s() -> int:
    """Ticks in a second of processor time."""
    return os.sysconf("SC_CLK_TCK")


def processor_time() -> tuple[int, int] | None:
    """Ticks in which the processors were idle, and all ticks, since the start; None where the system does not say."""
    ticks = processor_ticks()
    return None if ticks is None else (ticks[3] + ticks[4], sum(ticks))


def process_age_s() -> float:
    """Seconds since this process began; 0 on systems that do not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as line:
            # Behind its name, which may have spaces in it, the 20th says when it began: ticks since the system did.
            began_s = int(line.read().rsplit(")", 1)[1].split()[19]) / ticks_per_s()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def system_load() -> float:
    """Runnable processes, averaged over the last minute; 0 where the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
