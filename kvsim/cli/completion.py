"""What a shell offers for the value of an option or an argument.

Each function is called by the shell's completion alone, with what has been typed, and imports what it needs then. Where
none of its names fits, the shell offers files.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHORT = 4
"""Letters of a word that is found in too many questions."""


def scenarios(incomplete: str) -> list[str]:
    """Built-in scenarios."""
    from kvsim.scenario.builtin import builtin_names

    return starting(incomplete, builtin_names())


def sweeps(incomplete: str) -> list[str]:
    """Built-in sweeps."""
    from kvsim.experiments.sweep_file import builtin_sweeps

    return starting(incomplete, builtin_sweeps())


def streams(incomplete: str) -> list[str]:
    """Named workloads and built-in scenarios."""
    return [*workloads(incomplete), *scenarios(incomplete)]


def workloads(incomplete: str) -> list[str]:
    """Named workloads."""
    from kvsim.scenario.named_workloads import NAMED

    return starting(incomplete, NAMED)


def trace_kinds(incomplete: str) -> list[str]:
    """Kinds of traces."""
    from workloads.traces.kinds import readers

    return starting(incomplete, readers())


def policies(incomplete: str) -> list[str]:
    """Installed policies."""
    from policies import available

    return starting(incomplete, available())


def policies_and_schedulers(incomplete: str) -> list[str]:
    """Installed policies, and schedulers."""
    return list(dict.fromkeys([*policies(incomplete), *schedulers(incomplete)]))


def schedulers(incomplete: str) -> list[str]:
    """Schedulers."""
    from kvsim.scenario.server_defaults import SCHEDULERS

    return starting(incomplete, SCHEDULERS.names())


def evictions(incomplete: str) -> list[str]:
    """Orders of eviction."""
    from policies.paging.eviction import EVICTION_ORDERS

    return starting(incomplete, EVICTION_ORDERS.names())


def profiles(incomplete: str) -> list[str]:
    """Shipped profiles, and those of the user."""
    from kvsim.costs.device_profiles import device_profiles
    from kvsim.costs.shipped import shipped_names

    return starting(incomplete, dict.fromkeys([*shipped_names(), *device_profiles()]))


def models(incomplete: str) -> list[str]:
    """Well-known models."""
    from kvsim.model.memory_shapes import model_names

    return starting(incomplete, model_names())


def engine_models(incomplete: str) -> list[str]:
    """Models that our own engine has."""
    from kvsim.model.engine_shapes import MODEL_NAMES

    return starting(incomplete, MODEL_NAMES)


def storages(incomplete: str) -> list[str]:
    """Storage types of our own engine's K and V."""
    from kvsim.model.engine_shapes import STORAGES

    return starting(incomplete, STORAGES)


def weight_forms(incomplete: str) -> list[str]:
    """Storage types of our own engine's weights."""
    from real_engine.weights import WEIGHT_FORMS

    return starting(incomplete, WEIGHT_FORMS)


def cache_types(incomplete: str) -> list[str]:
    """Storage types of the engines' K and V."""
    from kvsim.model.storage_types import CACHE_TYPES

    return starting(incomplete, CACHE_TYPES)


def weight_types(incomplete: str) -> list[str]:
    """Storage types of the engines' weights."""
    from kvsim.model.storage_types import WEIGHT_TYPES

    return starting(incomplete, WEIGHT_TYPES)


def measured_engines(incomplete: str) -> list[str]:
    """Engines that run here."""
    from kvsim.costs.profile import ENGINES

    return starting(incomplete, ENGINES)


def devices(incomplete: str) -> list[str]:
    """GPUs that are known by name."""
    from kvsim.costs.devices import devices

    return starting(incomplete, devices())


def priced_engines(incomplete: str) -> list[str]:
    """Engines whose passes on GPUs can be priced."""
    from kvsim.calibration.published.package_names import ENGINES

    return starting(incomplete, ENGINES)


def priced_weights(incomplete: str) -> list[str]:
    """Types of weights whose passes on GPUs can be priced."""
    from kvsim.calibration.published.package_names import WEIGHTS

    return starting(incomplete, WEIGHTS)


def planned_engines(incomplete: str) -> list[str]:
    """Engines whose memory can be planned."""
    from kvsim.costs.memory_settings import PLAN_ENGINES

    return starting(incomplete, PLAN_ENGINES)


def recommended_engines(incomplete: str) -> list[str]:
    """Engines that settings can be recommended for."""
    from kvsim.advice.recommend.candidates import ENGINES

    return starting(incomplete, ENGINES)


def conforming_engines(incomplete: str) -> list[str]:
    """Engines whose recordings can be read."""
    from kvsim.engines.recordings.conformance import ENGINES

    return starting(incomplete, ENGINES)


def remedies(incomplete: str) -> list[str]:
    """Remedies against an engine's use of memory."""
    from kvsim.advice.memory.set_ups import REMEDIES

    return starting(incomplete, REMEDIES)


def question_words(incomplete: str) -> list[str]:
    """Words of questions that tell them apart."""
    from kvsim.advice.questions import questions

    words = (word.strip("?.,").casefold() for question in questions() for word in question.title.split())
    return starting(incomplete, dict.fromkeys(word for word in words if len(word) > _SHORT))


def starting(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that begin with what has been typed."""
    return [name for name in names if name.startswith(incomplete)]
