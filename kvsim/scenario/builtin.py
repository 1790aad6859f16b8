"""The scenarios that ship with the package; listing them needs none of what reading them needs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

_FOLDER = resources.files("kvsim.scenario") / "scenarios"


def builtin_names() -> list[str]:
    """The names of the built-in scenarios."""
    return sorted(p.name.removesuffix(".toml") for p in _FOLDER.iterdir() if p.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """A built-in scenario as TOML."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def is_trace(name: str) -> bool:
    """Whether what a user names is a trace file rather than a scenario: neither built in nor TOML."""
    return name not in builtin_names() and not name.endswith(".toml") and "." in Path(name).name
