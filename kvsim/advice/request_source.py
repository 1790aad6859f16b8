"""Open, describe or fit a request stream that users name: a trace file, a scenario, or a named workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsim.advice.workload_fit import WorkloadFit, fit
from kvsim.errors import UserError, did_you_mean
from kvsim.scenario.builtin import builtin_names
from kvsim.scenario.named_workloads import NAMED
from kvsim.scenario.scenario import Scenario, load_scenario
from workloads import Workload, open_trace
from workloads.fitting.statistics import Statistics, describe


def open_stream(source: str | Path | Scenario, kind: str | None = None, **options: Any) -> tuple[Workload, str]:
    """Open a request stream and return it with a name.

    ``kind``: the format of a trace file, needed if it cannot be detected. ``options``: those of the trace reader, such
    as ``skip_bad_rows=True``, ``failed="drop"`` or ``clock_reset="continue"``. Raises ``UserError`` and
    ``WorkloadError``.
    """
    name = str(source)
    known = isinstance(source, Scenario) or name in NAMED or name in builtin_names() or name.endswith(".toml")
    if kind is not None or not known:
        path = Path(name)
        if (hint := did_you_mean(name, [*NAMED, *builtin_names()])) and kind is None and not path.exists():
            raise UserError(f"{name}: no such file, scenario or named workload; {hint}")
        return open_trace(path, kind, **options), path.name.split(".")[0] or "trace"
    if options:
        raise UserError(f"{name}: {next(iter(options))} is an option of trace files; a scenario sets it itself")
    if name in NAMED:
        source = load_scenario({"name": name, "workload": {"kind": "named", "name": name}})
    scenario = load_scenario(source)
    return scenario.build_workload(), scenario.name


def describe_workload(source: str | Path | Scenario, kind: str | None = None, **options: Any) -> Statistics:
    """Describe a request stream statistically; the arguments are those of ``open_stream``."""
    return describe(open_stream(source, kind, **options)[0])


def fit_workload(
    source: str | Path | Scenario, kind: str | None = None, *, seed: int = 1, **options: Any
) -> WorkloadFit:
    """Fit a generator to a request stream; see ``open_stream`` and ``workload_fit.fit``."""
    stream, name = open_stream(source, kind, **options)
    return fit(stream, name, seed=seed)
