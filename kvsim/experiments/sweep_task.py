"""One run of a sweep, as a worker makes it. Workers import this module and what it needs, and no more."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvsim.errors import UserError
from kvsim.experiments.fingerprint import code_version
from kvsim.experiments.measures import Objectives, Rule, measures
from kvsim.experiments.store import Row, Timing
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.run import run
from workloads import WorkloadError


@dataclass(frozen=True)
class Task:
    """A run to be made, as it travels to a worker."""

    digest: str
    number: int
    replication: int
    policy: str
    settings: str
    """JSON."""
    scenario: Scenario
    warmup: Rule
    slo: Objectives | None


@dataclass(frozen=True)
class Make:
    """Makes runs, wherever it is called."""

    code: str
    """The code version that they must be made by."""

    def __call__(self, tasks: Sequence[Task]) -> list[tuple[Row, Timing]]:
        """Make these. Raises ``UserError`` where the code here is another."""
        if code_version() != self.code:
            here = f"{platform.node()} has {code_version()}"
            raise UserError(f"the workers run another kvsim than this process: {here}, here is {self.code}")
        return list(_make(tasks))


def _make(tasks: Sequence[Task]) -> Iterator[tuple[Row, Timing]]:
    for task in tasks:
        began = time.perf_counter()
        row = _run(task)
        ended = datetime.now(UTC).isoformat(timespec="milliseconds")
        yield row, Timing(task.digest, time.perf_counter() - began, platform.node(), os.getpid(), ended)


def _run(task: Task) -> Row:
    scenario = task.scenario
    known = (task.digest, task.number, task.replication, task.policy, task.settings, scenario.to_toml())
    try:
        result = run(scenario, detail="tables")
        found = measures(result, task.warmup, task.slo)
    except (UserError, WorkloadError) as e:
        return Row(*known, "failed", error=one_line(str(e)))
    except Exception as e:  # Whatever it is, it is this run's: kept, shown at the end, and no reason to stop the rest.
        return Row(*known, "failed", error=one_line(f"{type(e).__name__}: {e}"))
    summary = {key: value for key, value in result.summary.items() if key != "wall_s"}
    return Row(*known, "done", json.dumps(found, allow_nan=False), json.dumps(summary, allow_nan=False))


def one_line(text: str) -> str:
    """All lines of a message in one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())[:1000]
