"""A million requests as a user would type them: ``kvsim run FILE --policy paged`` and ``--policy llama.cpp-today``.

The file says nothing of the server. Seconds are those of the whole process, its start included; ``--json`` is added to
learn how many requests failed. ``python -m benchmarks.presets --million`` makes these runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.runs import bare_timeouts, circumstances, scaled
from benchmarks.speed import ROOT, megabytes, one_thread

MILLION = 1_000_000
POLICIES = ("paged", "llama.cpp-today")
FILE = """[workload]
kind = "poisson"
requests = {requests}
rate = 2.0
prompt_tokens = {{ kind = "lognormal", mu = 6.633, sigma = 0.985 }}
output_tokens = {{ kind = "lognormal", mu = 5.019, sigma = 0.859 }}
"""

_LAUNCH = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)
wall, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
if done.returncode:
    sys.exit(done.returncode)
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "maxrss": used.ru_maxrss, "printed": done.stdout}))
"""
"""Times a command from a small process: a process's peak memory is never less than that of the one that started it."""


def command(file: Path, policy: str) -> list[str]:
    """What a user types."""
    return ["kvsim", "run", str(file), "--policy", policy]


def run_typed(words: list[str]) -> dict[str, Any]:
    """Run the command, with ``--json``: its seconds, peak MB and summary. Raises ``RuntimeError`` with the last line of
    its error output."""
    program, *rest = words
    launched = [sys.executable, "-c", _LAUNCH, sys.executable, "-m", program, *rest, "--json"]
    done = subprocess.run(launched, capture_output=True, text=True, cwd=ROOT, env=one_thread())
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    summary = json.loads(found.pop("printed"))
    return {**found, "peak_mb": megabytes(found.pop("maxrss")), "summary": summary}


class MillionBenchmark:
    """The runs of a share of a million requests, by turns."""

    def __init__(self, share: float):
        self._share = share
        self.requests = scaled(MILLION, share)
        self.found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
        self.bare: list[float] = []

    def run_all(self, rounds: int) -> Iterator[str]:
        """Make all runs; yields a line of progress before each. Raises ``RuntimeError``."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "million.toml"
            file.write_text(FILE.format(requests=self.requests), encoding="utf-8")
            for number in range(rounds):
                for policy, found in self.found.items():
                    yield f"round {number + 1} of {rounds}: {' '.join(command(Path(file.name), policy))}"
                    self.bare.append(bare_timeouts())
                    found.append(run_typed(command(file, policy)))

    def report(self, rounds: int) -> dict[str, Any]:
        """The figures as they are saved."""
        rows = []
        for policy, found in self.found.items():
            summary = found[0]["summary"]
            rows.append(
                {
                    "policy": policy,
                    "requests": self.requests,
                    **{key: summary[key] for key in ("completed", "failed", "truncated")},
                    "unstable": summary["queue"]["unstable"],
                    "seconds": statistics.median(each["wall_s"] for each in found),
                    "peak_mb": statistics.median(each["peak_mb"] for each in found),
                    "wall_s": [each["wall_s"] for each in found],
                    "cpu_s": [each["cpu_s"] for each in found],
                }
            )
        return {
            **circumstances(self._share, rounds, self.bare),
            "file": FILE.format(requests=self.requests),
            "runs": rows,
        }
