"""What a preset is: a combination of layout, compactor, trigger and kernel that has a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from policies.origin import Origin
from policies.policy import CacheConfig, Policy

PresetGroup = Literal["standard", "papers"]
"""``standard``: what engines do, and ideas of our own. ``papers``: ideas from papers and issues, with the claims that
docs/reproduced.md holds against what they do here."""

GROUPS: tuple[PresetGroup, ...] = get_args(PresetGroup)


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy by name; calling it builds one."""

    name: str
    summary: str
    layout: str
    kernel: str
    parameters: tuple[str, ...]
    """Keys of the scenario's ``[cache]`` section that have an effect."""
    source: str
    build: Callable[[str, CacheConfig], Policy]
    compactor: str = "none"
    trigger: str = "never"
    engine: str = ""
    """The engine and version whose defaults apply where a scenario says nothing; empty for a layout of our own."""
    group: PresetGroup = "standard"
    """Those that are compared together."""
    against: str = ""
    """The preset that a paper compares its idea with, as nearly as there is one; empty for what is no such idea."""
    measured: str = ""
    """Model, device and engine on which a paper measured its idea, and the page with our own figures; else empty."""
    origin: Origin | None = None
    """Where a plug-in comes from; None if it is built in."""

    def __call__(self, config: CacheConfig) -> Policy:
        """A new policy with an empty cache. Raises ``ValueError`` where the configuration is impossible."""
        return self.build(self.name, config)
