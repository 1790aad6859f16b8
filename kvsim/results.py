"""Folders for results, and files that a user names, which are read whole if no larger than such a file can be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def writable(folder: str | Path) -> Path:
    """Make the folder, unless it exists, and return its path. Raises ``UserError`` if it cannot be made."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise UserError(f"{target}: cannot write results: {getattr(e, 'strerror', None) or e}") from None
    return target


@dataclass(frozen=True)
class ResultsFolder:
    """A folder, and what has been written to it. All methods raise ``OSError``."""

    path: Path
    written: list[Path] = field(default_factory=list)

    def add(self, name: str) -> Path:
        """Return the path of a file that is about to be written."""
        self.written.append(self.path / name)
        return self.written[-1]

    def text(self, name: str, text: str) -> None:
        """Write a text."""
        self.add(name).write_text(text, encoding="utf-8")

    def json(self, name: str, value: Any) -> None:
        """Write a value as JSON."""
        self.text(name, json.dumps(value, indent=1, allow_nan=False) + "\n")

    def table(self, name: str, table: pd.DataFrame, *, index: bool = False) -> None:
        """Write a table as CSV."""
        table.to_csv(self.add(name), index=index)

    def picture(self, name: str, draw: Callable[[], Figure | None] | None, dpi: int = 130) -> None:
        """Draw a picture to a file; with nothing to draw, remove the one of earlier results.

        That one would pass for a picture of the results it stands beside.
        """
        figure = None if draw is None else draw()
        if figure is None:
            (self.path / name).unlink(missing_ok=True)
        else:
            figure.savefig(self.add(name), dpi=dpi)


@contextmanager
def results_folder(folder: str | Path) -> Iterator[ResultsFolder]:
    """Write results to a folder, which is made unless it exists. Raises ``UserError`` if that is not possible."""
    out = ResultsFolder(writable(folder))
    try:
        yield out
    except OSError as e:
        raise UserError(f"{out.path}: cannot write results: {e.strerror or e}") from None


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
