"""The named policies: presets of layout, compactor, trigger and kernel, and those that others plug in."""

from __future__ import annotations

from importlib.metadata import entry_points

from policies.paged import PagedPolicy
from policies.policy import CacheConfig, Policy, PolicyFactory
from policies.unified import UnifiedPolicy

ENTRY_POINT_GROUP = "kvsim.policies"


def contiguous(config: CacheConfig) -> Policy:
    """One run of cells for each micro-batch, first fit from a moving head; nothing is ever moved.

    llama.cpp of 2024 without defragmentation.
    """
    return UnifiedPolicy("contiguous", config)


def paged(config: CacheConfig) -> Policy:
    """Fixed blocks and a block table for each sequence, no prefix cache. vLLM."""
    return PagedPolicy("paged", config)


def available() -> dict[str, PolicyFactory]:
    """Every policy that is installed, by name: our own first, then others' in order of name."""
    found: dict[str, PolicyFactory] = {"contiguous": contiguous, "paged": paged}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        if point.name not in found:
            found[point.name] = point.load()
    return found
