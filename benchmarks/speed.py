"""A scenario for the benchmarks of the simulator's speed, and the measurement of one run in an isolated process.

``python -m benchmarks.speed`` reads a task as JSON from its standard input, runs it and prints the result as JSON: a
process for each run, so that its peak memory is its own and no run benefits from an earlier one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import simpy
from pydantic import Field

from benchmarks.sampling import sampled
from kvsim.costs.load_profile import load_profile
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.arrivals import Process
from kvsim.simulation.backend import SimulatedBackend
from kvsim.simulation.recorder import Detail, Recorder
from kvsim.simulation.run import drive
from kvsim.simulation.set_up import build_policy, cost_model
from workloads import AzureTrace, Lengths, Prefixes, Synthetic, Workload, named_rng, no_gaps, poisson_gaps
from workloads.generators.gaps import Gaps, moments
from workloads.request import Request

ROOT = Path(__file__).resolve().parents[1]

# fmt: off
_SHARES = (0, 1, 2, 3, 5, 10, 15, 20, 25, 30, 40, 45, 50, 60, 67, 70, 75, 80, 85, 90, 92, 95, 99, 99.5, 99.9,
           99.95, 100)
_PROMPTS = (2, 29, 91, 161, 181, 207, 372, 387, 396, 403, 703, 984, 1020, 1071, 1109, 1130, 1189, 1315, 1876, 2734,
            4073, 4083, 4142, 4831, 6179, 6570, 14050)
_OUTPUTS = (7, 16, 24, 32, 41, 54, 67, 77, 85, 91, 103, 113, 129, 177, 371, 384, 395, 400, 411, 424,
            429, 451, 601, 643, 954, 1000, 1000)
# fmt: on
"""Percentages, and the tokens that these shares of the requests do not exceed: quantiles of the conversation trace of
the Azure LLM inference data set of 2023 (github.com/Azure/AzurePublicDataset, CC-BY-4.0; Patel et al., "Splitwise",
ISCA 2024)."""

_PAGE = 4096
"""Requests drawn at a time."""
_WARM_UP = 4
"""Requests of a run before the one that is timed, by whose end all modules and the profile have been read."""


@dataclass(frozen=True)
class Quantiles:
    """Lengths drawn from a table of quantiles, linear between them."""

    tokens: Sequence[int]

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """``n`` independent lengths."""
        return self.at(rng.random(n))

    def at(self, u: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Lengths at these quantiles."""
        drawn = np.interp(u, np.array(_SHARES) / 100, self.tokens)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


PROMPTS: Lengths = Quantiles(_PROMPTS)
OUTPUTS: Lengths = Quantiles(_OUTPUTS)


@dataclass(frozen=True)
class Repeated:
    """Requests with the lengths of a trace, repeated in order, and drawn gaps."""

    seed: int
    n_requests: int
    gaps: Gaps
    lengths: Sequence[tuple[int, int]]
    users: None = None
    notes: tuple[str, ...] = ()
    prefixes: Prefixes = "tokens"

    def __iter__(self) -> Iterator[Request]:
        draw, now = self.gaps(named_rng(self.seed, "arrivals")), 0.0
        for first in range(0, self.n_requests, _PAGE):
            n = min(_PAGE, self.n_requests - first)
            times = moments(now, draw(n)).tolist()
            for i, now in enumerate(times, first):
                yield Request(i, now, *self.lengths[i % len(self.lengths)])


class GivenScenario(Scenario):
    """A scenario with a workload that no scenario file can describe."""

    requests: Annotated[Any, Field(exclude=True, repr=False)] = None

    def build_workload(self) -> Workload:
        """The given workload."""
        given: Workload = self.requests
        return given


