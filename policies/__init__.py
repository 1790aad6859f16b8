"""KV-cache allocation policies: where each token's K and V live, and what must move.

Knows no clock, no bytes and no model; imports neither ``kvsim`` nor ``real_engine``.
"""

from policies.policy import CacheConfig, Kernel, Policy, PolicyFactory
from policies.presets import available
from policies.vocabulary import (
    NO_MOVES,
    CellMap,
    Chunk,
    MicroBatch,
    Moves,
    NoSlot,
    Reads,
    SequencePlan,
    Usage,
    View,
)

__all__ = [
    "NO_MOVES",
    "CacheConfig",
    "CellMap",
    "Chunk",
    "Kernel",
    "MicroBatch",
    "Moves",
    "NoSlot",
    "Policy",
    "PolicyFactory",
    "Reads",
    "SequencePlan",
    "Usage",
    "View",
    "available",
]
