"""How long a command takes to answer, compared with importing NumPy and SimPy: ``python -m benchmarks.startup
[--rounds N] [--json]``.

Every round starts ``python -c "import numpy, simpy"`` and then each command once, each in a new process, so that a busy
machine slows all of them alike. A ratio is the median over the rounds of a command's time over the import's time in the
same round; its interval is that of the sign test (order statistics, at least 95 %), which assumes nothing about how
times are distributed. Exits with 1 if a ratio is over its goal.

The first round is not counted: it reads files from disk and compiles what has no byte code yet.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import typer

from benchmarks.speed import ROOT
from kvsim.cli.app import COMMANDS

BASELINE = ("-c", "import numpy, simpy")
ANSWERS = 2.0
"""The goal for what simulates nothing: this many times the baseline."""
RUNS = 4.0
"""The goal for a short run."""
GOALS: dict[str, float] = {
    "--help": ANSWERS,
    "--version": ANSWERS,
    "questions slow": ANSWERS,
    "policies": ANSWERS,
    "policies paged": ANSWERS,
    "scenario list": ANSWERS,
    "scenario show identical": ANSWERS,
    "plan --list": ANSWERS,
    "plan --model llama-3.1-8b": ANSWERS,
    "workload list": ANSWERS,
    "workload show azure-conv": ANSWERS,
    "run identical": RUNS,
}
HELP = {f"{command} --help": ANSWERS for command in COMMANDS}


@dataclass(frozen=True)
class Started:
    """What one process took until it ended, in seconds."""

    wall_s: float
    processor_s: float


@dataclass(frozen=True)
class Row:
    """One command: medians in seconds, and its time as a multiple of the baseline's in the same rounds."""

    command: str
    wall_s: float
    processor_s: float
    ratio: float
    low: float
    high: float
    processor_ratio: float
    goal: float


def start(arguments: Sequence[str], folder: str) -> Started:
    """Run Python with these arguments in a folder of its own. Raises ``RuntimeError`` if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    assert process.stderr is not None
    with process.stderr as errors:
        if os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"{' '.join(arguments)}: {errors.read().decode()}")
    process.returncode = 0  # It has been waited for.
    return Started(wall_s, used.ru_utime + used.ru_stime)


def sign_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Interval for the median with at least this level; the range of the values where they are too few for it."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < n // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - level:
            break
        rank += 1
    at = max(rank - 1, 0)
    return ordered[at], ordered[n - 1 - at]


def measure(goals: dict[str, float], rounds: int) -> tuple[Started, list[Row]]:
    """Medians of the baseline, and a row for each command."""
    baseline: list[Started] = []
    taken: dict[str, list[Started]] = {command: [] for command in goals}
    with tempfile.TemporaryDirectory() as folder:
        for counted in (False, *[True] * rounds):
            started = start(BASELINE, folder)
            if counted:
                baseline.append(started)
            for command, times in taken.items():
                started = start(("-m", "kvsim", *command.split()), folder)
                if counted:
                    times.append(started)
    rows = []
    for command, times in taken.items():
        ratios = [t.wall_s / b.wall_s for t, b in zip(times, baseline, strict=True)]
        processor = [t.processor_s / b.processor_s for t, b in zip(times, baseline, strict=True)]
        low, high = sign_interval(ratios)
        rows.append(
            Row(
                command,
                median(t.wall_s for t in times),
                median(t.processor_s for t in times),
                median(ratios),
                low,
                high,
                median(processor),
                goals[command],
            )
        )
    return Started(median(b.wall_s for b in baseline), median(b.processor_s for b in baseline)), rows


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in which each command is started once.", min=1)] = 10,
    every_help: Annotated[bool, typer.Option("--every-help", help="Measure --help of every command too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure how long commands take to answer, as a multiple of importing NumPy and SimPy."""
    baseline, rows = measure(GOALS | HELP if every_help else GOALS, rounds)
    if as_json:
        print(json.dumps({"rounds": rounds, "baseline": asdict(baseline), "rows": [asdict(row) for row in rows]}))
    else:
        print(f"import numpy, simpy: {baseline.wall_s:.3f} s ({baseline.processor_s:.3f} s of the processor)")
        print(f"{'kvsim':32} {'s':>6} {'ratio':>6} {'interval':>14} {'processor':>10} {'goal':>5}")
        for row in rows:
            interval = f"{row.low:.2f} to {row.high:.2f}"
            mark = "" if row.ratio <= row.goal else "  over"
            print(
                f"{row.command:32} {row.wall_s:6.3f} {row.ratio:6.2f} {interval:>14} {row.processor_ratio:10.2f} "
                f"{row.goal:5.0f}{mark}"
            )
        print(f"medians of {rounds} rounds, 95 % intervals of the median ratio")
    if any(row.ratio > row.goal for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
