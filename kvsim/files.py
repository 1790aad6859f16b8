"""Files that a user names: read whole, if they are no larger than such a file can be."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import UserError

MEGABYTE = 1_000_000


def text_of(path: Path, most: int, encoding: str = "utf-8") -> str:
    """The text of a file, of which at most ``most`` bytes are read; a pipe or a device may have no end.

    Raises ``UserError`` if there are more, ``OSError`` and ``UnicodeDecodeError``.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path}: more than {most / MEGABYTE:g} MB; such a file is smaller")
    return data.decode(encoding)
