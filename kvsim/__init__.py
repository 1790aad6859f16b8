"""Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?

The public interface: the same verbs as the command line, returning results backed by pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.advice.memory import MemoryReport, memory
    from kvsim.advice.plan import Plan, plan
    from kvsim.advice.recommend import recommend
    from kvsim.advice.recommendation import Recommendation
    from kvsim.advice.request_source import describe_workload, fit_workload
    from kvsim.advice.why import Diagnosis, why
    from kvsim.advice.workload_fit import WorkloadFit
    from kvsim.calibration.run import Calibration, calibrate
    from kvsim.costs.profile import Profile, load_profile
    from kvsim.engines.llama_studies import measure_defragmentation, measure_holes, measure_shift
    from kvsim.engines.llama_study_results import Defragmentation, Holes, KShift
    from kvsim.engines.recording import Recording, record
    from kvsim.engines.validation import Validation, validate
    from kvsim.errors import Livelock, UserError
    from kvsim.experiments.comparison import Comparison, compare
    from kvsim.experiments.prefix_cache import PrefixStudy, prefix_cache
    from kvsim.experiments.sweep import sweep
    from kvsim.experiments.sweep_file import builtin_sweeps
    from kvsim.experiments.sweep_result import SweepResult
    from kvsim.reports.sources import report
    from kvsim.scenario.scenario import Scenario, builtin_names, load_scenario
    from kvsim.simulation.result import Result
    from kvsim.simulation.run import run
    from real_engine.accuracy import Accuracy, accuracy

__version__ = "0.1.0"

__all__ = [
    "Accuracy",
    "Calibration",
    "Comparison",
    "Defragmentation",
    "Diagnosis",
    "Holes",
    "KShift",
    "Livelock",
    "MemoryReport",
    "Plan",
    "PrefixStudy",
    "Profile",
    "Recommendation",
    "Recording",
    "Result",
    "Scenario",
    "SweepResult",
    "UserError",
    "Validation",
    "WorkloadFit",
    "accuracy",
    "builtin_names",
    "builtin_sweeps",
    "calibrate",
    "compare",
    "describe_workload",
    "fit_workload",
    "load_profile",
    "load_scenario",
    "measure_defragmentation",
    "measure_holes",
    "measure_shift",
    "memory",
    "plan",
    "prefix_cache",
    "recommend",
    "record",
    "report",
    "run",
    "sweep",
    "validate",
    "why",
]

_HOMES = {
    "Accuracy": "real_engine.accuracy",
    "Calibration": "kvsim.calibration.run",
    "Comparison": "kvsim.experiments.comparison",
    "Defragmentation": "kvsim.engines.llama_study_results",
    "Diagnosis": "kvsim.advice.why",
    "Holes": "kvsim.engines.llama_study_results",
    "KShift": "kvsim.engines.llama_study_results",
    "Livelock": "kvsim.errors",
    "MemoryReport": "kvsim.advice.memory",
    "Plan": "kvsim.advice.plan",
    "PrefixStudy": "kvsim.experiments.prefix_cache",
    "Profile": "kvsim.costs.profile",
    "Recommendation": "kvsim.advice.recommendation",
    "Recording": "kvsim.engines.recording",
    "Result": "kvsim.simulation.result",
    "Scenario": "kvsim.scenario.scenario",
    "SweepResult": "kvsim.experiments.sweep_result",
    "UserError": "kvsim.errors",
    "Validation": "kvsim.engines.validation",
    "WorkloadFit": "kvsim.advice.workload_fit",
    "accuracy": "real_engine.accuracy",
    "builtin_names": "kvsim.scenario.scenario",
    "builtin_sweeps": "kvsim.experiments.sweep_file",
    "calibrate": "kvsim.calibration.run",
    "compare": "kvsim.experiments.comparison",
    "describe_workload": "kvsim.advice.request_source",
    "fit_workload": "kvsim.advice.request_source",
    "load_scenario": "kvsim.scenario.scenario",
    "load_profile": "kvsim.costs.profile",
    "measure_defragmentation": "kvsim.engines.llama_studies",
    "measure_holes": "kvsim.engines.llama_studies",
    "measure_shift": "kvsim.engines.llama_studies",
    "memory": "kvsim.advice.memory",
    "plan": "kvsim.advice.plan",
    "prefix_cache": "kvsim.experiments.prefix_cache",
    "recommend": "kvsim.advice.recommend",
    "record": "kvsim.engines.recording",
    "report": "kvsim.reports.sources",
    "run": "kvsim.simulation.run",
    "sweep": "kvsim.experiments.sweep",
    "validate": "kvsim.engines.validation",
    "why": "kvsim.advice.why",
}
"""Of each public name its module. All are imported when first asked for: the core is spared the engine, and the engine,
which needs errors and shapes alone, is spared pandas, SciPy and pydantic, which take more memory than all of it."""


_ALIASES = {"load": "load_scenario"}
"""Former names, for one version more."""


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
