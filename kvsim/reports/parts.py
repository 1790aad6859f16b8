"""Parts that all pages share: reading saved files, and the section on reproducing the results."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvsim
from kvsim.errors import UserError
from kvsim.experiments.policy_code import plugins_line
from kvsim.reports.page import Figure, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_VERSIONS = ("numpy", "scipy", "simpy", "pandas")


def read(path: Path) -> str:
    """Read a text file. Raises ``UserError``."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ``UserError``."""
    try:
        saved = json.loads(read(path))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not JSON ({e})") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path}: a JSON object is expected")
    return saved


def picture(path: Path, title: str, draw: Callable[[], Drawing]) -> Figure:
    """The picture that was saved with the results; drawn from them if none was."""
    if path.is_file():
        return Figure.of_png(title, path.read_bytes(), title, wide=True)
    return Figure.of(title, draw(), title, wide=True)


def reproduce(command: str, listings: Sequence[tuple[str, str]]) -> Section:
    """Build the last section of a page: the command, its input, and the versions of the software."""
    versions = [f"kvsim {kvsim.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in _VERSIONS]
    return Section(
        "How to reproduce this",
        ["All defaults are filled in. The same seed gives the same result."],
        listings=[*listings, ("Command and versions", "\n".join([command, "", *versions]))],
    )


def plugin_options(saved: dict[str, Any]) -> str:
    """The options that load again the single files whose policies were used."""
    packages = dict.fromkeys(each["package"] for each in saved.get("plugins", ()))
    return "".join(f" --plugin {shlex.quote(package)}" for package in packages if package.endswith(".py"))


def plugins(saved: dict[str, Any]) -> list[str]:
    """Say which policies are plug-ins, and of which versions; nothing if none is, or in results of earlier versions."""
    line = plugins_line(saved.get("plugins", ()))
    return [f"{line[:1].upper()}{line[1:]}."] if line else []


def footer() -> str:
    """Build the footer: the version of kvsim, and a note that times are predictions."""
    return f"Written by kvsim {kvsim.__version__}. Times are predictions; the machine profile states their error."
