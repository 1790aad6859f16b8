"""The named policies: presets of layout, compactor, trigger and kernel."""

from __future__ import annotations

from policies.presets.papers import PAPERS
from policies.presets.preset import GROUPS, Preset, PresetGroup
from policies.presets.standard import STANDARD

__all__ = ["ALIASES", "GROUPS", "PRESETS", "Preset", "PresetGroup", "current_name"]

PRESETS = (*STANDARD, *PAPERS)
"""All built-in presets; the six core ones come first."""

ALIASES = {
    "split-regions": "prompt-decode-regions",
    "llama.cpp-2024": "llama.cpp-b4666",
    "llama.cpp-today": "llama.cpp-b6975",
}
"""Names that presets had in the version before this one, and still answer to."""


def current_name(name: str) -> str:
    """The name that a policy has now; a name that is no alias is returned as it is."""
    return ALIASES.get(name, name)
