"""The presets of ideas from papers and issues: a module for each section of docs/reproduced.md."""

from __future__ import annotations

from policies.presets.papers import searches, token_eviction
from policies.presets.preset import Preset

PAPERS: tuple[Preset, ...] = (*token_eviction.PRESETS, *searches.PRESETS)
"""In the order of docs/reproduced.md."""
