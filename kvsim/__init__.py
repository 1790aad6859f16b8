"""Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?

The public interface: the same verbs as the command line, returning results backed by pandas.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.calibration import Calibration, calibrate
    from kvsim.comparison import Comparison, compare
    from kvsim.costs import Profile, load_profile
    from kvsim.errors import Livelock, UserError
    from kvsim.llama_studies import (
        Defragmentation,
        Holes,
        KShift,
        measure_defragmentation,
        measure_holes,
        measure_shift,
    )
    from kvsim.memory import MemoryReport, memory
    from kvsim.metrics import Result
    from kvsim.plan import Plan, plan
    from kvsim.prefix_cache import PrefixStudy, prefix_cache
    from kvsim.recommend import recommend
    from kvsim.recommendation import Recommendation
    from kvsim.recording import Recording, record
    from kvsim.report import report
    from kvsim.scenario import Scenario, builtin_names, load
    from kvsim.simulation import run
    from kvsim.streams import describe_workload, fit_workload
    from kvsim.sweep import sweep
    from kvsim.sweep_file import builtin_sweeps
    from kvsim.sweep_result import SweepResult
    from kvsim.validation import Validation, validate
    from kvsim.why import Diagnosis, why
    from kvsim.workload_fit import WorkloadFit
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
    "load",
    "load_profile",
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
    "Calibration": "kvsim.calibration",
    "Comparison": "kvsim.comparison",
    "Defragmentation": "kvsim.llama_studies",
    "Diagnosis": "kvsim.why",
    "Holes": "kvsim.llama_studies",
    "KShift": "kvsim.llama_studies",
    "Livelock": "kvsim.errors",
    "MemoryReport": "kvsim.memory",
    "Plan": "kvsim.plan",
    "PrefixStudy": "kvsim.prefix_cache",
    "Profile": "kvsim.costs",
    "Recommendation": "kvsim.recommendation",
    "Recording": "kvsim.recording",
    "Result": "kvsim.metrics",
    "Scenario": "kvsim.scenario",
    "SweepResult": "kvsim.sweep_result",
    "UserError": "kvsim.errors",
    "Validation": "kvsim.validation",
    "WorkloadFit": "kvsim.workload_fit",
    "accuracy": "real_engine.accuracy",
    "builtin_names": "kvsim.scenario",
    "builtin_sweeps": "kvsim.sweep_file",
    "calibrate": "kvsim.calibration",
    "compare": "kvsim.comparison",
    "describe_workload": "kvsim.streams",
    "fit_workload": "kvsim.streams",
    "load": "kvsim.scenario",
    "load_profile": "kvsim.costs",
    "measure_defragmentation": "kvsim.llama_studies",
    "measure_holes": "kvsim.llama_studies",
    "measure_shift": "kvsim.llama_studies",
    "memory": "kvsim.memory",
    "plan": "kvsim.plan",
    "prefix_cache": "kvsim.prefix_cache",
    "recommend": "kvsim.recommend",
    "record": "kvsim.recording",
    "report": "kvsim.report",
    "run": "kvsim.simulation",
    "sweep": "kvsim.sweep",
    "validate": "kvsim.validation",
    "why": "kvsim.why",
}
"""Of each public name its module. All are imported when first asked for: the core is spared the engine, and the engine,
which needs errors and shapes alone, is spared pandas, SciPy and pydantic, which take more memory than all of it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps the verbs: importing a submodule would put it in the place of the function that has its name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
