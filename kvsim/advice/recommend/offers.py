"""What is not changed unasked, and what it would bring: weights in another type, which are of another quality."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsim.advice.recommend.recommendation import Recommendation
from kvsim.advice.recommend.search import Effort
from kvsim.advice.recommend.trials import FindLargestLoad, LoadSearch, TrialRun
from kvsim.costs.memory_settings import Engine
from kvsim.errors import UserError
from kvsim.experiments.workers import map_unordered
from kvsim.model.cache_groups import MemoryShape
from kvsim.scenario.scenario import load_scenario

_OFFERED: dict[Engine, str] = {"vllm": "fp8", "llamacpp": "q8_0"}
"""Weights that are offered where those of 16 bits do not meet the service level for sure."""
_REPLICATIONS, _STEPS = 2, 3


def with_weights_offered(found: Recommendation, shape: MemoryShape, engine: Engine, effort: Effort) -> Recommendation:
    """The answer with a line on what its first setting would sustain with narrower weights, if that is worth knowing.

    It is not where the service level is met for sure, nor where the weights are narrow already.
    """
    if found.interrupted or not found.best or found.best[0].verdict == "surely" or not found.best[0].loads:
        return found
    first, weights = found.best[0], _OFFERED[engine]
    if shape.default_type not in ("bf16", "f16", "f32") or first.sustained is None:
        return found
    try:
        scenario = load_scenario(first.candidate.scenario, machine__weights=weights)
    except UserError:
        return found
    about = np.log2(first.sustained.value)
    searches = [
        LoadSearch(TrialRun(0, replication, scenario, 1.0, 1.0), about=float(about))
        for replication in range(min(_REPLICATIONS, len(first.loads)))
    ]
    find = FindLargestLoad(found.traffic, found.slo, _STEPS)
    loads = {trial.replication: load for trial, load, _ in map_unordered(find, searches, effort.workers)}
    if not all(loads.values()):
        return found
    gain = float(np.exp(np.mean([np.log(load / first.loads[replication]) for replication, load in loads.items()])))
    if gain <= 1:
        return found
    load = found.load_in_words(gain * first.sustained.value)
    line = f"With --weights {weights}, which are of another quality, it would sustain about {load}."
    return replace(found, offer=line)
