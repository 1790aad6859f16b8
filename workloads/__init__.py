"""Workloads: requests that are generated, or read from traces.

This package knows neither the server nor the cache, and imports neither ``kvsim`` nor ``real_engine``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For type checkers; a test compares these imports with _PUBLIC.
    from workloads.generators.gaps import Draw as Draw
    from workloads.generators.gaps import Gaps as Gaps
    from workloads.generators.gaps import empirical_gaps as empirical_gaps
    from workloads.generators.gaps import gamma_gaps as gamma_gaps
    from workloads.generators.gaps import no_gaps as no_gaps
    from workloads.generators.gaps import poisson_gaps as poisson_gaps
    from workloads.generators.gaps import weibull_gaps as weibull_gaps
    from workloads.generators.joint import GivenPrompt as GivenPrompt
    from workloads.generators.lengths import Capped as Capped
    from workloads.generators.lengths import Empirical as Empirical
    from workloads.generators.lengths import Fixed as Fixed
    from workloads.generators.lengths import Gamma as Gamma
    from workloads.generators.lengths import Lengths as Lengths
    from workloads.generators.lengths import Lognormal as Lognormal
    from workloads.generators.lengths import Zipf as Zipf
    from workloads.generators.mix import Mix as Mix
    from workloads.generators.mix import part_seed as part_seed
    from workloads.generators.modulated import diurnal_gaps as diurnal_gaps
    from workloads.generators.modulated import modulated_gaps as modulated_gaps
    from workloads.generators.sessions import MAX_TURNS as MAX_TURNS
    from workloads.generators.sessions import Sessions as Sessions
    from workloads.generators.sessions import Tools as Tools
    from workloads.generators.synthetic import Synthetic as Synthetic
    from workloads.limited import LimitedOutputs as LimitedOutputs
    from workloads.request import BadRowError as BadRowError
    from workloads.request import MissingExtraError as MissingExtraError
    from workloads.request import Prefixes as Prefixes
    from workloads.request import Request as Request
    from workloads.request import Segment as Segment
    from workloads.request import Workload as Workload
    from workloads.request import WorkloadError as WorkloadError
    from workloads.request import answer_of as answer_of
    from workloads.rng import named_rng as named_rng
    from workloads.traces.azure import AzureTrace as AzureTrace
    from workloads.traces.burstgpt import BurstGptTrace as BurstGptTrace
    from workloads.traces.kinds import KINDS as KINDS
    from workloads.traces.kinds import open_trace as open_trace
    from workloads.traces.kinds import sniff as sniff
    from workloads.traces.mooncake import MooncakeTrace as MooncakeTrace
    from workloads.traces.observed import ObservedTrace as ObservedTrace
    from workloads.traces.ragpulse import RagPulseTrace as RagPulseTrace
    from workloads.traces.recorded import RecordedTrace as RecordedTrace
    from workloads.traces.table import TableTrace as TableTrace
    from workloads.traces.table_row import Columns as Columns
    from workloads.traces.trace import Trace as Trace
    from workloads.traces.weka import WekaTrace as WekaTrace

_PUBLIC: dict[str, tuple[str, ...]] = {
    "workloads.generators.gaps": (
        "Draw",
        "Gaps",
        "empirical_gaps",
        "gamma_gaps",
        "no_gaps",
        "poisson_gaps",
        "weibull_gaps",
    ),
    "workloads.generators.joint": ("GivenPrompt",),
    "workloads.generators.lengths": ("Capped", "Empirical", "Fixed", "Gamma", "Lengths", "Lognormal", "Zipf"),
    "workloads.generators.mix": ("Mix", "part_seed"),
    "workloads.generators.modulated": ("diurnal_gaps", "modulated_gaps"),
    "workloads.generators.sessions": ("MAX_TURNS", "Sessions", "Tools"),
    "workloads.generators.synthetic": ("Synthetic",),
    "workloads.limited": ("LimitedOutputs",),
    "workloads.request": (
        "BadRowError",
        "MissingExtraError",
        "Prefixes",
        "Request",
        "Segment",
        "Workload",
        "WorkloadError",
        "answer_of",
    ),
    "workloads.rng": ("named_rng",),
    "workloads.traces.azure": ("AzureTrace",),
    "workloads.traces.burstgpt": ("BurstGptTrace",),
    "workloads.traces.kinds": ("KINDS", "open_trace", "sniff"),
    "workloads.traces.mooncake": ("MooncakeTrace",),
    "workloads.traces.observed": ("ObservedTrace",),
    "workloads.traces.ragpulse": ("RagPulseTrace",),
    "workloads.traces.recorded": ("RecordedTrace",),
    "workloads.traces.table": ("TableTrace",),
    "workloads.traces.table_row": ("Columns",),
    "workloads.traces.trace": ("Trace",),
    "workloads.traces.weka": ("WekaTrace",),
}
"""The public names, by the module that has them; it is imported when one of them is first used."""

_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workloads' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
