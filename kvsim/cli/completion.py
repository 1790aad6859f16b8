"""What a shell offers for the value of an option or an argument: names that begin with what has been typed.

A shell's completion alone calls these functions, and what has the names is imported then. Where none of them fits, the
shell offers files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from operator import methodcaller
from typing import Any

_SHORT = 4
"""Letters of a word that is found in too many questions."""

Offer = Callable[[str], list[str]]
"""What is offered for the beginning of a name."""


def _names(*places: str, of: Callable[[Any], Iterable[str]] = iter) -> Offer:
    """Offers the names that are in any of these places, each a module and what has the names there.

    What can be called is called; ``of`` gives the names of what is found.
    """

    def offered(incomplete: str) -> list[str]:
        known: dict[str, None] = {}
        for place in places:
            module, _, name = place.rpartition(".")
            found = getattr(import_module(module), name)
            known.update(dict.fromkeys(of(found() if callable(found) else found)))
        return starting(incomplete, known)

    return offered


def starting(incomplete: str, names: Iterable[str]) -> list[str]:
    """The names that begin with what has been typed."""
    return [name for name in names if name.startswith(incomplete)]


scenarios = _names("kvsim.scenario.builtin.builtin_names")
sweeps = _names("kvsim.experiments.sweep_file.builtin_sweeps")
workloads = _names("kvsim.scenario.named_workloads.NAMED")
streams = _names("kvsim.scenario.named_workloads.NAMED", "kvsim.scenario.builtin.builtin_names")
trace_kinds = _names("workloads.traces.kinds.readers")
policies = _names("policies.available")
schedulers = _names("kvsim.scenario.server_defaults.SCHEDULERS", of=methodcaller("names"))
routers = _names("kvsim.scenario.routers.ROUTERS", of=methodcaller("names"))
evictions = _names("policies.paging.eviction.EVICTION_ORDERS", of=methodcaller("names"))
profiles = _names("kvsim.costs.shipped.shipped_names", "kvsim.costs.device_profiles.device_profiles")
models = _names("kvsim.model.memory_shapes.model_names")
engine_models = _names("kvsim.model.engine_shapes.MODEL_NAMES")
storages = _names("kvsim.model.engine_shapes.STORAGES")
scenario_storages = _names("kvsim.model.engine_shapes.STORED")
weight_forms = _names("real_engine.weights.WEIGHT_FORMS")
cache_types = _names("kvsim.model.storage_types.CACHE_TYPES")
weight_types = _names("kvsim.model.storage_types.WEIGHT_TYPES")
devices = _names("kvsim.costs.devices.devices")
remedies = _names("kvsim.advice.memory.set_ups.REMEDIES")
measured_engines = _names("kvsim.costs.profile.ENGINES")
planned_engines = _names("kvsim.costs.memory_settings.PLAN_ENGINES")
recommended_engines = _names("kvsim.advice.recommend.candidates.ENGINES")
conforming_engines = _names("kvsim.engines.recordings.conformance.ENGINES")
router_packages = _names("kvsim.engines.recordings.router_replay.PACKAGES")
priced_engines = _names("kvsim.calibration.published.package_names.ENGINES")
priced_weights = _names("kvsim.calibration.published.package_names.WEIGHTS")


def policies_and_schedulers(incomplete: str) -> list[str]:
    """Installed policies, and schedulers."""
    return list(dict.fromkeys([*policies(incomplete), *schedulers(incomplete)]))


def question_words(incomplete: str) -> list[str]:
    """Words of questions that tell them apart."""
    from kvsim.advice.questions import questions

    words = (word.strip("?.,").casefold() for question in questions() for word in question.title.split())
    return starting(incomplete, dict.fromkeys(word for word in words if len(word) > _SHORT))