@dataclass(frozen=True)
class Task:
    """The work of one process."""

    policy: str = ""
    requests: int = 0
    rate: float | None = None
    """Arrivals per second, Poisson; None: all at once."""
    slots: int = 1
    n_batch: int = 1
    cells: int = 2
    slot_context: int = 2
    prefix_cache: bool = False
    scheduler: str = "vllm"
    detail: Detail = "requests"
    trace: str | None = None
    """Azure file with the requests' lengths; None: drawn lengths."""
    count: bool = False
    """Count SimPy's events instead of timing the run."""
    sample: bool = False
    """Say in which parts of the simulator the run is while it runs, instead of timing it."""
    bare: int = 0
    """If positive, time this many events of bare SimPy instead of a run."""

    def workload(self) -> Workload:
        """The requests."""
        gaps = no_gaps if self.rate is None else poisson_gaps(self.rate)
        if self.trace is None:
            return Synthetic(1, self.requests, gaps, PROMPTS, OUTPUTS)
        return Repeated(1, self.requests, gaps, _lengths(self.trace))

    def world(self) -> GivenScenario:
        """The scenario of the run."""
        return GivenScenario.model_validate(
            {
                "name": "scale",
                "server": {
                    "scheduler": self.scheduler,
                    "slots": self.slots,
                    "n_batch": self.n_batch,
                    "n_ubatch": self.n_batch,
                    "slot_context": self.slot_context,
                },
                "cache": {"cells": self.cells, "prefix_cache": self.prefix_cache},
                "requests": self.workload(),
            }
        )


@functools.cache
def _lengths(trace: str) -> Sequence[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in AzureTrace(Path(trace))]


def simulate(world: GivenScenario, policy: str, detail: Detail) -> dict[str, Any]:
    """The summary of ``kvsim.run(world, policy, detail=detail)``, which itself would reread the scenario and lose the
    given workload."""
    costs = cost_model(world, load_profile(world.machine.profile, world.folder))
    chosen = build_policy(world, policy, costs)
    backend, recorder = SimulatedBackend(costs, chosen.kernel, chosen.groups), Recorder(detail=detail)
    return drive(world, chosen, backend, recorder, costs.profile)[0].summary


def bare_events(n: int = 200_000) -> float:
    """Timeouts per second of a single SimPy process."""
    env = simpy.Environment()

    def tick() -> Process:
        for _ in range(n):
            yield env.timeout(1.0)

    env.process(tick())
    began = time.perf_counter()
    env.run()
    return n / (time.perf_counter() - began)


class _Counted(simpy.Environment):
    """Counts the events that are processed in any environment."""

    steps = 0

    def step(self) -> None:
        """Count the event."""
        _Counted.steps += 1
        super().step()


def run_task(task: Task) -> dict[str, Any]:
    """Run the task in this process."""
    if task.bare:
        return {"events_per_s": bare_events(task.bare)}
    simulate(dataclasses.replace(task, requests=_WARM_UP).world(), task.policy, task.detail)
    world = task.world()
    if task.count:
        with patch.object(simpy, "Environment", _Counted):
            simulate(world, task.policy, task.detail)
        return {"events": _Counted.steps}
    if task.sample:
        return sampled(lambda: simulate(world, task.policy, task.detail))
    before = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    summary = simulate(world, task.policy, task.detail)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "before_mb": before, "peak_mb": memory("VmHWM"), "summary": summary}


def memory(what: str) -> float:
    """Resident MB of the process now (``VmRSS``) or at its peak (``VmHWM``).

    ``ru_maxrss`` is only the fallback: on Linux it is inherited from the parent process.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(what))
    except (OSError, StopIteration):
        return megabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def megabytes(maxrss: int) -> float:
    """``ru_maxrss`` in MB; the system gives it in kilobytes, that of Apple in bytes."""
    return maxrss / 1e6 if sys.platform == "darwin" else maxrss * 1024 / 1e6


def run_isolated(task: Task) -> dict[str, Any]:
    """Run the task in an isolated process. Raises ``RuntimeError`` with the last line of its error output."""
    given = json.dumps(dataclasses.asdict(task))
    command = [sys.executable, "-m", "benchmarks.speed"]
    # Compiled modules have no Python frames, so that a sample would take their time for their caller's.
    env = one_thread() | ({"KVSIM_PURE": "1"} if task.sample else {})
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=env)
    if done.returncode:
        raise RuntimeError(f"{task.policy}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def import_s() -> float:
    """Seconds that a new process needs to import the simulator."""
    code = "import time; t = time.perf_counter(); import kvsim.simulation.run; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return float(done.stdout)


def one_thread() -> dict[str, str]:
    """Environment variables that limit the BLAS to one thread."""
    return {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}


if __name__ == "__main__":
    print(json.dumps(run_task(Task(**json.load(sys.stdin)))))
