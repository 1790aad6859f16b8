"""Open, describe or fit a request stream that users name: a trace file, a scenario, or a named workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.advice.workload_fit.fit import WorkloadFit, describe_stream, fit
from kvsim.errors import UserError, did_you_mean
from kvsim.scenario.builtin import builtin_names
from kvsim.scenario.named_workloads import NAMED
from kvsim.scenario.scenario import Scenario, load_scenario
from kvsim.scenario.trace_files import trace_scenario
from workloads import Workload
from workloads.fitting.statistics import Statistics
from workloads.traces.table_row import Time


class Stream(NamedTuple):
    """A request stream."""

    workload: Workload
    name: str
    block_size: int
    """Tokens in a block of a prefix cache: the scenario's, or the trace's own."""


def open_stream(
    source: str | Path | Scenario,
    kind: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    time: Time | None = None,
    **options: Any,
) -> Stream:
    """Open a request stream.

    ``kind``: the format of a trace file, needed if it cannot be detected. ``columns``, ``time``: which column of a
    table is what, and the unit of its arrivals (``trace_scenario``). ``options``: further keys of a trace's workload,
    such as ``skip_bad_rows=True``, ``failed="drop"`` or ``clock_reset="continue"``. Raises ``UserError`` and
    ``WorkloadError``.
    """
    name = str(source)
    known = isinstance(source, Scenario) or name in NAMED or name in builtin_names() or name.endswith(".toml")
    of_table = {"columns": columns, "time": time}
    if kind is not None or not known:
        path = Path(name)
        if (hint := did_you_mean(name, [*NAMED, *builtin_names()])) and kind is None and not path.exists():
            raise UserError(f"{name}: no such file, scenario or named workload; {hint}")
        scenario = trace_scenario(name, kind, columns=columns, time=time, own_blocks=True, **options)
    else:
        for option in (*options, *(option for option, value in of_table.items() if value)):
            raise UserError(f"{name}: {option} is an option of trace files; a scenario sets it itself")
        if name in NAMED:
            source = load_scenario({"name": name, "workload": {"kind": "named", "name": name}})
        scenario = load_scenario(source)
    return Stream(scenario.build_workload(), scenario.name, scenario.cache.block_size)


def describe_workload(source: str | Path | Scenario, kind: str | None = None, **options: Any) -> Statistics:
    """Describe a request stream statistically; the arguments are those of ``open_stream``."""
    stream = open_stream(source, kind, **options)
    return describe_stream(stream.workload, stream.block_size)


def fit_workload(
    source: str | Path | Scenario, kind: str | None = None, *, seed: int = 1, **options: Any
) -> WorkloadFit:
    """Fit a generator to a request stream; see ``open_stream`` and ``workload_fit.fit``."""
    stream = open_stream(source, kind, **options)
    return fit(stream.workload, stream.name, block_size=stream.block_size, seed=seed)
