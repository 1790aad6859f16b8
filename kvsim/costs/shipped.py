"""The machine profiles that ship with the package, as files; reading one needs ``kvsim.costs.profile``."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

_FOLDER = resources.files("kvsim.costs") / "profiles"


def shipped_file(name: str) -> Traversable:
    """The file of a shipped profile."""
    return _FOLDER / f"{name}.json"


def is_shipped(name: str) -> bool:
    """Whether a profile of that name ships with the package; it comes before any file of that name."""
    return "/" not in name and "\0" not in name and shipped_file(name).is_file()


def shipped_names() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(p.name.removesuffix(".json") for p in _FOLDER.iterdir() if p.name.endswith(".json"))
