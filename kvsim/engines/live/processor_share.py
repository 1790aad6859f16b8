"""What a server had of its machine's processors for a while: how long it waited for one, and who else used them.

A server that other programs keep from its processors is slow whatever its settings are. All of it is read from Linux's
``/proc``: where there is none, or the server is not of this machine, nothing is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvsim import machine

_PROC = Path("/proc")
_BUSY_WAITED, _BUSY_STOLEN = 0.1, 0.05
"""From which share of waiting, or of stolen time, a machine counts as busy."""
_BUSY_OTHERS, _FULL_IDLE = 0.25, 0.1
"""So it does from this share of all processors that others use, if no more than this is idle: they share its memory."""


class Reading(NamedTuple):
    """Counters at a moment; seconds and ticks since the start of the machine or of a process."""

    at_s: float
    ticks: tuple[int, ...] | None
    """See ``machine.processor_ticks``."""
    own_s: float
    """Processor seconds of this process."""
    server_s: float
    """Processor seconds of the server's processes."""
    threads: Mapping[str, tuple[int, int]]
    """For each thread of the server, nanoseconds that it ran, and that it waited for a processor."""


@dataclass(frozen=True)
class ProcessorShare:
    """What a server had of the processors; None for what is not known."""

    waited: float | None
    """Share of the time in which its threads could have run that they waited for a processor; what a thread waited
    counts by how long it ran. vLLM has many that only look from time to time whether there is something to do.
    """
    others: float | None
    """Processors that other programs used, on average."""
    idle: float | None
    """Share of the processors' time in which nothing used them."""
    stolen: float | None
    """Share of the processors' time that went to other virtual machines."""
    load: float
    """Runnable processes, averaged over the last minute."""
    cores: int

    @property
    def busy(self) -> bool:
        """Whether other work took so much of the processors that it can have slowed the server down."""
        crowded = (self.others or 0.0) >= _BUSY_OTHERS * self.cores and (self.idle or 0.0) <= _FULL_IDLE
        return (self.waited or 0.0) >= _BUSY_WAITED or (self.stolen or 0.0) >= _BUSY_STOLEN or crowded

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the processors."""
        return self.waited is not None or self.others is not None

    def to_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return dict(vars(self))


class ProcessorWatch:
    """Looks at the processors from now on, until ``share`` is called."""

    def __init__(self, server: int | None):
        """``server``: the process of the server, whose children count too; None if it is not known."""
        self._server = server
        self.began = _read(server)

    def share(self) -> ProcessorShare:
        """What the server had of the processors since the beginning."""
        return share_between(self.began, _read(self._server))


def share_between(before: Reading, after: Reading) -> ProcessorShare:
    """What the server had of the processors between two readings."""
    ran = waited = 0.0
    for thread in before.threads.keys() & after.threads.keys():
        own, late = (b - a for a, b in zip(before.threads[thread], after.threads[thread], strict=True))
        if own + late:
            ran += own + 1  # One that was never let run counts too.
            waited += (own + 1) * late / (own + late)
    others = idle_share = stolen = None
    if before.ticks is not None and after.ticks is not None and after.at_s > before.at_s:
        user, nice, system, idle, iowait, irq, softirq, steal = (
            b - a for a, b in zip(before.ticks, after.ticks, strict=True)
        )
        busy = user + nice + system + irq + softirq
        total = max(busy + idle + iowait + steal, 1)
        idle_share, stolen = (idle + iowait) / total, steal / total
        known_s = after.own_s - before.own_s + after.server_s - before.server_s
        if before.threads:
            others = max(0.0, (busy / machine.ticks_per_s() - known_s) / (after.at_s - before.at_s))
    waiting = waited / ran if ran else None
    return ProcessorShare(waiting, others, idle_share, stolen, machine.system_load(), os.cpu_count() or 1)


def _read(server: int | None) -> Reading:
    processes = [] if server is None else _with_children(server)
    threads: dict[str, tuple[int, int]] = {}
    server_s = 0.0
    for process in processes:
        try:
            fields = _stat(process)
            server_s += (int(fields[11]) + int(fields[12])) / machine.ticks_per_s()  # utime, stime
            for thread in (_PROC / str(process) / "task").iterdir():
                ran, waited, _ = (thread / "schedstat").read_text().split()
                threads[thread.name] = int(ran), int(waited)
        except (OSError, ValueError, IndexError):
            continue  # Ended meanwhile, or not Linux.
    return Reading(time.monotonic(), machine.processor_ticks(), time.process_time(), server_s, threads)


def _stat(process: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name of the program, which may have blanks: state, parent, ..."""
    return (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()


def _with_children(process: int) -> list[int]:
    """A process and all that descend from it; nothing where that cannot be known."""
    parents = {}
    try:
        for entry in os.listdir(_PROC):
            if entry.isdigit():
                parents[int(entry)] = int(_stat(int(entry))[1])
    except (OSError, ValueError, IndexError):
        pass  # One that ended meanwhile; what is known by then has to do.
    found = [process] if process in parents else []
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
