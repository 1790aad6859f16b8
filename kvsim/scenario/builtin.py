"""The scenarios that ship with the package; listing them needs none of what reading them needs."""

from __future__ import annotations

from importlib import resources

_FOLDER = resources.files("kvsim.scenario") / "scenarios"


def builtin_names() -> list[str]:
    """The names of the built-in scenarios."""
    return sorted(p.name.removesuffix(".toml") for p in _FOLDER.iterdir() if p.name.endswith(".toml"))


def builtin_text(name: str) -> str:
    """A built-in scenario as TOML."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
