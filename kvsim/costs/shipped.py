"""The machine profiles that ship with the package, as text; reading one needs ``kvsim.costs.profile``.

Those of a device that a package prices, of which there are many, are together in one file with the device's name: a
profile a line, its name first, all compressed, since they are much alike.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

_FOLDER = resources.files("kvsim.costs") / "profiles"
_TOGETHER, _ALONE = ".jsonl.gz", ".json"


@cache
def _shipped() -> dict[str, str | Traversable]:
    """The profiles by name: their texts, or their files."""
    found: dict[str, str | Traversable] = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(_TOGETHER):
            lines = gzip.decompress(file.read_bytes()).decode().splitlines()
            found |= {line.split('"', 4)[3]: line for line in lines}
        elif file.name.endswith(_ALONE):
            found[file.name.removesuffix(_ALONE)] = file
    return found


def shipped_text(name: str) -> str:
    """The JSON of a shipped profile."""
    found = _shipped()[name]
    return found if isinstance(found, str) else found.read_text(encoding="utf-8")


def is_shipped(name: str) -> bool:
    """Whether a profile of that name ships with the package; it comes before any file of that name."""
    return name in _shipped()


def shipped_names() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(_shipped())
