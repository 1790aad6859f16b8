"""What the pages share: reading what was saved, and how to repeat it."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import kvsim
from kvsim.errors import UserError
from kvsim.reports.page import Section

_VERSIONS = ("numpy", "scipy", "simpy", "pandas")


def read(path: Path) -> str:
    """A text file. Raises ``UserError``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file with one JSON object. Raises ``UserError``."""
    try:
        told = json.loads(read(path))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not JSON ({e})") from None
    if not isinstance(told, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return told


def reproduce(command: str, listings: Sequence[tuple[str, str]]) -> Section:
    """The last part of a page."""
    versions = [f"kvsim {kvsim.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in _VERSIONS]
    return Section(
        "To repeat it",
        ["Every default is filled in. One seed gives one result."],
        listings=[*listings, ("Command and versions", "\n".join([command, "", *versions]))],
    )


def footer() -> str:
    """Who made the page, and what its figures are."""
    return (
        f"Made by kvsim {kvsim.__version__}. Times are predictions; the machine profile says how far they may be off."
    )
