"""The presets of ideas from papers and issues: a module for each section of docs/reproduced.md."""

from __future__ import annotations

from policies.presets.papers import (
    admission,
    radix_tree,
    searches,
    token_eviction,
    two_level_pages,
    virtual_memory,
    workload_aware,
)
from policies.presets.preset import Preset

PAPERS: tuple[Preset, ...] = (
    *admission.PRESETS,
    *virtual_memory.PRESETS,
    *two_level_pages.PRESETS,
    *radix_tree.PRESETS,
    *token_eviction.PRESETS,
    *workload_aware.PRESETS,
    *searches.PRESETS,
)
"""In the order of docs/reproduced.md."""
