"""Routers: which of several servers gets a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsim.scenario.routers import ROUTERS
from kvsim.simulation.cluster.routers.base import CountingRouter, Prompt, Router, ServerLoad
from kvsim.simulation.cluster.routers.cache_aware import SglangRouter, VllmRouter
from kvsim.simulation.cluster.routers.clairvoyant import Clairvoyant
from kvsim.simulation.cluster.routers.hash_ring import ConsistentHash
from kvsim.simulation.cluster.routers.plain import LeastLoad, LeastTokens, PowerOfTwo, RandomChoice, RoundRobin
from kvsim.simulation.cluster.routers.prefix_hash import PrefixHash
from kvsim.simulation.cluster.routers.prefix_scores import LlmD, ProductionStack
from kvsim.simulation.cluster.routers.smg import SmgCacheAware, SmgLeastLoad
from kvsim.simulation.cluster.routers.sticky_least_loaded import StickyLeastLoaded
from kvsim.simulation.cluster.routers.vllm_data_parallel import VllmDataParallel

_BUILT_IN: dict[str, Callable[..., Router]] = {
    "round-robin": RoundRobin,
    "random": RandomChoice,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "least-tokens": LeastTokens,
    "consistent-hash": ConsistentHash,
    "prefix-hash": PrefixHash,
    "sticky-least-loaded": StickyLeastLoaded,
    "vllm-router/cache_aware": VllmRouter,
    "sglang-router/cache_aware": SglangRouter,
    "smg/cache_aware": SmgCacheAware,
    "smg/least_load": SmgLeastLoad,
    "vllm/data-parallel": VllmDataParallel,
    "production-stack/prefix-aware": ProductionStack,
    "llm-d": LlmD,
    "clairvoyant": Clairvoyant,
}


def make_router(name: str, servers: int, rng: np.random.Generator, **settings: Any) -> Router:
    """The router of a name; ``settings``: what it takes besides, such as ``truth`` of the clairvoyant one.

    Raises ``ValueError`` with a line that lists what there is.
    """
    made: Callable[..., Router] = _BUILT_IN.get(name) or ROUTERS.added(name)
    return made(servers, rng, **settings)


__all__ = ["CountingRouter", "Prompt", "Router", "ServerLoad", "make_router"]
