"""One run of a sweep, as a worker executes it. Workers import nothing beyond what this module needs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvsim.errors import UserError
from kvsim.experiments.fingerprint import code_version
from kvsim.experiments.measures import Objectives, WarmupRule, latency_sketches, measures, times_digest
from kvsim.experiments.policy_code import describe_code
from kvsim.experiments.store import Row, Timing
from kvsim.scenario.scenario import Scenario
from kvsim.simulation.run import run
from policies import PolicyFactory, available
from workloads import WorkloadError


@dataclass(frozen=True)
class RunTask:
    """A run to execute, as it is sent to a worker."""

    digest: str
    number: int
    replication: int
    policy: str
    settings: str
    """The value of each axis, as JSON."""
    scenario: Scenario
    warmup: WarmupRule
    slo: Objectives | None
    factory: PolicyFactory | None = None
    """What builds the policy, where that was given as a callable."""
    check: bool = False
    """Whether the policy is held to its word at every step."""


@dataclass(frozen=True)
class RunTasks:
    """A callable that executes runs in whichever process calls it."""

    code: str
    """The code version that must execute them."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """What ``describe_code`` says of each plug-in that they use, which must be that of the process that executes them.
    """

    def __call__(self, tasks: Sequence[RunTask]) -> list[tuple[Row, Timing]]:
        """Execute the runs. Raises ``UserError`` if this process has another version of the code."""
        if code_version() != self.code:
            there = f"{platform.node()} has {code_version()}"
            raise UserError(f"the workers run a different kvsim: {there}, this process has {self.code}")
        for policy, code in self.plugins.items():
            if policy not in available() or describe_code(policy) != code:
                raise UserError(f"{platform.node()}: the workers have no plug-in {policy!r} identical to the one here")
        return list(_execute(tasks))


def _execute(tasks: Sequence[RunTask]) -> Iterator[tuple[Row, Timing]]:
    for task in tasks:
        began = time.perf_counter()
        row = _run(task)
        ended = datetime.now(UTC).isoformat(timespec="milliseconds")
        yield row, Timing(task.digest, time.perf_counter() - began, platform.node(), os.getpid(), ended)


def _run(task: RunTask) -> Row:
    scenario = task.scenario
    known = (task.digest, task.number, task.replication, task.policy, task.settings, scenario.to_toml())
    try:
        result = run(scenario, policy=task.factory, detail="rows", check=task.check)
        measured, times = measures(result, task.warmup, task.slo), times_digest(result)
        sketches = latency_sketches(result, int(measured["warmup_requests"] or 0))
    except (UserError, WorkloadError) as e:
        return Row(*known, "failed", error=one_line(str(e)))
    except Exception as e:  # Any other error is stored and reported at the end; it must not stop the other runs.
        return Row(*known, "failed", error=one_line(f"{type(e).__name__}: {e}"))
    summary = {key: value for key, value in result.summary.items() if key != "wall_s"}
    return Row(
        *known,
        "done",
        json.dumps(measured, allow_nan=False),
        json.dumps(summary, allow_nan=False),
        warnings=json.dumps(result.warnings),
        times=times,
        sketches=json.dumps(sketches),
    )


def one_line(text: str) -> str:
    """Join the lines of a message into one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())[:1000]
