"""Vidur (github.com/microsoft/vidur; Agrawal et al., MLSys 2024) on requests of the same lengths, in its own
environment.

Only ``Simulator.run`` is timed, without imports, fitting and generation before it, and output after it. Plots, traces
and all metrics but those of requests are switched off where there is an option for it.
"""

from __future__ import annotations

import csv
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed import Task, one_thread

_MARK = "measured:"

_DRIVER = f"""
import os, time
from vidur.config import SimulationConfig
from vidur.simulator import Simulator
config = SimulationConfig.create_from_cli_args()
try:
    from vidur.utils.random import set_seeds
    set_seeds(config.seed)
except ImportError:
    pass
simulator = Simulator(config)
began = time.perf_counter()
simulator.run()
print("{_MARK}", time.perf_counter() - began, flush=True)
os._exit(0)
"""

_OFF = (
    "store_plots",
    "enable_chrome_trace",
    "write_json_trace",
    "store_batch_metrics",
    "store_utilization_metrics",
    "store_operation_metrics",
    "store_token_completion_metrics",
    "keep_individual_batch_metrics",
)
_PREDICTORS = ("random_forrest_execution_time_predictor_config", "random_forest_execution_time_predictor_config")
"""The option's name, misspelt in most versions."""


class VidurError(RuntimeError):
    """Vidur could not be run; the message is one line."""


@dataclass
class Vidur:
    """A checkout of Vidur, and how to run it."""

    folder: Path
    python: Path
    qps: float
    """Arrivals per second."""
    more: list[str] = field(default_factory=list)
    """Further options, which override those given here."""
    timeout_s: float = 3600.0

    def run(self, task: Task) -> float:
        """Seconds of a run with requests as long as the task's. Raises ``VidurError``."""
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / "lengths.csv"
            with trace.open("w", newline="", encoding="ascii") as text:
                rows = csv.writer(text)
                rows.writerow(("num_prefill_tokens", "num_decode_tokens"))
                rows.writerows((request.prompt_tokens, request.output_tokens) for request in task.workload())
            said = self._process(self.options(task, trace, Path(scratch)))
        seconds = re.search(rf"^{_MARK} (\S+)$", said, re.MULTILINE)
        if seconds is None:
            raise VidurError("it ended without having run")
        return float(seconds[1])

    def options(self, task: Task, trace: Path, scratch: Path) -> list[str]:
        """Command-line options, under the names that this checkout knows."""
        known = set(re.findall(r"--[\w-]+", self._process(["--help"])))
        longest = task.slot_context
        wanted = {
            "request_generator_config_type": "synthetic",
            "synthetic_request_generator_config_num_requests": task.requests,
            "length_generator_config_type": "trace",
            "trace_request_length_generator_config_trace_file": trace,
            "trace_request_length_generator_config_max_tokens": longest,
            "interval_generator_config_type": "poisson",
            "poisson_request_interval_generator_config_qps": self.qps,
            "replica_scheduler_config_type": "sarathi",
            "sarathi_scheduler_config_batch_size_cap": task.slots,
            "sarathi_scheduler_config_chunk_size": task.n_batch,
        }
        if missing := [name for name in wanted if f"--{name}" not in known]:
            raise VidurError(f"it has no option --{missing[0]}")
        for predictor in _PREDICTORS:
            wanted[f"{predictor}_prediction_max_prefill_chunk_size"] = longest
            wanted[f"{predictor}_prediction_max_batch_size"] = task.slots
            wanted[f"{predictor}_prediction_max_tokens_per_request"] = longest
        wanted["metrics_config_output_dir"] = wanted["output_dir"] = scratch
        options = [f"--{name}={value}" for name, value in wanted.items() if f"--{name}" in known]
        for name in _OFF:
            # Without a --no- form the option takes a value, and only an empty one is false.
            if f"--no-metrics_config_{name}" in known:
                options.append(f"--no-metrics_config_{name}")
            elif f"--metrics_config_{name}" in known:
                options.append(f"--metrics_config_{name}=")
        return [*options, *self.more]

    def _process(self, options: list[str]) -> str:
        command = [str(self.python), "-c", _DRIVER, *options]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=one_thread(), capture_output=True, text=True, timeout=self.timeout_s
            )
        except subprocess.TimeoutExpired:
            raise VidurError(f"not done after {self.timeout_s:,.0f} s") from None
        except OSError as e:
            raise VidurError(f"{e.filename}: {e.strerror}") from None
        if done.returncode:
            raise VidurError((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
        return done.stdout

    def facts(self) -> dict[str, object]:
        """Commit and options of the comparison."""
        try:
            head = subprocess.run(
                ["git", "-C", str(self.folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip()
        except OSError:
            head = ""
        return {"commit": head or None, "qps": self.qps, "options": self.more}
