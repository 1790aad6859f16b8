"""Which KV-cache allocation policy, with which settings, will serve my traffic on my machine, and why?

The public interface: the same verbs as the command line, returning results backed by pandas.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For type checkers; a test compares these imports with _PUBLIC.
    from kvsim.advice.memory.set_ups import MemoryReport as MemoryReport
    from kvsim.advice.memory.set_ups import memory as memory
    from kvsim.advice.recommend.device_comparison import DeviceComparison as DeviceComparison
    from kvsim.advice.recommend.recommend import recommend as recommend
    from kvsim.advice.recommend.recommendation import Recommendation as Recommendation
    from kvsim.advice.why.diagnosis import Diagnosis as Diagnosis
    from kvsim.advice.why.diagnosis import why as why
    from kvsim.advice.workload_fit.fit import WorkloadFit as WorkloadFit
    from kvsim.advice.workload_fit.request_source import describe_workload as describe_workload
    from kvsim.advice.workload_fit.request_source import fit_workload as fit_workload
    from kvsim.calibration.run import Calibration as Calibration
    from kvsim.calibration.run import calibrate as calibrate
    from kvsim.costs.load_profile import load_profile as load_profile
    from kvsim.costs.memory_plan import Plan as Plan
    from kvsim.costs.memory_plan import plan as plan
    from kvsim.costs.profile import Profile as Profile
    from kvsim.engines.live.engine_recording import Recording as Recording
    from kvsim.engines.live.engine_recording import record as record
    from kvsim.engines.live.engine_validation import Validation as Validation
    from kvsim.engines.live.engine_validation import validate as validate
    from kvsim.engines.published.validation import PublishedValidation as PublishedValidation
    from kvsim.engines.published.validation import validate_published as validate_published
    from kvsim.engines.recordings.validation import RecordedValidation as RecordedValidation
    from kvsim.engines.recordings.validation import validate_recorded as validate_recorded
    from kvsim.errors import Livelock as Livelock
    from kvsim.errors import UserError as UserError
    from kvsim.experiments.comparison import Comparison as Comparison
    from kvsim.experiments.comparison import compare as compare
    from kvsim.experiments.prefix_cache import PrefixStudy as PrefixStudy
    from kvsim.experiments.prefix_cache import prefix_cache as prefix_cache
    from kvsim.experiments.sweep import sweep as sweep
    from kvsim.experiments.sweep_file import builtin_sweeps as builtin_sweeps
    from kvsim.experiments.sweep_result import SweepResult as SweepResult
    from kvsim.reports.sources import report as report
    from kvsim.scenario.builtin import builtin_names as builtin_names
    from kvsim.scenario.scenario import Scenario as Scenario
    from kvsim.scenario.scenario import load_scenario as load_scenario
    from kvsim.simulation.result import Result as Result
    from kvsim.simulation.run import run as run
    from real_engine.accuracy import Accuracy as Accuracy
    from real_engine.accuracy import accuracy as accuracy
    from real_engine.eviction_cost import EvictionCost as EvictionCost
    from real_engine.eviction_cost import EvictionSetting as EvictionSetting
    from real_engine.eviction_cost import eviction_cost as eviction_cost

__version__ = "0.1.0"


def _load_alone(module: str) -> None:
    """Load a module from beside this package, without the package that it is in."""
    if module not in sys.modules:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = spec_from_file_location(module, os.path.join(folder, *module.split(".")) + ".py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])


# First, since it decides whether compiled modules are used; alone, since its package loads NumPy, which takes long.
_load_alone("policies.compiled")

_PUBLIC: dict[str, tuple[str, ...]] = {
    "kvsim.advice.recommend.device_comparison": ("DeviceComparison",),
    "kvsim.advice.memory.set_ups": ("MemoryReport", "memory"),
    "kvsim.costs.memory_plan": ("Plan", "plan"),
    "kvsim.advice.recommend.recommend": ("recommend",),
    "kvsim.advice.recommend.recommendation": ("Recommendation",),
    "kvsim.advice.workload_fit.request_source": ("describe_workload", "fit_workload"),
    "kvsim.advice.why.diagnosis": ("Diagnosis", "why"),
    "kvsim.advice.workload_fit.fit": ("WorkloadFit",),
    "kvsim.calibration.run": ("Calibration", "calibrate"),
    "kvsim.costs.load_profile": ("load_profile",),
    "kvsim.costs.profile": ("Profile",),
    "kvsim.engines.published.validation": ("PublishedValidation", "validate_published"),
    "kvsim.engines.recordings.validation": ("RecordedValidation", "validate_recorded"),
    "kvsim.engines.live.engine_recording": ("Recording", "record"),
    "kvsim.engines.live.engine_validation": ("Validation", "validate"),
    "kvsim.errors": ("Livelock", "UserError"),
    "kvsim.experiments.comparison": ("Comparison", "compare"),
    "kvsim.experiments.prefix_cache": ("PrefixStudy", "prefix_cache"),
    "kvsim.experiments.sweep": ("sweep",),
    "kvsim.experiments.sweep_file": ("builtin_sweeps",),
    "kvsim.experiments.sweep_result": ("SweepResult",),
    "kvsim.reports.sources": ("report",),
    "kvsim.scenario.builtin": ("builtin_names",),
    "kvsim.scenario.scenario": ("Scenario", "load_scenario"),
    "kvsim.simulation.result": ("Result",),
    "kvsim.simulation.run": ("run",),
    "real_engine.accuracy": ("Accuracy", "accuracy"),
    "real_engine.eviction_cost": ("EvictionCost", "EvictionSetting", "eviction_cost"),
}
"""The public names, by the module that has them.

A module is imported when one of its names is first used: ``real_engine`` imports ``kvsim.errors``,
``kvsim.installation`` and ``kvsim.model`` alone, and must not load pandas, SciPy and pydantic, which take more memory
than the whole engine.
"""

_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

_ALIASES = {"load": "load_scenario"}
"""Former names, kept for one version."""

__all__ = sorted(_HOMES)


_BESIDE = ("policies", "workloads", "real_engine")
"""The packages that are installed beside this one."""


def hidden_package() -> str | None:
    """Say in a line which of our packages another module of its name hides, found first by Python; None if none."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in _BESIDE:
        ours = os.path.join(folder, name)
        found = _found_as(name)
        if found is None or not os.path.isdir(ours) or os.path.realpath(found) == os.path.realpath(ours):
            continue
        return (
            f"{found} hides a package of kvsim, since Python finds it before {ours}: rename it, "
            "start in another folder, or take its folder off PYTHONPATH"
        )
    return None


def _found_as(name: str) -> str | None:
    """The folder of the package, or the file of the module, that Python finds under a name; None if there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # It has been imported, or made, without saying where from.
        return getattr(sys.modules[name], "__file__", None) or f"a module {name!r} made by the program"
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or ()), spec.origin)


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    if (hidden := hidden_package()) is not None:
        raise ImportError(hidden)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
