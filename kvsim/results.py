"""Where results go."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import UserError


def writable(folder: str | Path) -> Path:
    """The folder, made if it is not there. Raises ``UserError`` where that cannot be."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write results: {getattr(e, 'strerror', None) or e}") from None
    return target
