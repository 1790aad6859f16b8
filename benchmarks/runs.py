"""What the benchmarks of the simulator's speed share: a preset's task, the rounds of a run, ratios of two runs."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.speed import Task, run_isolated
from kvsim.installation import described
from kvsim.machine import BUSY_BELOW, processor
from kvsim.simulation.recorder import Detail
from policies.compiled import COMPILED, STATE

LIGHT, NORMAL, OVERLOAD = 0.3, 0.7, 1.3
"""Arrival rates over the service rate, the rate of completion when all requests arrive at once."""

BLOCKS = ("paged", "vllm", "chunked", "paged-window", "hf-reserved", "growing", "ring", "oracle")
"""Presets of blocks and regions, which get many requests; all others are arenas."""
MANY, FEW = 10_000, 2_000
BARE = 500_000
"""Timeouts of a run of bare SimPy."""
DRAWS = 2000


def task(
    policy: str, requests: int, trace: str | None = None, scheduler: str = "vllm", detail: Detail = "requests"
) -> Task:
    """A task with all requests at once, whose cache is large enough that slots are the bottleneck."""
    if policy in BLOCKS:
        slots, n_batch, cells = 256, 8192, 256 * (16384 if policy == "hf-reserved" else 4096)
    else:
        slots, n_batch, cells = 32, 2048, 32 * 16384 if policy == "streams" else 1 << 16
    return Task(
        policy,
        requests,
        slots=slots,
        n_batch=n_batch,
        cells=cells,
        slot_context=16384,
        prefix_cache=policy == "vllm",
        scheduler=scheduler,
        detail=detail,
        trace=trace,
    )


def scaled(requests: int, share: float) -> int:
    """A share of the requests, at least 4."""
    return max(4, round(requests * share))


def usual(policy: str, share: float) -> int:
    """Number of requests for a preset."""
    return scaled(MANY if policy in BLOCKS else FEW, share)


def service_rate(given: Task, share: float) -> float:
    """Requests per second that the task's server completes when all arrive at once, untimed. Raises ``RuntimeError``
    where it cannot be run."""
    requests = min(4 * given.slots, scaled(MANY, share))
    summary = run_isolated(replace(given, requests=requests, rate=None))["summary"]
    return float(summary["completed"] / summary["makespan_s"])


def bare_timeouts() -> float:
    """Timeouts per second of bare SimPy, in an isolated process."""
    return float(run_isolated(Task(bare=BARE))["events_per_s"])


@dataclass
class Run:
    """A task and the results of its rounds."""

    task: Task
    load: float
    found: list[dict[str, Any]] = field(default_factory=list)

    def take(self) -> None:
        """Run one round. Raises ``RuntimeError``."""
        self.found.append(run_isolated(self.task))

    @property
    def label(self) -> str:
        """The run in words."""
        task = self.task
        return f"{task.policy} under {task.scheduler}, load {self.load:g}, {task.detail}, {task.requests:,} requests"

    @property
    def wall_s(self) -> list[float]:
        """Seconds of each round."""
        return [each["wall_s"] for each in self.found]

    @property
    def us(self) -> float:
        """Microseconds per request."""
        return 1e6 * statistics.median(self.wall_s) / self.task.requests

    @property
    def disturbed(self) -> bool:
        """Whether other processes took a tenth of the core or more in some round."""
        return any(each["cpu_s"] < BUSY_BELOW * each["wall_s"] for each in self.found)

    def row(self) -> dict[str, Any]:
        """The run's row in a report; what was simulated is the same in every round."""
        summary, seconds = self.found[0]["summary"], statistics.median(self.wall_s)
        tokens = summary["prompt_tokens"] + summary["output_tokens"]
        return {
            "policy": self.task.policy,
            "scheduler": self.task.scheduler,
            "load": self.load,
            "detail": self.task.detail,
            "arrivals_per_s": self.task.rate,
            "requests": self.task.requests,
            **{key: summary[key] for key in ("completed", "failed", "truncated", "preemptions")},
            "unstable": summary["queue"]["unstable"],
            "us_per_request": self.us,
            "requests_per_s": self.task.requests / seconds,
            "tokens_per_s": tokens / seconds,
            "forward_passes_per_s": summary["forward_passes"] / seconds,
            **{key: statistics.median(each[key] for each in self.found) for key in ("before_mb", "peak_mb")},
            "disturbed": self.disturbed,
            "wall_s": self.wall_s,
            "cpu_s": [each["cpu_s"] for each in self.found],
        }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Ratio of medians with a 95 % interval; both are resampled by the same rounds."""
    over, under = np.array(above), np.array(below)
    drawn = np.random.default_rng(1).integers(len(over), size=(DRAWS, len(over)))
    ratios = np.median(over[drawn], axis=1) / np.median(under[drawn], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {"ratio": float(np.median(over) / np.median(under)), "low": float(low), "high": float(high)}


def interval(row: dict[str, float]) -> str:
    """A ratio and, where there were several rounds, its interval."""
    known = row["low"] < row["high"]
    return f"{row['ratio']:.2f}" + (f" ({row['low']:.2f} to {row['high']:.2f})" if known else "")


def medians(rounds: int) -> str:
    """How many rounds figures are from, in words."""
    return "one round" if rounds == 1 else f"medians of {rounds} rounds"


def follow(console: Console, lines: Iterable[str]) -> None:
    """Show each line of progress until the next comes; a run that fails ends the program with one line."""
    try:
        with console.status("") as status:
            for line in lines:
                status.update(line)
    except RuntimeError as e:
        console.print(str(e), markup=False)
        raise typer.Exit(1) from None


def circumstances(share: float, rounds: int, bare: Iterable[float]) -> dict[str, Any]:
    """What every report begins with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "python": platform.python_version(),
        "kvsim": described(),
        "core": COMPILED if STATE == COMPILED else "in Python",
        "versions": {name: version(name) for name in ("numpy", "simpy")},
        "share": share,
        "rounds": rounds,
        "bare_timeouts_per_s": [*bare],
    }
