"""Folders for results."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import UserError


def writable(folder: str | Path) -> Path:
    """Make the folder, unless it exists, and return its path. Raises ``UserError`` if it cannot be made."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write results: {getattr(e, 'strerror', None) or e}") from None
    return target
