"""Folders for results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def writable(folder: str | Path) -> Path:
    """Make the folder, unless it exists, and return its path. Raises ``UserError`` if it cannot be made."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write results: {getattr(e, 'strerror', None) or e}") from None
    return target


def save_picture(path: Path, draw: Callable[[], Figure] | None) -> list[Path]:
    """Draw a picture to a file, and return the file; with nothing to draw, remove the one of earlier results.

    That one would pass for a picture of the results it stands beside. Raises ``OSError``.
    """
    if draw is None:
        path.unlink(missing_ok=True)
        return []
    draw().savefig(path, dpi=130)
    return [path]
